"""The fused decode kernel in Triton's interpreter against the composed operators (kernels.md §4, §5)."""

import pytest
import torch

pytest.importorskip("triton")

from numerics import relative_error
from tercet.errors import ShapeError, UnsupportedError
from tercet.ops import fused_kda, gated_rms_norm, short_conv, use_tier
from tercet.ops.gpu import INTERPRETED
from tercet.ops.kda import kda_decode, triton_decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADS, WIDTH = 2, 16
PREFILL = 1e-5 if INTERPRETED else 5e-3  # compiled, prefill multiplies fp16 tiles


@pytest.fixture(autouse=True, params=[4, WIDTH], ids=["tiles", "one tile"])
def _tiles_of_a_head(request, monkeypatch):
    for options in (triton_decode.ONE, triton_decode.WINDOW):
        monkeypatch.setitem(options, "ROWS", request.param)


def parameters():
    return {
        "conv_weights": tuple(torch.randn(HEADS * WIDTH, 1, 4) for _ in range(3)),
        "A_log": 0.3 * torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS, WIDTH),
        "norm_weight": torch.randn(WIDTH),
    }


def rows(batch, window):
    wide = [torch.randn(batch, window, HEADS, WIDTH) for _ in range(5)]
    return [*wide[:4], torch.randn(batch, window, HEADS), wide[4]]


def pools(slots):
    """Both pools as views of one record a slot and head, as they lie in a cache page."""
    record = torch.randn(slots, HEADS, WIDTH * WIDTH + 9 * WIDTH)
    state, tail = record.split([WIDTH * WIDTH, 9 * WIDTH], 2)
    return record, state.unflatten(2, (WIDTH, WIDTH)), tail.unflatten(2, (3, 3, WIDTH)).permute(0, 2, 3, 1, 4)


def run(tier, inputs, record, **settings):
    copy = record.clone()
    state, tail = copy.split([WIDTH * WIDTH, 9 * WIDTH], 2)
    pool = state.unflatten(2, (WIDTH, WIDTH)), tail.unflatten(2, (3, 3, WIDTH)).permute(0, 2, 3, 1, 4)
    with use_tier(tier):
        o = kda_decode(*inputs, state=pool[0], conv_state=pool[1], **settings)
    return o, copy


def same(inputs, record, **settings):
    ours, exact = (run(tier, inputs, record, **settings) for tier in ("triton", "reference"))
    assert relative_error(ours[0], exact[0]) < 1e-5
    assert relative_error(ours[1], exact[1]) < 1e-6
    return ours


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_one_token(lower_bound):
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    same(rows(3, 1), pools(5)[0], slots=slots, lower_bound=lower_bound, **parameters())


@pytest.mark.parametrize("window", [1, 2])
def test_skipped_slots_touch_nothing(window, monkeypatch):
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    record = pools(4)[0]
    record[0] = float("nan")
    slots = torch.tensor([-1, 0, 3], dtype=torch.int32)
    o, after = run("triton", rows(3, window), record, slots=slots, null_slot=0, **parameters())
    assert o.isfinite().all()
    assert torch.equal(o[:2], torch.zeros_like(o[:2]))
    assert torch.equal(after[1:3], record[1:3])
    assert after[0].isnan().all()
    assert not torch.equal(after[3], record[3])


@pytest.mark.parametrize("window", [1, 3])
def test_bf16_state(window):
    """A state pool in bf16 holds the rounded state and nothing is rounded before it is stored."""
    state, tail = (x.contiguous() for x in pools(3)[1:])
    inputs, slots = rows(2, window), torch.tensor([2, 0], dtype=torch.int32)
    settings = {"slots": slots, "commits": torch.tensor([window, 1], dtype=torch.int32), **parameters()}
    narrow, wide = state.bfloat16(), state.bfloat16().float()
    with use_tier("triton"):
        o = kda_decode(*inputs, state=narrow, conv_state=tail.clone(), **settings)
    with use_tier("reference"):
        expected = kda_decode(*inputs, state=wide, conv_state=tail.clone(), **settings)
    assert relative_error(o, expected) < 1e-5
    assert relative_error(narrow, wide) < 4e-3
    assert torch.equal(narrow[1], state[1].bfloat16())


def test_filters_in_bf16():
    """Weights may come in the model's dtype; they are applied in fp32."""
    settings, record = parameters(), pools(2)[0]
    narrow = settings | {"conv_weights": tuple(w.bfloat16() for w in settings["conv_weights"])}
    wide = settings | {"conv_weights": tuple(w.float() for w in narrow["conv_weights"])}
    inputs, slots = rows(1, 1), torch.tensor([1], dtype=torch.int32)
    ours, expected = (run("triton", inputs, record, slots=slots, **s) for s in (narrow, wide))
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_large_state_and_one_key():
    """q = k = one direction and β → 1: the output is v, left over when a large state cancels."""
    settings, record, inputs = parameters(), pools(1)[0], rows(1, 1)
    record[..., : WIDTH * WIDTH] *= 1e3
    record[..., WIDTH * WIDTH :] = 0
    inputs[0], inputs[1], inputs[4] = inputs[1], inputs[1], torch.full_like(inputs[4], 20.0)
    settings["conv_weights"] = (settings["conv_weights"][1],) * 2 + (settings["conv_weights"][2],)
    slots = torch.tensor([0], dtype=torch.int32)
    (o, after), (expected, final) = (run(t, inputs, record, slots=slots, **settings) for t in ("triton", "reference"))
    assert relative_error(o, expected) < 2e-3
    assert relative_error(after, final) < 1e-6


