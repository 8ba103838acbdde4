"""Folds of slices, which context parallelism exchanges (parallel.md §2.1–2.2): every tier, ≤ 1e-9 in fp64."""

from itertools import pairwise

import pytest
import torch

from numerics import relative_error
from tercet.errors import ConfigError, ShapeError
from tercet.ops import fused_kda, fused_kda_adjoint, fused_kda_fold, join_folds, use_tier

EXACT = 1e-9


def draw(tokens, sequences=1, heads=2, key=8, value=6, decay=2.0, dtype=torch.float64):
    rows = [torch.randn(1, tokens, heads, d, dtype=dtype) for d in (key, key, value, key)]
    rows[3] -= decay
    rows.append(torch.randn(1, tokens, heads, dtype=dtype))
    gate = [torch.randn(heads, dtype=dtype), torch.randn(heads, key, dtype=dtype)]
    return rows, gate, torch.randn(sequences, heads, value, key, dtype=dtype)


def fold(rows, gate, **settings):
    return fused_kda_fold(*rows[1:], *gate, **settings)


def cut(rows, low, high):
    return [x[:, low:high] for x in rows]


@pytest.mark.parametrize("tier", ["reference", "torch"])
@pytest.mark.parametrize("floor", [-5.0, None])
def test_a_fold_moves_any_state(tier, floor):
    rows, gate, state = draw(50, 4)
    bounds = torch.tensor([0, 17, 17, 18, 50])
    with use_tier(tier):
        transition, local = fold(rows, gate, lower_bound=floor, cu_seqlens=bounds)
        _, final = fused_kda(*rows, *gate, lower_bound=floor, state=state, cu_seqlens=bounds)
    assert relative_error(state @ transition + local, final) < EXACT
    assert torch.equal(transition[1], torch.eye(8, dtype=torch.float64).expand(2, 8, 8))
    assert not local[1].any()


def test_folds_compose_and_associate():
    rows, gate, _ = draw(60)
    edges = (0, 1, 3, 20, 37, 60)
    parts = [fold(cut(rows, a, b), gate) for a, b in pairwise(edges)]
    left = parts[0]
    for part in parts[1:]:
        left = join_folds(left, part)
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = join_folds(part, right)
    for whole in (left, right):
        for a, b in zip(whole, fold(rows, gate)):
            assert relative_error(a, b) < EXACT


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_equal_one_device(ranks):
    """The protocol of context parallelism without the network: outputs, final state, the initial state's gradient."""
    rows, gate, state = draw(60)
    edges = [n * 60 // ranks for n in range(ranks + 1)]
    leaf = state.clone().requires_grad_()
    o, final = fused_kda(*rows, *gate, state=leaf)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    (d_state,) = torch.autograd.grad((o, final), leaf, (d_o, d_final))
    slices = [cut(rows, a, b) for a, b in pairwise(edges)]
    folds = [fold(part, gate) for part in slices]
    S, outputs = state, []
    for part, (transition, local) in zip(slices, folds):
        outputs.append(fused_kda(*part, *gate, state=S)[0])
        S = S @ transition + local
    assert relative_error(torch.cat(outputs, 1), o) < EXACT
    assert relative_error(S, final) < EXACT
    D = d_final
    for n in reversed(range(ranks)):
        q, k, _, z, b = slices[n]
        D = D @ folds[n][0].mT + fused_kda_adjoint(d_o[:, edges[n] : edges[n + 1]], q, k, z, b, *gate)
    assert relative_error(D, d_state) < EXACT


def test_plain_sums_of_local_states_are_wrong():
    """What would do for a linear attention without the delta rule is off by percents here."""
    rows, gate, _ = draw(40, decay=5.0)
    (_, first), (_, second) = fold(cut(rows, 0, 20), gate), fold(cut(rows, 20, 40), gate)
    assert relative_error(first + second, fold(rows, gate)[1]) > 1e-2


def test_256_tiles_in_fp32_against_fp64():
    """K-10: correlated keys, strong writes, slow decay; the fp32 chain of a long slice and of 16 joined ones."""
    rows, gate, _ = draw(4096, heads=1, decay=9.0)
    rows[1] += 2.0 * torch.randn(1, 1, 1, 8, dtype=torch.float64)
    exact = fold([x.float().double() for x in rows], [x.float().double() for x in gate])
    single = [x.float() for x in rows], [x.float() for x in gate]
    joined = fold(cut(single[0], 0, 256), single[1])
    for low in range(256, 4096, 256):
        joined = join_folds(joined, fold(cut(single[0], low, low + 256), single[1]))
    for whole in (fold(*single), joined):
        for a, b in zip(whole, exact):
            assert a.dtype is torch.float32
            assert (a - b).norm() < 1e-5 * b.norm() + 1e-9


def test_transitions_do_not_expand():
    rows, gate, _ = draw(64, decay=12.0)
    rows[4] += 30.0  # β = 1
    rows[1] = rows[1][:, :1].expand_as(rows[1])
    transition, _ = fold(rows, gate)
    assert torch.linalg.matrix_norm(transition, 2).max() <= 1 + 1e-12


def test_no_gradients_pass():
    rows, gate, _ = draw(5)
    transition, local = fused_kda_fold(*(x.requires_grad_() for x in rows[1:]), *gate)
    assert not transition.requires_grad
    assert not local.requires_grad


def test_wrong_inputs():
    rows, gate, _ = draw(5)
    with pytest.raises(ShapeError, match="A_log"):
        fused_kda_fold(*rows[1:], gate[0][:1], gate[1])
    with pytest.raises(ShapeError, match="v must be"):
        fused_kda_fold(rows[1], rows[2][:, :4], *rows[3:], *gate)
    with pytest.raises(ConfigError):
        fused_kda_fold(*rows[1:], *gate, lower_bound=-6.0)
    with pytest.raises(ShapeError, match="z must"):
        fused_kda_adjoint(rows[2], rows[0], rows[1], rows[3][..., :4], rows[4], *gate)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("floor", [-5.0, None])
def test_triton_equals_torch(floor):
    """Tile operands are fp16 there; the chain of them is fp32."""
    pytest.importorskip("triton")
    rows, gate, _ = draw(36, 3, heads=1, key=16, value=32, decay=4.0, dtype=torch.float32)
    bounds = torch.tensor([0, 33, 33, 36])
    d_o = torch.randn_like(rows[2])
    q, k, _, z, b = rows
    found = {}
    for tier in ("torch", "triton"):
        with use_tier(tier):
            settings = {"lower_bound": floor, "cu_seqlens": bounds}
            found[tier] = *fold(rows, gate, **settings), fused_kda_adjoint(d_o, q, k, z, b, *gate, **settings)
    for a, e in zip(found["triton"], found["torch"]):
        assert relative_error(a, e) < 2e-3
    assert torch.equal(found["triton"][0][1, 0], torch.eye(16))
