"""KDA kernels in Triton's interpreter against the fp64 recurrence (kernels.md §1–§3), and the fault list K-01 … K-18.

The interpreter computes what the kernels say, in fp32, fp16 and bf16; docs/kernels.md has the errors on a GPU.
"""

import pytest
import torch

pytest.importorskip("triton")

from numerics import relative_error
from tercet.errors import ConfigError, ShapeError, UnsupportedError
from tercet.ops import fused_kda, kda_gate, l2_norm, use_tier
from tercet.ops.kda import fused_kda_export, reference, triton_, triton_plan
from tercet.ops.kda.triton_plan import use_pieces

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked corners overflow and are thrown away

NAMES = ("o", "final", "q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
LIMITS = {"o": 5e-3, "final": 2e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "z": 1e-2, "b": 1e-2, "state": 5e-3}
CANCELLING = 2e-2  # A_log and dt_bias, against the root sum square of their terms (kernels.md §18)


def draw(lengths, heads=1, key=16, value=16, dtype=torch.float32):
    tokens = sum(lengths)
    rows = [torch.randn(1, tokens, heads, d).to(dtype) for d in (key, key, value, key)]
    rows.append(torch.randn(1, tokens, heads).to(dtype))
    gate = [0.3 * torch.randn(heads), torch.randn(heads, key)]
    return [*rows, *gate, torch.randn(len(lengths), heads, value, key)]


def bounds(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def recurrence(q, k, v, z, b, A_log, dt_bias, state, lengths):
    g = kda_gate(z, A_log, dt_bias, lower_bound=-5.0)
    unit = (l2_norm(q), l2_norm(k))
    cu = bounds(lengths)
    return reference.kda(*unit, v, g, b.sigmoid(), scale=q.shape[-1] ** -0.5, state=state, cu_seqlens=cu)


def kernel(inputs, lengths, state=True):
    with use_tier("triton"):
        start = inputs[7] if state else None
        return fused_kda(*inputs[:7], state=start, cu_seqlens=bounds(lengths))


def gradients(run, inputs, lengths, dtype=None):
    leaves = [x.to(dtype or x.dtype).requires_grad_() for x in inputs]
    o, final = run(leaves, lengths)
    generator = torch.Generator().manual_seed(1)
    d_o, d_final = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, final))
    grads = torch.autograd.grad(((o * d_o).sum() + (final * d_final).sum()), leaves)
    return o.detach(), final.detach(), *grads


def formula(inputs, lengths):
    return recurrence(*inputs, lengths)


def compare(inputs, lengths, o_limit=5e-3, state_limit=2e-3):
    o, final = kernel(inputs, lengths)
    o_ref, final_ref = formula([x.double() for x in inputs], lengths)
    assert relative_error(o, o_ref) < o_limit
    assert relative_error(final, final_ref) < state_limit


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31])
def test_lengths(length):
    compare(draw((length,)), (length,))


def test_packed_with_empty_sequences():
    lengths = (0, 5, 0, 18, 1, 0)
    inputs = draw(lengths, heads=2, value=32)
    compare(inputs, lengths)
    _, final = kernel(inputs, lengths)
    for n in (0, 2, 5):
        assert torch.equal(final[n], inputs[7][n])


def test_packed_equals_separate():
    lengths = (7, 17)
    inputs = draw(lengths)
    o, final = kernel(inputs, lengths)
    for n, rows in enumerate((slice(0, 7), slice(7, 24))):
        alone = [*(x[:, rows] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
        o_alone, final_alone = kernel(alone, lengths[n : n + 1])
        assert relative_error(o[:, rows], o_alone) < 2e-3  # the unit of fp16 is shared by a sequence, not by a batch
        assert relative_error(final[n], final_alone[0]) < 1e-3


@pytest.mark.parametrize("logit", [-1e4, -12.0, 12.0, 1e4])
def test_gate_at_both_ends(logit):
    inputs = draw((20,))
    inputs[3] = torch.full_like(inputs[3], logit)
    compare(inputs, (20,))


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e4, 1e9])
def test_values_of_any_size(scale):
    inputs = draw((20,))
    inputs[2] *= scale
    inputs[7] *= scale
    compare(inputs, (20,))


def test_huge_state():
    inputs = draw((20,))
    inputs[7] *= 1e3
    compare(inputs, (20,))


