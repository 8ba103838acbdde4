"""Forward kernel of MLA attention: an online softmax over key tiles, two products for the logits, fp32 output.

A program owns M queries of one head and walks its sequence's key tiles: first those that lie wholly in the past, which
need no mask, then the ones on the diagonal, whose loads stop at the sequence's end (what lies behind may be another
document's NaN). What a backward pass needs of every query lies in slots: tokens in order, each sequence from a multiple
of 16 on, which descriptors ask for. Logits stay unscaled; the scale and log₂e enter as one factor inside ``exp2``.

Shapes: T tokens, H heads, M queries and N keys a tile; D the content width of queries and keys (128), R the width of
the part that all heads share (64, may be 0), V the width of values. Locals carry their shape: q_MD.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tercet.ops.gpu import fitted


@triton.jit
def locate(tiles, H):
    """Return the sequence's first token, length and first slot, this program's head, its tile and how many there are.

    Heads whose keys and values stay in the L2 cache together (49,152 tokens × heads, 640 bytes each, of an H200's
    50 MB) are a group, in which all heads' first tiles come first.
    """
    program = tl.program_id(0)
    entry = tiles + (program // H) * 6
    start, length = tl.load(entry), tl.load(entry + 1)
    first, count, slot = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    local = program - H * first
    group = tl.minimum(tl.maximum(49152 // length, 1), H)
    base = local // (group * count) * group
    rest = local % (group * count)
    heads = tl.minimum(group, H - base)
    return start, length, slot, base + rest % heads, rest // heads, count


@triton.jit
def fetch(
    source,
    descriptor,
    token,
    column,
    stride,
    left,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    BULK: tl.constexpr,
):
    """Load ROWS rows of WIDTH values from row *token* on; MASKED: only *left* rows, zeros behind them.

    BULK loads full tiles through the tensor descriptor, in one instruction of one thread.
    """
    if BULK and not MASKED:
        return descriptor.load([token, column])
    else:
        at = tl.arange(0, ROWS)
        base = source + token.to(tl.int64) * stride + column
        address = base + at[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        if MASKED:
            return tl.load(address, mask=(at < left)[:, None], other=0.0)
        else:
            return tl.load(address)


@triton.jit
def logits(s_MN, q_MD, q_MR, k_ND, k_NR, OPERAND: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr):
    """Add the unscaled ``q kᵀ`` of both parts (or its transpose, with the arguments swapped)."""
    s_MN = tl.dot(q_MD.to(OPERAND), tl.trans(k_ND.to(OPERAND)), s_MN, input_precision=PRECISION)
    if R > 0:
        s_MN = tl.dot(q_MR.to(OPERAND), tl.trans(k_NR.to(OPERAND)), s_MN, input_precision=PRECISION)
    return s_MN


@triton.jit
def _absorb(
    o_MV,
    total_M,
    best_M,
    q_MD,
    q_MR,
    row_M,
    kv,
    pe,
    k_tile,
    v_tile,
    pe_tile,
    start,
    length,
    n0,
    column,
    kv_stride,
    pe_stride,
    factor,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take one key tile into the running output, sum and maximum."""
    k_ND = fetch(kv, k_tile, start + n0, column, kv_stride, length - n0, N, D, MASKED, BULK)
    if R > 0:
        k_NR = fetch(pe, pe_tile, start + n0, 0, pe_stride, length - n0, N, R, MASKED, BULK)
    else:
        k_NR = k_ND
    s_MN = tl.zeros([q_MD.shape[0], N], tl.float32)
    s_MN = logits(s_MN, q_MD, q_MR, k_ND, k_NR, OPERAND, R, PRECISION)
    if MASKED:
        s_MN = tl.where((n0 + tl.arange(0, N))[None, :] <= row_M[:, None], s_MN, float("-inf"))
    peak_M = tl.maximum(best_M, tl.max(s_MN, 1))
    p_MN = tl.exp2(s_MN * factor - (peak_M * factor)[:, None])
    shrink_M = tl.exp2((best_M - peak_M) * factor)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    o_MV = o_MV * shrink_M[:, None]
    v_NV = fetch(kv, v_tile, start + n0, column + D, kv_stride, length - n0, N, V, MASKED, BULK)
    o_MV = tl.dot(p_MN.to(OPERAND), v_NV.to(OPERAND), o_MV, input_precision=PRECISION)
    return o_MV, total_M, peak_M


@fitted
@triton.jit(do_not_specialize=["T", "H", "SLOTS"])
def forward_kernel(
    q,
    kv,
    pe,
    k_tile,
    v_tile,
    pe_tile,
    out,
    lse,
    row_max,
    tiles,
    T,
    H,
    SLOTS,
    pe_stride,
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
):
    """Write ``o`` [T, H, V] in fp32; of every query, the log-sum-exp in base 2 [H, SLOTS], largest logit [H, T]."""
    start, length, slot, head, tile, count = locate(tiles, H)
    m0 = (count - 1 - tile) * M  # the longest rows first: the last programs to start are the shortest
    factor = scale * 1.4426950408889634
    at_M = tl.arange(0, M)
    row_M = m0 + at_M
    q_stride, kv_stride, column = H * (D + R), H * (D + V), head * (D + V)
    q_MD = fetch(q, q, start + m0, head * (D + R), q_stride, length - m0, M, D, True, False)
    if R > 0:
        q_MR = fetch(q, q, start + m0, head * (D + R) + D, q_stride, length - m0, M, R, True, False)
    else:
        q_MR = q_MD
    o_MV = tl.zeros([M, V], tl.float32)
    total_M = tl.zeros([M], tl.float32)
    best_M = tl.full([M], float("-inf"), tl.float32)
    past = m0 // N * N
    for n0 in tl.range(0, past, N):
        o_MV, total_M, best_M = _absorb(
            o_MV, total_M, best_M, q_MD, q_MR, row_M, kv, pe, k_tile, v_tile, pe_tile, start, length, n0,
            column, kv_stride, pe_stride, factor, N, D, R, V, OPERAND, PRECISION, BULK, False,
        )  # fmt: skip
    for n0 in tl.range(past, tl.minimum(m0 + M, length), N, num_stages=1):
        o_MV, total_M, best_M = _absorb(
            o_MV, total_M, best_M, q_MD, q_MR, row_M, kv, pe, k_tile, v_tile, pe_tile, start, length, n0,
            column, kv_stride, pe_stride, factor, N, D, R, V, OPERAND, PRECISION, BULK, True,
        )  # fmt: skip
    inside = row_M < length
    tl.store(lse + head * SLOTS + slot + row_M, best_M * factor + tl.log2(total_M), mask=inside)
    tl.store(row_max + head * T + start + row_M, best_M * scale, mask=inside)
    target = out + ((start + m0).to(tl.int64) * H + head) * V
    address = target + at_M[:, None] * (H * V) + tl.arange(0, V)[None, :]
    tl.store(address, o_MV / total_M[:, None], mask=inside[:, None])
