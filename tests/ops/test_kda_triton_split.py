"""KDA with sequences cut into pieces that run side by side (kernels.md §6), against the unsplit kernels and fp64.

Faults K-03 (gradients of every input, offsets by sequence and head), K-09 (slices of one to three tokens), K-10 (the
chain of transitions), K-13 (constants of the launch come from the host).
"""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from numerics import relative_error
from tercet.errors import ConfigError
from tercet.ops import fused_kda, kda_gate, l2_norm, use_tier
from tercet.ops.kda import fused_kda_export, reference, triton_, triton_fold, triton_plan
from tercet.ops.kda.triton_plan import plan_pieces, plan_splits, plan_tiles, use_pieces

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked corners overflow and are thrown away

NAMES = ("o", "final", "q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
LIMITS = dict(zip(NAMES, (5e-3, 2e-3, 8e-3, 8e-3, 8e-3, 1e-2, 1e-2, 2e-2, 2e-2, 5e-3)))
SPLIT = dict.fromkeys(NAMES, 2e-3) | {"A_log": 1e-2, "dt_bias": 1e-2}  # sums that cancel
SPLIT |= {"o": 1e-5, "final": 1e-5, "state": 1e-5, "v": 1e-4}
"""Split against unsplit with fp32 inputs. States and their adjoints agree to fp32. Inside a tile dv is a product of
fp16, which now and then rounds the other way; q, k, z and b start from states of the forward pass where the unsplit
backward pass makes its own, whose tiles round differently (a slab's edge does the same)."""


def draw(lengths, heads=2, width=16, decay=0.0):
    rows = [torch.randn(1, sum(lengths), heads, width) for _ in "qkvz"]
    rows[3] -= decay
    rows.append(torch.randn(1, sum(lengths), heads))
    return [*rows, 0.3 * torch.randn(heads), torch.randn(heads, width), torch.randn(len(lengths), heads, width, width)]


def bounds(lengths):
    return torch.tensor((0, *lengths)).cumsum(0)


def kernel(inputs, lengths, floor=-5.0):
    state = inputs[7] if len(inputs) > 7 else None
    with use_tier("triton"):
        return fused_kda(*inputs[:7], state=state, cu_seqlens=bounds(lengths), lower_bound=floor)


def formula(inputs, lengths, floor=-5.0):
    q, k, v, z, b, A_log, dt_bias, state = inputs
    g = kda_gate(z, A_log, dt_bias, lower_bound=floor)
    unit = l2_norm(q), l2_norm(k)
    scale = q.shape[-1] ** -0.5
    return reference.kda(*unit, v, g, b.sigmoid(), scale=scale, state=state, cu_seqlens=bounds(lengths))


def gradients(run, inputs, lengths, floor=-5.0):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o, final = run(leaves, lengths, floor)
    generator = torch.Generator().manual_seed(1)
    pulls = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, final)]
    return o.detach(), final.detach(), *torch.autograd.grad((o, final), leaves, pulls)


def agree(split, whole):
    for name, a, b in zip(NAMES, split, whole):
        assert relative_error(a, b) < SPLIT[name], name


@pytest.mark.parametrize("floor", [-5.0, None])
def test_K03_every_gradient_equals_the_unsplit_one(floor):
    """Two heads, sequences that start behind others, some too short to cut, states given, all inputs compared."""
    lengths = (3, 33, 0, 17)
    inputs = draw(lengths, decay=2.0)
    whole = gradients(kernel, inputs, lengths, floor)
    exact = gradients(formula, [x.double() for x in inputs], lengths, floor)
    with use_pieces(3):
        split = gradients(kernel, inputs, lengths, floor)
    agree(split, whole)
    for name, a, e in zip(NAMES, split, exact):
        assert relative_error(a, e) < LIMITS[name], name
    assert torch.equal(split[1][2], inputs[7][2])  # the empty sequence
    assert torch.equal(split[0][:, :3], whole[0][:, :3])  # and the one that was not cut


