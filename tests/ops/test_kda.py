"""KDA: every tier against the recurrence of the report, written a second time here in matrix form and fp64.

model.md §4.4–4.5 and anchor 1; kernels.md §1–2; known faults M4, M20, M21, K-06, K-07, K-11, K-12, K-14 – K-16.
"""

import itertools

import pytest
import torch
from torch import Tensor

from numerics import relative_error
from tercet.errors import ConfigError, ShapeError
from tercet.ops import fused_kda, kda, kda_gate, use_tier
from tercet.ops.kda import torch_ as tiles

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 127)
NAMES = ("q", "k", "v", "g", "beta", "state")


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """``S ← (I − β k kᵀ) Diag(e^g) S + β k vᵀ`` with S as ``[H, K, V]``, one token and one sequence at a time."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    outputs, states, t = [], [], 0
    for n, length in enumerate(lengths):
        S = state[n].mT
        for _ in range(length):
            b = beta[t][:, None, None]
            erase = eye - b * k[t][:, :, None] * k[t][:, None, :]
            S = erase @ (g[t].exp()[:, :, None] * S) + b * k[t][:, :, None] * v[t][:, None, :]
            outputs.append(scale * (S * q[t][:, :, None]).sum(1))
            t += 1
        states.append(S.mT)
    return torch.stack(outputs), torch.stack(states)


def gates(kind: str, shape: tuple[int, ...]) -> tuple[Tensor, float | None]:
    """Return log decays of one *kind* and the floor that may be promised for them."""
    x = torch.randn(shape, dtype=torch.float64)
    channel = torch.arange(shape[-1]) % 2 == 0
    token = (torch.arange(shape[0]) % 2 == 0).view(-1, *[1] * (len(shape) - 1))
    match kind:
        case "random":
            return -5 * torch.sigmoid(x), -5.0
        case "floor":
            return torch.full(shape, -5.0, dtype=torch.float64), -5.0
        case "near one":
            return -1e-6 * torch.sigmoid(x), -5.0
        case "alternating":
            return torch.where((channel ^ token).expand(shape), -5.0, -1e-6).double(), -5.0
        case "softplus":
            return -torch.nn.functional.softplus(2 * x), None
        case "large":
            return -torch.nn.functional.softplus(60 * x), None
        case "huge":
            return torch.where(x > 0, -1e4, -1e-3).double(), None
    raise AssertionError(kind)


def inputs(
    tokens: int, sequences: int, *, gate: str = "random", keys: str = "random", write: str = "random", K=16, V=8
):
    """Return fp64 q, k, v, g, beta, state for two heads, and the gate's floor."""
    lead = (tokens, 2)
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(*lead, K, dtype=torch.float64), dim=-1) for _ in "qk")
    if keys == "identical":
        k = unit(torch.randn(1, 2, K, dtype=torch.float64), dim=-1).expand(*lead, K).contiguous()
    elif keys == "two":
        two = unit(torch.randn(2, 2, K, dtype=torch.float64), dim=-1)
        k = two[torch.arange(tokens) % 2]
    v = torch.randn(*lead, V, dtype=torch.float64)
    g, floor = gates(gate, (*lead, K))
    beta = {"random": torch.rand(lead), "one": torch.full(lead, 1 - 1e-9), "zero": torch.full(lead, 1e-9)}[
        write
    ].double()
    state = torch.randn(sequences, 2, V, K, dtype=torch.float64)
    return [q, k, v, g, beta, state], floor


def run(tensors, lengths, floor, tier: str | None = None, dtype=torch.float64):
    """Run the operator on one packed row."""
    q, k, v, g, beta, state = (x.to(dtype) for x in tensors)
    bounds = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
    with use_tier(tier):
        o, final = kda(*(x[None] for x in (q, k, v, g, beta)), state=state, cu_seqlens=bounds, gate_floor=floor)
    return o[0], final