@pytest.mark.parametrize("cut", [1, 15, 16, 20])
def test_split_at_any_point(cut):
    inputs = draw((33,))
    whole, final = kernel(inputs, (33,))
    first, middle = kernel([*(x[:, :cut] for x in inputs[:5]), *inputs[5:]], (cut,))
    last, end = kernel([*(x[:, cut:] for x in inputs[:5]), *inputs[5:7], middle], (33 - cut,))
    assert relative_error(torch.cat([first, last], 1), whole) < 5e-3
    assert relative_error(end, final) < 2e-3


def test_strided_inputs():
    lengths = (18,)
    inputs = draw(lengths, heads=2)
    expected = kernel(inputs, lengths)
    strided = [torch.stack([x, x + 1], -1)[..., 0] for x in inputs[:5]]
    padded = [torch.cat([x, x], 2)[:, :, :2] for x in inputs[:5]]
    for views in (strided, padded):
        o, final = kernel([*views, *inputs[5:]], lengths)
        assert torch.equal(o, expected[0])
        assert torch.equal(final, expected[1])


def test_nan_stays_in_its_sequence():
    lengths = (5, 17, 3)
    inputs = draw(lengths)
    clean_o, clean_final = kernel(inputs, lengths)
    inputs[2][0, 8] = float("nan")
    o, final = kernel(inputs, lengths)
    for rows, n in ((slice(0, 5), 0), (slice(22, 25), 2)):
        assert torch.equal(o[:, rows], clean_o[:, rows])
        assert torch.equal(final[n], clean_final[n])
    assert final[1].isnan().any()


@pytest.mark.parametrize(("lengths", "heads", "key", "value"), [((20,), 1, 64, 32), ((3, 0, 33, 16), 2, 32, 32)])
def test_K01_gradients(lengths, heads, key, value):
    inputs = draw(lengths, heads, key, value)
    ours = dict(zip(NAMES, gradients(kernel, inputs, lengths)))
    exact = dict(zip(NAMES, gradients(formula, inputs, lengths, torch.float64)))
    for name, limit in LIMITS.items():
        assert relative_error(ours[name], exact[name]) < limit, name
    terms = {"dt_bias": exact["z"], "A_log": exact["z"] * (inputs[3] + inputs[6])}
    for name, term in terms.items():
        assert (ours[name] - exact[name]).norm() < CANCELLING * term.norm(), name


def test_gate_gradients_without_states():
    """All of dz comes from inside the tiles then, as small differences of large terms."""
    inputs, lengths = draw((70, 16), heads=2, key=32, value=32), (70, 16)
    leaves = [x.requires_grad_() for x in inputs[:7]]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    pull = torch.randn(1, sum(lengths), 2, 32)
    zeros = torch.zeros(2, 2, 32, 32, dtype=torch.float64)
    ours = torch.autograd.grad(kernel(leaves, lengths, state=False)[0], leaves[3:], pull)
    wanted = torch.autograd.grad(formula([*exact, zeros], lengths)[0], exact[3:], pull.double())
    for name, a, e in zip(("z", "b", "A_log", "dt_bias"), ours, wanted):
        assert relative_error(a, e) < 1e-2, name


def test_slabs_do_not_change_gradients(monkeypatch):
    lengths = (20, 50)
    inputs = draw(lengths)
    whole = gradients(kernel, inputs, lengths)
    monkeypatch.setattr(triton_plan, "SLAB_MATRICES", 2)
    triton_plan.plan_pieces.cache_clear()
    slabs = gradients(kernel, inputs, lengths)
    triton_plan.plan_pieces.cache_clear()
    for a, b in zip(whole, slabs):
        assert relative_error(b, a) < 3e-3


def test_runs_are_bit_identical():
    inputs = draw((19,))
    for a, b in zip(gradients(kernel, inputs, (19,)), gradients(kernel, inputs, (19,))):
        assert torch.equal(a, b)


def test_states_at_requested_tokens():
    lengths = (40, 3, 32)
    inputs = draw(lengths, heads=2)
    places = [(2, 16), (0, 32), (2, 32), (0, 16), (2, 16)]
    settings = {"state": inputs[7], "cu_seqlens": bounds(lengths)}
    with use_tier("triton"):
        o, final, states = fused_kda_export(*inputs[:7], exports=places, **settings)
        with pytest.raises(UnsupportedError, match="every 16 tokens"):
            fused_kda_export(*inputs[:7], exports=[(0, 17)], **settings)
    plain_o, plain_final = kernel(inputs, lengths)
    assert torch.equal(o, plain_o)
    assert torch.equal(final, plain_final)
    assert torch.equal(states[2], final[2])
    assert torch.equal(states[0], states[4])
    with use_tier("torch"):
        _, _, exact = fused_kda_export(*(x.double() for x in inputs[:7]), exports=places, **settings)
    assert relative_error(states, exact) < 2e-3
    with pytest.raises(ShapeError, match="no token 4 of sequence 1"):
        fused_kda_export(*inputs[:7], exports=[(1, 4)], **settings)
    per_channel = [*inputs[:5], torch.zeros_like(inputs[6]), inputs[6]]
    with use_tier("triton"), pytest.raises(ShapeError, match="A_log must be"):
        fused_kda_export(*per_channel, exports=places, **settings)