@pytest.mark.parametrize("count", [2, 5])
def test_slow_decay_carries_states_across_all_pieces(count):
    """Decays near one: every piece feels the first token, and an error in a transition could not hide."""
    lengths = (80,)
    inputs = draw(lengths, heads=1, decay=8.0)
    inputs[4] -= 2.0
    whole = gradients(kernel, inputs, lengths)
    with use_pieces(count):
        split = gradients(kernel, inputs, lengths)
    agree(split, whole)
    far = [x.clone() for x in inputs]
    far[7] += 1.0
    assert relative_error(kernel(far, lengths)[1], whole[1]) > 0.1  # the state does reach the end


def test_pieces_and_slabs_together(monkeypatch):
    """Adjoints cross slabs, and pieces inside of a slab, in one sequence."""
    lengths = (20, 100)
    inputs = draw(lengths, heads=1, decay=6.0)
    whole = gradients(kernel, inputs, lengths)
    monkeypatch.setattr(triton_plan, "SLAB_MATRICES", 4)
    plan_pieces.cache_clear()
    with use_pieces(4):
        split = gradients(kernel, inputs, lengths)
    plan_pieces.cache_clear()
    agree(split, whole)


@pytest.mark.parametrize("tail", [1, 2, 3])
def test_K09_a_last_piece_of_one_to_three_tokens(tail):
    lengths = (32 + tail,)
    inputs = draw(lengths, heads=1, decay=4.0)
    whole = gradients(kernel, inputs, lengths)
    with use_pieces(4):
        split = gradients(kernel, inputs, lengths)
    agree(split, whole)


def test_without_a_state():
    lengths = (50,)
    inputs = draw(lengths)[:7]
    whole = kernel(inputs, lengths)
    with use_pieces(3):
        split = kernel(inputs, lengths)
    agree(split, whole)


def test_sixteen_bit_rows_agree_below_their_rounding():
    lengths = (70,)
    inputs = [x.half() if n < 5 else x for n, x in enumerate(draw(lengths, decay=6.0))]
    whole = gradients(kernel, inputs, lengths)
    with use_pieces(3):
        split = gradients(kernel, inputs, lengths)
    for name, a, b in zip(NAMES, split, whole):
        assert relative_error(a, b) < LIMITS[name] / 3, name


def test_exports_from_inside_and_between_pieces():
    lengths = (96, 3)
    inputs = draw(lengths)
    settings = {"exports": [(0, 16), (0, 48), (0, 64), (0, 96)], "state": inputs[7], "cu_seqlens": bounds(lengths)}
    with use_tier("triton"):
        whole = fused_kda_export(*inputs[:7], **settings)
        with use_pieces(2):
            split = fused_kda_export(*inputs[:7], **settings)
    for a, b in zip(split, whole):
        assert relative_error(a, b) < 1e-5


def test_runs_are_bit_identical():
    inputs = draw((33,))
    with use_pieces(3):
        for a, b in zip(gradients(kernel, inputs, (33,)), gradients(kernel, inputs, (33,))):
            assert torch.equal(a, b)


def test_nan_stays_in_its_sequence():
    lengths = (17, 33, 18)
    inputs = draw(lengths, heads=1)
    with use_pieces(2):
        clean_o, clean_final = kernel(inputs, lengths)
        inputs[2][0, 20] = float("nan")
        o, final = kernel(inputs, lengths)
    for rows, n in ((slice(0, 17), 0), (slice(50, 68), 2)):
        assert torch.equal(o[:, rows], clean_o[:, rows])
        assert torch.equal(final[n], clean_final[n])
    assert final[1].isnan().all()


def matrices(work, tile):
    """Return M and the contribution K̂ᵀ INV V of one tile and the first head from the prepared operands, in fp64."""
    wide, k_hat, small, decay = (x.double() for x in work[:4])
    return torch.diag(decay[tile, 0]) + k_hat[tile, 0].mT @ wide[tile, 0, 1], k_hat[tile, 0].mT @ small[tile, 0, 1]