def test_rows_do_not_see_each_other():
    record, settings, inputs = pools(3)[0], parameters(), rows(2, 1)
    both, _ = run("triton", inputs, record, slots=torch.tensor([2, 1], dtype=torch.int32), **settings)
    alone, _ = run("triton", [x[1:] for x in inputs], record, slots=torch.tensor([1], dtype=torch.int32), **settings)
    assert torch.equal(both[1:], alone)


def test_equals_prefill():
    settings, inputs = parameters(), rows(1, 6)
    record = torch.zeros_like(pools(1)[0])
    o, after = run("triton", inputs, record, slots=torch.tensor([0], dtype=torch.int32), **settings)
    convolved = [
        short_conv(x.flatten(2), w)[0].unflatten(2, (HEADS, WIDTH)) for x, w in zip(inputs, settings["conv_weights"])
    ]
    expected, final = fused_kda(*convolved, *inputs[3:5], settings["A_log"], settings["dt_bias"])
    expected = gated_rms_norm(expected, inputs[5], settings["norm_weight"], eps=1e-5)
    assert relative_error(o, expected) < PREFILL
    assert relative_error(after[0, :, : WIDTH * WIDTH], final.flatten(2)[0]) < PREFILL


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_replay_equals_token_by_token(accepted):
    """Verify three drafts, accept some, feed them again: the state is that of plain decoding."""
    settings, slots = parameters(), torch.tensor([1], dtype=torch.int32)
    record, inputs = pools(2)[0], rows(1, 8)
    plain = record
    for t in range(accepted + 1):
        o_plain, plain = run("triton", [x[:, t : t + 1] for x in inputs], plain, slots=slots, **settings)
    none = torch.zeros(1, dtype=torch.int32)
    _, verified = run("triton", [x[:, :3] for x in inputs], record, slots=slots, commits=none, **settings)
    assert torch.equal(verified, record)
    window = [x[:, : accepted + 4] for x in inputs]
    commits = torch.tensor([accepted + 1], dtype=torch.int32)
    o, replayed = run("triton", window, record, slots=slots, commits=commits, **settings)
    assert relative_error(replayed, plain) < 1e-6
    assert relative_error(o[:, accepted : accepted + 1], o_plain) < 1e-5


def test_K17_mixed_acceptance_and_copies():
    slots = torch.tensor([5, -1, 2, 0], dtype=torch.int32)
    commits = torch.tensor([0, 2, 3, 1], dtype=torch.int32)
    copies = torch.tensor([4, 4, 1, -1], dtype=torch.int32)
    record = pools(6)[0]
    _, after = same(rows(4, 3), record, slots=slots, commits=commits, copies=copies, **parameters())
    assert torch.equal(after[[3, 4, 5]], record[[3, 4, 5]])
    assert torch.equal(after[1], after[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slot_past_2_31_elements():
    last = 2**31 // (HEADS * WIDTH * WIDTH) + 1
    settings, inputs = parameters(), rows(1, 2)
    state = torch.zeros(last + 1, HEADS, WIDTH, WIDTH, dtype=torch.bfloat16)
    tail = torch.zeros(last + 1, 3, 3, HEADS, WIDTH, dtype=torch.bfloat16)
    state[last], tail[last] = torch.randn(state.shape[1:]), torch.randn(tail.shape[1:])
    alone = state[last:].clone(), tail[last:].clone()
    outputs = []
    for pool, slot in (((state, tail), last), (alone, 0)):
        slots = torch.tensor([slot], dtype=torch.int32)
        outputs.append(kda_decode(*inputs, state=pool[0], conv_state=pool[1], slots=slots, **settings))
    assert torch.equal(*outputs)
    assert torch.equal(state[last], alone[0][0])
    assert torch.equal(tail[last], alone[1][0])
    assert not state[:8].any()


def test_bad_shapes_and_widths():
    _, state, tail = pools(2)
    inputs, slots = rows(1, 1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="batch"):
        kda_decode(*inputs, state=state, conv_state=tail, slots=slots.repeat(2), **parameters())
    with pytest.raises(ShapeError, match="slots"):
        kda_decode(*inputs, state=state[:, :1], conv_state=tail, slots=slots, **parameters())
    with use_tier("triton"), pytest.raises(UnsupportedError, match="contiguous"):
        kda_decode(*inputs, state=state.transpose(2, 3), conv_state=tail, slots=slots, **parameters())