def with_gradients(function, tensors, cotangents):
    """Return the outputs of *function* and the gradients of all *tensors*."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    o, final = function(leaves)
    total = (o.double() * cotangents[0]).sum() + (final.double() * cotangents[1]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [o, final, *(torch.zeros_like(x) if d is None else d for x, d in zip(leaves, grads))]


def compare(tensors, lengths, floor, bound, *, tier="torch", dtype=torch.float64, gate_bound=None) -> None:
    """Assert forward, state and all gradients within *bound* of the fp64 recurrence."""
    rounded = [x.to(dtype).double() for x in tensors]
    q, v = tensors[0], tensors[2]
    cotangents = torch.randn_like(v), torch.randn_like(tensors[5])
    scale = q.shape[-1] ** -0.5
    expected = with_gradients(lambda x: recurrence(*x, lengths, scale), rounded, cotangents)
    actual = with_gradients(lambda x: run(x, lengths, floor, tier, dtype), rounded, cotangents)
    for name, x, reference in zip(("o", "final", *NAMES), actual, expected):
        assert x.isfinite().all(), name
        limit = gate_bound if name == "g" and gate_bound is not None else bound
        difference, norm = (x.double() - reference).norm().item(), reference.norm().item()
        assert difference <= limit * norm + 1e-14, f"{name}: {difference:.2e} of {norm:.2e}"


@pytest.mark.parametrize("gate", ["random", "floor", "near one", "alternating", "softplus", "large", "huge"])
@pytest.mark.parametrize("length", LENGTHS)
def test_tiles_equal_recurrence(length, gate):
    tensors, floor = inputs(length, 1, gate=gate)
    compare(tensors, (length,), floor, 1e-10)


@pytest.mark.parametrize(
    "lengths", [(0, 17, 3), (5, 0, 40), (33, 1, 0), (0, 0, 1), (1, 1, 1), (16, 0, 0, 31), (40, 7, 65)]
)
@pytest.mark.parametrize("gate", ["random", "softplus"])
@pytest.mark.parametrize("tier", ["reference", "torch"])
def test_packed_documents(lengths, gate, tier):
    tensors, floor = inputs(sum(lengths), len(lengths), gate=gate)
    compare(tensors, lengths, floor, 1e-10, tier=tier)


def test_many_short_documents():
    lengths = tuple(int(n) for n in torch.randint(0, 41, (24,)))
    tensors, floor = inputs(sum(lengths), len(lengths), gate="alternating")
    compare(tensors, lengths, floor, 1e-10)


@pytest.mark.parametrize("gate", ["near one", "random", "floor"])
@pytest.mark.parametrize("keys", ["identical", "two"])
@pytest.mark.parametrize("write", ["one", "zero"])
def test_collinear_keys(gate, keys, write):
    """K-15: sixteen and more identical keys, β → 1, decay ≈ 1."""
    tensors, floor = inputs(67, 1, gate=gate, keys=keys, write=write)
    compare(tensors, (67,), floor, 1e-10)


@pytest.mark.parametrize("K", [48, 60, 100])
def test_odd_head_widths(K):
    """K-06."""
    tensors, floor = inputs(19, 1, K=K, V=12)
    compare(tensors, (19,), floor, 1e-10)


FP32 = 2e-5
"""Stated fp32 bound of forward, state and gradients, relative to the norm, from the same rounded inputs."""
FP32_GATE_AT_FLOOR = 1e-4
"""The gate's gradient where every decay sits at −5: a sum whose terms cancel to e^−5 of their size."""


@pytest.mark.parametrize("gate", ["random", "floor", "near one", "alternating", "softplus", "large", "huge"])
@pytest.mark.parametrize("keys", ["random", "identical"])
def test_fp32_bound(gate, keys):
    tensors, floor = inputs(200, 2, gate=gate, keys=keys, write="one" if keys == "identical" else "random", K=32, V=32)
    gate_bound = FP32_GATE_AT_FLOOR if gate == "floor" else FP32
    compare(tensors, (77, 123), floor, FP32, dtype=torch.float32, gate_bound=gate_bound)


@pytest.mark.parametrize("gate", ["random", "floor", "alternating"])
def test_fp32_stays_finite_with_large_values(gate):
    """Values and gradients of 1e3 with the decay at its floor: the factors e^±80 must not meet them unguarded."""
    tensors, floor = inputs(96, 1, gate=gate, K=32, V=32)
    tensors[2] *= 1e3
    tensors[5] *= 1e3
    rounded = [x.float().double() for x in tensors]
    cotangents = 1e3 * torch.randn_like(tensors[2]), 1e3 * torch.randn_like(tensors[5])
    expected = with_gradients(lambda x: recurrence(*x, (96,), 32**-0.5), rounded, cotangents)
    actual = with_gradients(lambda x: run(x, (96,), floor, "torch", torch.float32), rounded, cotangents)
    for name, x, reference in zip(("o", "final", *NAMES), actual, expected):
        assert relative_error(x, reference) < (FP32_GATE_AT_FLOOR if name == "g" else FP32), name