def test_K10_a_chain_of_256_transitions():
    """fp32 end to end: against fp64 products of the same tiles; slow decay, correlated keys, five pieces."""
    repeats, tokens = 16, 256 * 16
    q, k, v, z, b, A_log, dt_bias, state = draw((256,), heads=1, decay=9.0)
    k = (k + 2.0 * torch.randn(1, 1, 1, 16)) * (torch.rand(1, 256, 1, 1) > 0.9)  # few writes: M does not vanish
    rows = tuple(x[0] for x in (q, k, v, z, b))
    tiles = plan_tiles((256,), state.device)
    work = triton_.prepare(rows, A_log, dt_bias, tiles, rows[2], 0.25, -5.0, save=False)
    work = (*(x.repeat(repeats, *[1] * (x.ndim - 1)) for x in work[:4]), *work[4:])
    v = v.repeat(1, repeats, 1, 1)
    plan = plan_pieces((tokens,), (5,), 1, False, state.device)
    edges, transitions = torch.empty(4, 1, 16, 16), torch.empty(4, 1, 16, 16)
    triton_fold.fold(v[0], work, plan.folds, state, edges, transitions)
    triton_fold.chain(edges, transitions, plan.chains)
    S, M, spread = state[0, 0].double().mT, torch.eye(16).double(), []
    ends = [row[0] + row[1] for row in plan.folds.tolist()]
    for tile in range(ends[-1]):
        move, write = matrices(work, tile)
        S = move @ S + write @ v[0, 16 * tile : 16 * tile + 16, 0].half().double()
        M = move @ M
        if tile + 1 in ends:
            slot = ends.index(tile + 1)
            spread.append(relative_error(edges[slot, 0], S.mT))
            if slot:
                assert relative_error(transitions[slot, 0], M.mT) < 1e-5
            M = torch.eye(16).double()
    assert max(spread) < 1e-5
    assert M.norm() > 0.1


def test_planner():
    """Boundaries on tiles, whole cover, and a split only where the model gains: few heads and long sequences."""
    cpu = torch.device("cpu")
    settings = {"blocks": 2, "fold_blocks": 4, "processors": 132}
    assert plan_splits((512,), heads=96, **settings) == (1,)
    assert plan_splits((64,) * 8, heads=96, **settings) == (1,) * 8
    assert plan_splits((8,), heads=1, **settings) == (1,)
    few = plan_splits((4096, 3, 0, 700), heads=8, **settings)
    assert few[0] > few[3] > 1
    assert few[1:3] == (1, 1)
    lengths = (1000, 5, 0, 300)
    plan = plan_pieces(lengths, (7, 7, 7, 1), 2, False, cpu)
    tokens = plan.runs[:, 3].tolist()
    assert sum(tokens) == sum(lengths)
    starts = plan.runs[:, 2].tolist()
    assert all(b == a + n for a, n, b in zip(starts, tokens, starts[1:]))
    assert all((start - bounds(lengths)[n]) % 16 == 0 for start, n in zip(starts, plan.runs[:, 4].tolist()))
    assert len(plan.folds) == plan.slots == 6


def test_number_of_pieces_must_not_be_negative():
    with pytest.raises(ConfigError, match="positive"), use_pieces(-1):
        pass


def test_K13_kernels_call_no_host_function():
    """What a kernel body names is a device function or a constant: it compiles on versions that read it differently."""
    for module in (triton_fold, triton_):
        for name, kernel_ in vars(module).items():
            if not hasattr(kernel_, "fn") or not inspect.isfunction(kernel_.fn):
                continue
            used = inspect.getclosurevars(kernel_.fn).globals
            host = [n for n, x in used.items() if inspect.isfunction(x) and not hasattr(x, "fn")]
            assert not host, (name, host)
