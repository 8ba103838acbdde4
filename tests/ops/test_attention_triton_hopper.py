"""MLA attention's Hopper kernels: what surrounds the Gluon ones everywhere, and all of it on a Hopper GPU."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from numerics import outputs_and_gradients, relative_error
from tercet.ops import mla_attention, use_tier
from tercet.ops.attention import hopper, triton_
from tercet.ops.attention.triton_ import SLOT, _tiles
from tercet.ops.attention.triton_products import BLOCK, key_product, prepare_kernel, query_product
from tercet.ops.gpu import takes_gluon

on_hopper = pytest.mark.skipif(not takes_gluon(torch.empty(0).device), reason="Gluon kernels want a Hopper GPU")
LENGTHS = (150, 0, 70, 1)
D, R, V, H, FIRST, HEADS = 16, 16, 32, 3, 1, 2


def starts(lengths):
    return [0, *itertools.accumulate(lengths)]


def test_preparation_shuffles_queries_and_fills_sequences_up():
    T, slots = sum(LENGTHS), sum(-(-n // SLOT) * SLOT for n in LENGTHS)
    o, grad, q = (torch.randn(T, H, width) for width in (V, V, D + R))
    lse = torch.randn(H, slots)
    q_out, grad_out = torch.full((HEADS, slots, D + R), torch.nan), torch.full((HEADS, slots, V), torch.nan)
    lse_out, delta_out = torch.full((HEADS, slots), torch.nan), torch.full((HEADS, slots), torch.nan)
    tiles = _tiles(LENGTHS, BLOCK, q.device)
    prepare_kernel[(len(tiles) * HEADS,)](
        o, grad, q, lse, q_out, grad_out, lse_out, delta_out, tiles, FIRST, HEADS, H, slots, M=BLOCK, D=D, R=R, V=V
    )
    slot = 0
    for start, length in zip(starts(LENGTHS), LENGTHS):
        for place in range(-(-length // SLOT) * SLOT):
            i, j, k = place % 32 // 8, place % 8 // 2, place % 2
            query = place // 32 * 32 + 8 * j + 2 * i + k
            at = slot + place
            if query < length:
                t = start + query
                assert torch.equal(q_out[:, at], q[t, FIRST:]) and torch.equal(grad_out[:, at], grad[t, FIRST:])
                assert torch.equal(lse_out[:, at], lse[FIRST:, slot + query])
                assert torch.allclose(delta_out[:, at], (o * grad).sum(-1)[t, FIRST:], atol=1e-5)
            else:
                assert not q_out[:, at].any() and not grad_out[:, at].any() and not delta_out[:, at].any()
                assert (lse_out[:, at] == torch.inf).all()
        slot += -(-length // SLOT) * SLOT


def test_products_of_stored_blocks():
    """Random dS of every pair; what no pair wrote is NaN, as is another document."""
    T, scale = sum(LENGTHS), 0.3
    q, kv, pe = torch.randn(T, H, D + R), torch.randn(T, H, D + V), torch.randn(T, R)
    tiles = _tiles(LENGTHS, BLOCK, q.device)
    counts = [-(-n // BLOCK) for n in LENGTHS]
    pairs = [n * (n + 1) // 2 for n in counts]
    ds = torch.full((sum(pairs) * HEADS, BLOCK, BLOCK), torch.nan)
    want_q, want_kv, want_pe = q.double() * 0, kv.double() * 0, torch.zeros(H, T, R, dtype=torch.float64)
    order = sorted(range(len(LENGTHS)), key=lambda n: -LENGTHS[n])  # as the table of tiles has them
    before = 0
    for n in order:
        length, here = LENGTHS[n], slice(starts(LENGTHS)[n], starts(LENGTHS)[n] + LENGTHS[n])
        for head in range(HEADS):
            whole = torch.randn(length, length).tril()  # queries × keys
            base = HEADS * before + head * pairs[n]
            for i in range(counts[n]):
                for j in range(i + 1):
                    rows, columns = slice(i * BLOCK, i * BLOCK + BLOCK), slice(j * BLOCK, j * BLOCK + BLOCK)
                    part = whole[rows, columns]
                    block = ds[base + i * (i + 1) // 2 + j]
                    block[:, : -(-len(part) // 64) * 64] = 0.0  # the key pass writes 64 queries at a time
                    block[: part.shape[1], : len(part)] = part.T
            k = torch.cat([kv[here, FIRST + head, :D], pe[here]], -1).double()
            want_q[here, FIRST + head] = scale * whole.double() @ k
            dk = scale * whole.double().T @ q[here, FIRST + head].double()
            want_kv[here, FIRST + head, :D], want_pe[FIRST + head, here] = dk[:, :D], dk[:, D:]
        before += pairs[n]
    d_q, d_kv, d_pe = torch.zeros_like(q), torch.zeros_like(kv), torch.zeros(H, T, R)
    flat, tile = ds.view(-1, BLOCK), hopper._tile
    query_product[(len(tiles) * HEADS,)](
        kv, pe, tile(flat, 32, BLOCK), tile(kv.flatten(1), 32, D), tile(pe, 32, R), d_q, tiles, FIRST, HEADS, H,
        pe.stride(0), scale, M=BLOCK, N=32, D=D, R=R, V=V,
    )  # fmt: skip
    key_product[(len(tiles) * HEADS,)](
        q, tile(flat, BLOCK, 64), tile(q.flatten(1), 64, D), tile(q.flatten(1), 64, R), d_kv, d_pe, tiles, FIRST, HEADS,
        H, T, scale, M=64, N=BLOCK, D=D, R=R, V=V,
    )  # fmt: skip
    limit = 5e-3 if q.is_cuda else 1e-6  # fp32 products are tf32 on a GPU
    for x, want in ((d_q, want_q), (d_kv, want_kv), (d_pe, want_pe)):
        assert relative_error(x, want) < limit


def inputs(lengths, heads=3, dtype=torch.bfloat16):
    T = sum(lengths)
    wide = torch.randn(1, T, 96).to(dtype)
    return [torch.randn(1, T, heads, 192).to(dtype), torch.randn(1, T, heads, 256).to(dtype), wide[..., 32:]]


def attention(lengths, scale=192**-0.5):
    bounds = torch.tensor(starts(lengths), dtype=torch.int32, device="cpu")
    return lambda *x: mla_attention(*x, scale=scale, cu_seqlens=bounds)[0]


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(1,), (700, 0, 1, 333, 128, 517), (64, 65, 127, 129, 191, 1000), (4096,)])
def test_against_the_reference(lengths, dtype):
    tensors = inputs(lengths, dtype=dtype)
    actual = outputs_and_gradients(attention(lengths), tensors, "triton")
    expected = outputs_and_gradients(attention(lengths), [x.double() for x in tensors], "reference")
    assert actual[0].dtype == torch.float32 and {x.dtype for x in actual[1:]} == {dtype}
    bound = 1e-3 if dtype == torch.float16 else 8e-3
    for x, reference in zip(actual, expected):
        assert relative_error(x, reference) < bound or (sum(lengths) == 1 and reference.abs().max() < 1e-12)


@on_hopper
def test_as_the_two_pass_kernels(monkeypatch):
    """Outputs, statistics and gradients; with dS of one head at a time as well."""
    lengths = (700, 0, 1, 333)
    tensors = inputs(lengths)
    ours = outputs_and_gradients(attention(lengths), tensors, "triton")
    with use_tier("triton"):
        row_max = mla_attention(*tensors, scale=0.1, cu_seqlens=torch.tensor(starts(lengths), device="cpu"))[1]
    monkeypatch.setattr(hopper, "WORKSPACE", 2 * 28 * BLOCK * BLOCK * 2)
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_gradients(attention(lengths), tensors, "triton"), ours))
    monkeypatch.setattr(hopper, "takes", lambda *args: False)
    for a, b in zip(outputs_and_gradients(attention(lengths), tensors, "triton"), ours):
        assert relative_error(a, b) < 4e-3
    with use_tier("triton"):
        other = mla_attention(*tensors, scale=0.1, cu_seqlens=torch.tensor(starts(lengths), device="cpu"))[1]
    assert torch.allclose(row_max, other, rtol=1e-5)


@on_hopper
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_nan_stays_in_its_sequence(poisoned):
    lengths = (190, 330, 200)
    own = slice(starts(lengths)[poisoned], starts(lengths)[poisoned + 1])
    keep = [t for t in range(sum(lengths)) if t not in range(sum(lengths))[own]]
    tensors = inputs(lengths)
    clean = outputs_and_gradients(attention(lengths), tensors, "triton")
    for x in tensors:
        x[:, own] = torch.nan
    spoilt = outputs_and_gradients(attention(lengths), tensors, "triton")
    assert spoilt[0][:, own].isnan().all()
    assert all(torch.equal(a[:, keep], b[:, keep]) for a, b in zip(spoilt, clean))


@on_hopper
def test_two_runs_agree_to_the_bit():
    tensors, lengths = inputs((2000, 1500), 8), (2000, 1500)
    runs = [outputs_and_gradients(attention(lengths), tensors, "triton") for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


@on_hopper
def test_takes_the_models_widths_on_its_own_launches():
    q = inputs((5,))[0]
    assert (
        hopper.takes(q, 128, 64, 128) and not hopper.takes(q, 128, 0, 128) and not hopper.takes(q.float(), 128, 64, 128)
    )
    assert triton_._gluon(q, triton_._launches(q.dtype, q.device), {"D": 128, "R": 64, "V": 128})