def test_floor_is_only_a_promise():
    """K-07: the factorised and the halving form of one computation agree, forward and backward."""
    tensors, _ = inputs(127, 1, gate="alternating")
    cotangents = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    with_floor = with_gradients(lambda x: run(x, (127,), -5.0, "torch"), tensors, cotangents)
    without = with_gradients(lambda x: run(x, (127,), None, "torch"), tensors, cotangents)
    for x, reference in zip(with_floor, without):
        assert relative_error(x, reference) < 1e-11


@pytest.mark.parametrize("size", [16, 32])
def test_every_tile_size_gives_the_same(size, monkeypatch):
    """K-07: pairwise, forward and backward, through the recurrence."""
    monkeypatch.setattr(tiles, "TILE", size)
    for gate in ("random", "softplus"):
        tensors, floor = inputs(90, 2, gate=gate)
        compare(tensors, (41, 49), floor, 1e-10)


@pytest.mark.parametrize("gate", ["random", "softplus"])
def test_gradcheck(gate):
    tensors, floor = inputs(21, 2, gate=gate, K=4, V=3)
    leaves = tuple(x.requires_grad_() for x in tensors)
    assert torch.autograd.gradcheck(lambda *x: run(x, (19, 2), floor, "torch"), leaves, fast_mode=True)


@pytest.mark.parametrize("gate", ["random", "softplus"])
def test_split_anywhere(gate):
    """Whole ≡ two pieces at every split ≡ token by token (K-16, M20: a non-symmetric state, V ≠ K)."""
    length = 37
    tensors, floor = inputs(length, 1, gate=gate)
    o, final = run(tensors, (length,), floor)
    for split in range(length + 1):
        head = [x[:split] for x in tensors[:5]] + [tensors[5]]
        o_head, middle = run(head, (split,), floor)
        o_tail, end = run([x[split:] for x in tensors[:5]] + [middle], (length - split,), floor)
        assert relative_error(torch.cat([o_head, o_tail]), o) < 1e-12
        assert relative_error(end, final) < 1e-12
    state, steps = tensors[5], []
    for t in range(length):
        y, state = run([x[t : t + 1] for x in tensors[:5]] + [state], (1,), floor)
        steps.append(y)
    assert relative_error(torch.cat(steps), o) < 1e-12
    assert relative_error(state, final) < 1e-12


def test_packed_equals_separate_equals_batched():
    tensors, floor = inputs(60, 3)
    o, final = run(tensors, (20, 20, 20), floor)
    with_batch = [x.view(3, 20, *x.shape[1:]) for x in tensors[:5]]
    o_batch, final_batch = kda(*with_batch, state=tensors[5], gate_floor=floor)
    assert relative_error(o_batch.flatten(0, 1), o) < 1e-14 and relative_error(final_batch, final) < 1e-14
    for n in range(3):
        alone, last = run([x[20 * n : 20 * n + 20] for x in tensors[:5]] + [tensors[5][n : n + 1]], (20,), floor)
        assert relative_error(alone, o[20 * n : 20 * n + 20]) < 1e-14
        assert relative_error(last[0], final[n]) < 1e-14


@pytest.mark.parametrize("floor", [-5.0, None])
@pytest.mark.parametrize("lengths", [(20, 33, 7), (1, 1, 1)])
def test_nan_stays_in_its_sequence(lengths, floor):
    tensors, _ = inputs(sum(lengths), 3)
    clean, clean_final = run(tensors, lengths, floor)
    start, end = lengths[0], lengths[0] + lengths[1]
    for poisoned in tensors[:5]:
        poisoned[start:end] = torch.nan
    leaves = [x.requires_grad_() for x in tensors]
    o, final = run(leaves, lengths, floor)
    assert o[start:end].isnan().all() and final[1].isnan().all()
    keep = torch.cat([torch.arange(start), torch.arange(end, sum(lengths))])
    assert torch.equal(o[keep], clean[keep]) and torch.equal(final[[0, 2]], clean_final[[0, 2]])
    o[keep].sum().backward()
    assert all(x.grad[keep].isfinite().all() for x in leaves[:5])


def test_empty_sequence_keeps_its_state():
    tensors, floor = inputs(0, 2)
    o, final = run(tensors, (0, 0), floor)
    assert o.shape == (0, 2, 8) and torch.equal(final, tensors[5])
    assert final.data_ptr() != tensors[5].data_ptr()