def test_registration():
    leaves = [x.requires_grad_() for x in draw((3,))]
    torch.library.opcheck(
        torch.ops.tercet.fused_kda.default,
        (*leaves, [3], 0, 0.25, -5.0, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_K02_K07_one_configuration():
    # one tile size and one pinned launch shape a kernel: nothing for an autotuner to choose wrongly
    assert triton_.TILE == 16
    for launch in (triton_.PREPARE, triton_.PREPARE_BOUNDED, triton_.WALK, triton_.WALK_BACK, triton_.GRADIENTS):
        assert set(launch) <= {"VECTOR", "BV", "STAGES", "num_warps", "maxnreg"}


def test_K04_K06_widths_that_would_need_masks_are_declined():
    for key, value in ((48, 16), (60, 16), (100, 16), (16, 20)):
        inputs = draw((3,), key=key, value=value)
        with use_tier("triton"), pytest.raises(UnsupportedError, match="widths"):
            fused_kda(*inputs[:7])


def test_K05_tail_reads_stay_inside():
    for length in range(1, 18):
        inputs = draw((length,))
        poisoned = [torch.cat([x, torch.full_like(x[:, :1], float("nan"))], 1)[:, :length] for x in inputs[:5]]
        o, final = kernel([*poisoned, *inputs[5:]], (length,))
        assert o.isfinite().all()
        assert final.isfinite().all()


def test_K08_odd_offsets():
    inputs = draw((17,))
    shifted = []
    for x in inputs[:5]:
        store = torch.empty(x.numel() + 1)
        store[1:] = x.flatten()
        shifted.append(store[1:].view(x.shape))
    assert torch.equal(kernel([*shifted, *inputs[5:]], (17,))[0], kernel(inputs, (17,))[0])


def test_K11_other_value_head_counts_are_refused():
    inputs = draw((4,), heads=2)
    inputs[2] = torch.randn(1, 4, 3, 16)
    with pytest.raises(ShapeError):
        kernel(inputs, (4,))


def test_K12_bounds_with_a_batch_are_refused():
    inputs = [torch.cat([x, x]) for x in draw((4,))[:5]]
    with pytest.raises(ShapeError, match="batch"):
        fused_kda(*inputs, torch.zeros(1), torch.zeros(1, 16), cu_seqlens=torch.tensor([0, 4]))


def test_K14_gates_below_the_floor_are_refused():
    inputs = draw((3,))
    for bound in (-5.01, -8.0, 0.0):
        with pytest.raises(ConfigError):
            fused_kda(*inputs[:7], lower_bound=bound)


def test_K15_identical_keys_full_writes_slow_decay():
    inputs = draw((48,))
    inputs[1] = inputs[1][:, :1].expand_as(inputs[1]).clone()
    inputs[3] = torch.full_like(inputs[3], -9.0)
    inputs[4] = torch.full_like(inputs[4], 20.0)
    compare(inputs, (48,))


def test_K16_state_is_value_first():
    inputs = draw((1,), key=32, value=16)
    assert kernel(inputs, (1,))[1].shape == (1, 1, 16, 32)
    compare(inputs, (1,))


@pytest.mark.parametrize("pieces", [1, 2])
def test_K18_states_follow_their_sequences(pieces):
    """In pieces too, where the number of a piece is no longer that of its sequence."""
    lengths = (33, 1, 16)
    inputs = draw(lengths)
    order = (2, 0, 1)
    parts = [[x.split(lengths, 1)[n] for n in order] for x in inputs[:5]]
    moved = [*(torch.cat(p, 1) for p in parts), *inputs[5:7], inputs[7][list(order)]]
    with use_pieces(pieces):
        o, final = kernel(inputs, lengths)
        o_moved, final_moved = kernel(moved, tuple(lengths[n] for n in order))
    assert torch.equal(final_moved, final[list(order)])
    assert torch.equal(o_moved, torch.cat([o.split(lengths, 1)[n] for n in order], 1))