def test_no_state_is_zero_state():
    tensors, floor = inputs(30, 1)
    zero = [*tensors[:5], torch.zeros_like(tensors[5])]
    o, final = kda(*(x[None] for x in tensors[:5]), gate_floor=floor)
    expected = run(zero, (30,), floor)
    assert torch.equal(o[0], expected[0]) and torch.equal(final, expected[1])


def test_state_is_at_least_fp32():
    tensors, floor = inputs(20, 1)
    o, final = kda(*(x[None].bfloat16() for x in tensors[:5]), gate_floor=floor)
    assert o.dtype is torch.bfloat16 and final.dtype is torch.float32


def test_row_decay_is_inclusive():
    """The circulating form with γ_(r−1) in A and W is wrong by percents; ours agrees with the recurrence to 1e-13."""
    tensors, floor = inputs(16, 1)
    _, expected = recurrence(*tensors, (16,), 0.25)
    _, final = run(tensors, (16,), floor, "torch")
    assert relative_error(final, expected) < 1e-13
    _, k, v, g, beta, state = (x[:, 0] for x in tensors)
    G = g.cumsum(0)
    shifted = G - g
    A = beta[:, None] * torch.einsum("rc,ic,ric->ri", k, k, (shifted[:, None] - G[None]).clamp(max=80).exp()).tril(-1)
    T = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + A) * beta
    u = T @ v - T @ (k * shifted.exp()) @ state[0].mT
    wrong = G[-1].exp()[:, None] * state[0].mT + (k * (G[-1] - G).exp()).mT @ u
    assert relative_error(wrong.mT, expected[0, 0]) > 1e-3


def test_replay_identity():
    """S_h = Diag(e^G_h) S_0 + Σ_j (e^(G_h − G_j) ⊙ k_j) u_jᵀ (kernels.md §5): the delta written twice the same way."""
    (q, k, v, g, beta, state), floor = inputs(9, 1)
    S, replayed = state[0], []
    for t in range(9):
        S = S * g[t].exp()[:, None]
        u = beta[t][:, None] * (v[t] - (S @ k[t][..., None]).squeeze(-1))
        S = S + u[..., None] * k[t][:, None]
        replayed.append(u)
    G = g.cumsum(0)
    rebuilt = state[0] * G[-1].exp()[:, None]
    for t, u in enumerate(replayed):
        rebuilt = rebuilt + u[..., None] * ((G[-1] - G[t]).exp() * k[t])[:, None]
    assert relative_error(rebuilt, run((q, k, v, g, beta, state), (9,), floor)[1][0]) < 1e-12


def raw_inputs(tokens: int, sequences: int, dtype=torch.float64):
    """Return q, k, v, z, b, A_log, dt_bias, state before norm and gate, in *dtype*."""
    shapes = [(1, tokens, 2, 8)] * 2 + [(1, tokens, 2, 6), (1, tokens, 2, 8), (1, tokens, 2), (2,), (2, 8)]
    return [torch.randn(s, dtype=dtype) for s in [*shapes, (sequences, 2, 6, 8)]]


def fused(tensors, lower_bound, bounds):
    *rest, state = tensors
    return fused_kda(*rest, lower_bound=lower_bound, state=state, cu_seqlens=bounds)


def composed(tensors, lower_bound, lengths):
    """The formula from raw projections, without any operator of tercet."""
    q, k, v, z, b, A_log, dt_bias, state = tensors
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    rate, biased = A_log.exp()[:, None], z + dt_bias
    if lower_bound is None:
        g = -rate * torch.log1p(biased.exp())
    else:
        g = lower_bound / (1 + (-rate * biased).exp())
    beta = 1 / (1 + (-b).exp())
    return recurrence(*(x[0] for x in (q, k, v, g, beta)), state, lengths, q.shape[-1] ** -0.5)


@pytest.mark.parametrize("lower_bound", [-5.0, -3.0, None])
@pytest.mark.parametrize("lengths", [(23,), (5, 0, 18), (1, 1)])
def test_fused_equals_formula_with_all_gradients(lower_bound, lengths):
    """Among them dz, db, dA_log and d bias (kernels.md §1, gradients)."""
    tensors = raw_inputs(sum(lengths), len(lengths))
    bounds = torch.tensor((0, *itertools.accumulate(lengths)))
    cotangents = torch.randn(sum(lengths), 2, 6, dtype=torch.float64), torch.randn_like(tensors[-1])
    expected = with_gradients(lambda x: composed(x, lower_bound, lengths), tensors, cotangents)

    def ours(x):
        o, final = fused(x, lower_bound, bounds)
        return o[0], final

    actual = with_gradients(ours, tensors, cotangents)
    for x, reference in zip(actual, expected):
        assert relative_error(x, reference) < 1e-10


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_logits_stay_finite(lower_bound):
    """Logits of ±1e4 in z and b, keys of norm near zero: finite values and gradients in fp32."""
    tensors = raw_inputs(40, 1, torch.float32)
    tensors[3] = torch.where(tensors[3] > 0, 1e4, -1e4)
    tensors[4] = torch.where(tensors[4] > 0, 1e4, -1e4)
    tensors[1][:, ::3] = 1e-20
    tensors[1][:, 1] = 0
    leaves = [x.requires_grad_() for x in tensors]
    o, final = fused(leaves, lower_bound, None)
    (o.sum() + final.sum()).backward()
    assert o.isfinite().all() and final.isfinite().all()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_gradients_of_the_gate_parameters_by_hand():
    """dz = dg · g (1 − g/g_min) · e^A;  d bias = Σ dz;  dA = Σ dz · (z + bias) (kernels.md §1)."""
    z, A_log, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 2, 8), (2,), (2, 8)))
    g = kda_gate(z, A_log, bias)
    d_g = torch.randn_like(g)
    d_z, d_A, d_bias = torch.autograd.grad(g, (z, A_log, bias), d_g)
    by_hand = (d_g * g * (1 - g / -5.0) * A_log.exp()[:, None]).detach()
    assert relative_error(d_z, by_hand) < 1e-13
    assert relative_error(d_bias, by_hand.sum(0)) < 1e-13
    assert relative_error(d_A, (by_hand * (z + bias)).sum((0, 2))) < 1e-13


def shapes(**changed):
    base = {"q": (2, 5, 2, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 3), "g": (2, 5, 2, 4), "beta": (2, 5, 2)}
    return [torch.zeros(changed.get(name, shape)) for name, shape in base.items()]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": (2, 5, 4)}, r"q and k must be \[B, T, H, K\]"),
        ({"k": (2, 5, 2, 5)}, "q and k"),
        ({"v": (2, 5, 4, 3)}, "grouped value heads"),  # K-11: HV = 2H
        ({"v": (2, 5, 3, 3)}, "grouped value heads"),
        ({"v": (2, 6, 2, 3)}, "v must be"),
        ({"g": (2, 5, 2)}, "g must have shape"),
        ({"beta": (2, 5, 2, 1)}, "beta must have shape"),
    ],
)
def test_wrong_shapes(changed, message):
    with pytest.raises(ShapeError, match=message):
        kda(*shapes(**changed))


def test_wrong_state_and_bounds():
    tensors = shapes()
    with pytest.raises(ShapeError, match="value, key"):
        kda(*tensors, state=torch.zeros(2, 2, 4, 3))  # [K, V] order (M20)
    with pytest.raises(ShapeError, match="state must be"):
        kda(*tensors, state=torch.zeros(1, 2, 3, 4))
    with pytest.raises(ShapeError, match="flatten"):
        kda(*tensors, cu_seqlens=torch.tensor([0, 5]))  # K-12
    one = [x[:1] for x in tensors]
    for bounds in ([0, 4], [1, 5], [0, 4, 3, 5], [0]):
        with pytest.raises(ShapeError, match="cu_seqlens"):
            kda(*one, cu_seqlens=torch.tensor(bounds))
    with pytest.raises(ShapeError, match="integer"):
        kda(*one, cu_seqlens=torch.tensor([0.0, 5.0]))


@pytest.mark.parametrize("floor", [-5.01, -8.0, 0.0, 1.0])
def test_floor_outside_the_factorised_range(floor):
    """K-14: −8 made NaN elsewhere; here the promise itself is refused."""
    with pytest.raises(ConfigError, match=r"\[-5, 0\)"):
        kda(*shapes(), gate_floor=floor)
    with pytest.raises(ConfigError, match=r"\[-5, 0\)"):
        fused_kda(*shapes(), torch.zeros(2), torch.zeros(2, 4), lower_bound=floor)


def test_gate_parameters_are_per_head():
    """M1: A_log of one head's width, or per channel, is refused."""
    for A_log, bias in (((4,), (2, 4)), ((2, 4), (2, 4)), ((2,), (8,))):
        with pytest.raises(ShapeError, match="A_log"):
            fused_kda(*shapes(), torch.zeros(A_log), torch.zeros(bias))
