"""Kimi Delta Attention: the gated delta rule with one decay per key channel (report §2.1.1, eq. 1–4).

`kda` is the recurrence on ready inputs. `fused_kda` starts from what the projections give — un-normalised q and k, gate
logits z and write logits b — so that a fast tier may keep the L2 norm, gate and sigmoid on chip.

The recurrent state is ``[N, H, V, K]`` (value axis first), at least fp32, everywhere in tercet.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from tercet.errors import ConfigError, ShapeError
from tercet.ops.gate import kda_gate
from tercet.ops.kda import decode, export, fold, reference, torch_
from tercet.ops.norm import l2_norm
from tercet.ops.packing import sequence_lengths
from tercet.ops.registry import Operator

_kda = Operator("kda", reference.kda, torch_.kda)


def kda(
    q: Float[Tensor, "batch tokens heads key"],
    k: Float[Tensor, "batch tokens heads key"],
    v: Float[Tensor, "batch tokens heads value"],
    g: Float[Tensor, "batch tokens heads key"],
    beta: Float[Tensor, "batch tokens heads"],
    *,
    scale: float | None = None,
    state: Float[Tensor, "sequences heads value key"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
    gate_floor: float | None = None,
) -> tuple[Float[Tensor, "batch tokens heads value"], Float[Tensor, "sequences heads value key"]]:
    """Run ``S ← (I − β k kᵀ) Diag(e^g) S + β k vᵀ;  o = scale · Sᵀ q`` over every sequence.

    Args:
        q: queries, L2-normalised; multiplied by *scale* inside (default ``key ** -0.5``).
        k: keys, L2-normalised.
        v: values.
        g: natural logarithm of the decay, ≤ 0, per key channel.
        beta: write strength in [0, 1].
        scale: factor on the queries.
        state: state before the first token of each sequence; zeros when absent.
        cu_seqlens: bounds of packed sequences (`tercet.ops.packing`); then the batch must be 1.
        gate_floor: a promise that ``g ≥ gate_floor`` (in [-5, 0)); lets a tier use the factorised tile form.

    Returns:
        o in the dtype of v, and the state after the last token of each sequence (fp32, or fp64 for fp64 inputs). An
        empty sequence keeps its initial state.

    Raises:
        ShapeError: shapes disagree, or cu_seqlens is not a partition of the tokens.
        ConfigError: gate_floor outside [-5, 0).
    """
    _check(q, k, v, {"g": (g, q.shape), "beta": (beta, q.shape[:3])}, state, cu_seqlens)
    _check_floor(gate_floor)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return _kda(q, k, v, g, beta, scale=scale, state=state, cu_seqlens=cu_seqlens, gate_floor=gate_floor)


def _compose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    g = kda_gate(z, A_log, dt_bias, lower_bound=lower_bound)
    beta = b.to(g.dtype).sigmoid()
    return kda(
        l2_norm(q),
        l2_norm(k),
        v,
        g,
        beta,
        scale=scale,
        state=state,
        cu_seqlens=cu_seqlens,
        gate_floor=lower_bound,
    )


_fused = Operator("fused_kda", _compose, triton_module="tercet.ops.kda.triton_")


def fused_kda(
    q: Float[Tensor, "batch tokens heads key"],
    k: Float[Tensor, "batch tokens heads key"],
    v: Float[Tensor, "batch tokens heads value"],
    z: Float[Tensor, "batch tokens heads key"],
    b: Float[Tensor, "batch tokens heads"],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads key"],
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    state: Float[Tensor, "sequences heads value key"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[Float[Tensor, "batch tokens heads value"], Float[Tensor, "sequences heads value key"]]:
    """Run `kda` from raw projections: L2-normalise q and k, ``g`` from z (`kda_gate`), ``β = σ(b)``.

    Args:
        q: queries after short convolution and SiLU.
        k: keys, likewise.
        v: values, likewise.
        z: gate logits before bias and decay rate.
        b: write logits.
        A_log: logarithm of the gate's slope, one per head.
        dt_bias: gate bias per head and channel.
        scale: factor on the queries; default ``key ** -0.5``.
        lower_bound: floor of the bounded gate in [-5, 0), or None for the softplus gate.
        state: as in `kda`.
        cu_seqlens: as in `kda`.

    Raises:
        ShapeError: shapes disagree.
        ConfigError: lower_bound outside [-5, 0).
    """
    _check_raw(q, k, v, z, b, A_log, dt_bias, lower_bound, state, cu_seqlens)
    return _fused(
        q,
        k,
        v,
        z,
        b,
        A_log,
        dt_bias,
        scale=scale,
        lower_bound=lower_bound,
        state=state,
        cu_seqlens=cu_seqlens,
    )


_export = Operator("fused_kda_export", export.fused_kda_export, triton_module="tercet.ops.kda.triton_export")


def fused_kda_export(
    q: Float[Tensor, "batch tokens heads key"],
    k: Float[Tensor, "batch tokens heads key"],
    v: Float[Tensor, "batch tokens heads value"],
    z: Float[Tensor, "batch tokens heads key"],
    b: Float[Tensor, "batch tokens heads"],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads key"],
    *,
    exports: Sequence[tuple[int, int]],
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    state: Float[Tensor, "sequences heads value key"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[
    Float[Tensor, "batch tokens heads value"],
    Float[Tensor, "sequences heads value key"],
    Float[Tensor, "exports heads value key"],
]:
    """Run `fused_kda` and also return the state at requested tokens, which a prefix cache keeps; no gradients.

    Args:
        q: as in `fused_kda`, like all arguments but *exports*.
        k: likewise.
        v: likewise.
        z: likewise.
        b: likewise.
        A_log: likewise.
        dt_bias: likewise.
        exports: pairs (sequence, tokens): the state of that sequence after so many of its tokens. The GPU kernel passes
            them at multiples of 16.
        scale: likewise.
        lower_bound: likewise.
        state: likewise.
        cu_seqlens: likewise.

    Returns:
        o, the final state, and the requested states in the order of *exports*.

    Raises:
        ShapeError: shapes disagree, or a place lies outside of its sequence.
        ConfigError: lower_bound outside [-5, 0).
    """
    _check_raw(q, k, v, z, b, A_log, dt_bias, lower_bound, state, cu_seqlens)
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    for sequence, offset in exports:
        if not 0 <= sequence < len(lengths) or not 0 < offset <= lengths[sequence]:
            raise ShapeError(f"there is no token {offset} of sequence {sequence}; the lengths are {lengths}")
    return _export(
        q,
        k,
        v,
        z,
        b,
        A_log,
        dt_bias,
        exports=tuple(exports),
        scale=scale,
        lower_bound=lower_bound,
        state=state,
        cu_seqlens=cu_seqlens,
    )


_fold = Operator("fused_kda_fold", fold.fused_kda_fold, triton_module="tercet.ops.kda.triton_slice")
_adjoint = Operator("fused_kda_adjoint", fold.fused_kda_adjoint, triton_module="tercet.ops.kda.triton_adjoint")


def fused_kda_fold(
    k: Float[Tensor, "batch tokens heads key"],
    v: Float[Tensor, "batch tokens heads value"],
    z: Float[Tensor, "batch tokens heads key"],
    b: Float[Tensor, "batch tokens heads"],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads key"],
    *,
    lower_bound: float | None = -5.0,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[Float[Tensor, "sequences heads key key"], Float[Tensor, "sequences heads value key"]]:
    """Return what every sequence does to a state: ``S_out = S_in @ transition + local`` (report §5.1.2, eq. 17).

    A rank of context parallelism folds its slice so, gathers the folds of the ranks before it and finds its own start
    state without walking their tokens. With states stored value first, transition is the transpose of the report's M.
    Gradients do not pass: the way back is `fused_kda_adjoint`.

    Args:
        k: as in `fused_kda`, like all arguments.
        v: likewise.
        z: likewise.
        b: likewise.
        A_log: likewise.
        dt_bias: likewise.
        lower_bound: likewise.
        cu_seqlens: likewise.

    Returns:
        transition and local, at least fp32; one and zero for an empty sequence.

    Raises:
        ShapeError: shapes disagree.
        ConfigError: lower_bound outside [-5, 0).
    """
    _check_raw(k, k, v, z, b, A_log, dt_bias, lower_bound, None, cu_seqlens)
    return _fold(k, v, z, b, A_log, dt_bias, lower_bound=lower_bound, cu_seqlens=cu_seqlens)


def fused_kda_adjoint(
    d_o: Float[Tensor, "batch tokens heads value"],
    q: Float[Tensor, "batch tokens heads key"],
    k: Float[Tensor, "batch tokens heads key"],
    z: Float[Tensor, "batch tokens heads key"],
    b: Float[Tensor, "batch tokens heads"],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads key"],
    *,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> Float[Tensor, "sequences heads value key"]:
    """Return the gradient of every sequence's initial state from its outputs alone, the adjoint's local fold.

    With a gradient *d_final* of the final state the whole is ``d_final @ transition.mT + local``, where transition is
    that of `fused_kda_fold`. Values do not enter: the recurrence is linear in them and the state.

    Args:
        d_o: gradient of the outputs.
        q: as in `fused_kda`, like all other arguments.
        k: likewise.
        z: likewise.
        b: likewise.
        A_log: likewise.
        dt_bias: likewise.
        scale: likewise.
        lower_bound: likewise.
        cu_seqlens: likewise.

    Raises:
        ShapeError: shapes disagree.
        ConfigError: lower_bound outside [-5, 0).
    """
    _check_raw(q, k, d_o, z, b, A_log, dt_bias, lower_bound, None, cu_seqlens)
    settings = {"scale": scale, "lower_bound": lower_bound, "cu_seqlens": cu_seqlens}
    return _adjoint(d_o, q, k, z, b, A_log, dt_bias, **settings)


def join_folds(
    earlier: tuple[Float[Tensor, "*lead key key"], Float[Tensor, "*lead value key"]],
    later: tuple[Float[Tensor, "*lead key key"], Float[Tensor, "*lead value key"]],
) -> tuple[Float[Tensor, "*lead key key"], Float[Tensor, "*lead value key"]]:
    """Return the fold of two slices that follow each other; associative. Keep it in fp32: it has to stay exact."""
    return earlier[0] @ later[0], earlier[1] @ later[0] + later[1]


_decode = Operator("kda_decode", decode.kda_decode, triton_module="tercet.ops.kda.triton_decode")


def kda_decode(
    q: Float[Tensor, "batch window heads width"],
    k: Float[Tensor, "batch window heads width"],
    v: Float[Tensor, "batch window heads width"],
    z: Float[Tensor, "batch window heads width"],
    b: Float[Tensor, "batch window heads"],
    gate: Float[Tensor, "batch window heads width"],
    *,
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Float[Tensor, "heads"],
    dt_bias: Float[Tensor, "heads width"],
    norm_weight: Float[Tensor, "width"],
    state: Float[Tensor, "slots heads width width"],
    conv_state: Float[Tensor, "slots taps-1 3 heads width"],
    slots: Int[Tensor, "batch"],
    commits: Int[Tensor, "batch"] | None = None,
    copies: Int[Tensor, "batch"] | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
    eps: float = 1e-5,
    null_slot: int = -1,
) -> Float[Tensor, "batch window heads width"]:
    """Run a whole KDA layer after its projections on *window* new tokens of every request (report §5.4.2).

    Short convolution and SiLU, L2 norm, gate, recurrence, per-head RMSNorm, output gate. `state` and `conv_state` are
    pools updated in place; a request names its slot. Request n writes its state after its first ``commits[n]`` tokens
    (default: all), and none when that is 0; its later tokens, drafts still to be verified, leave no trace. After
    verification the caller feeds the accepted ones again at the head of the next window: replay, without snapshots.

    Args:
        q: projected rows before the convolution.
        k: likewise.
        v: likewise.
        z: gate logits.
        b: write logits.
        gate: logits of the output gate.
        conv_weights: filters of q, k and v, ``[heads · width, 1, 4]`` each.
        A_log: logarithm of the gate's slope.
        dt_bias: gate bias.
        norm_weight: weight of the output RMSNorm, shared by the heads.
        state: recurrent matrices, value axis first; slot and head may be strided.
        conv_state: the newest rows of q, k and v before the convolution, oldest first; strided at will.
        slots: slot of every request; a negative one or *null_slot* skips the request and leaves its output zero.
        commits: tokens after which the state is written.
        copies: slot that receives a second copy of what is written, or a negative number.
        scale: factor on the queries; default ``width ** -0.5``.
        lower_bound: floor of the bounded gate, or None for softplus.
        eps: of the RMSNorm.
        null_slot: a reserved slot that is never read or written.

    Raises:
        ShapeError: shapes disagree.
        ConfigError: lower_bound outside [-5, 0).
    """
    _check_floor(lower_bound)
    if q.ndim != 4 or any(x.shape != q.shape for x in (k, v, z, gate)) or b.shape != q.shape[:3]:
        raise ShapeError(
            f"q, k, v, z and gate must be [B, W, H, D] of one shape and b [B, W, H], got q {tuple(q.shape)}"
        )
    batch, _, heads, width = q.shape
    pools = (tuple(state.shape[1:]), tuple(conv_state.shape[1:]))
    if pools != ((heads, width, width), (3, 3, heads, width)):
        raise ShapeError(
            f"state must be [slots, {heads}, {width}, {width}] and conv_state [slots, 3, 3, {heads}, {width}], "
            f"got {tuple(state.shape)} and {tuple(conv_state.shape)}"
        )
    if any(x is not None and tuple(x.shape) != (batch,) for x in (slots, commits, copies)):
        raise ShapeError(f"slots, commits and copies must be [batch] = ({batch},)")
    if any(tuple(w.shape) != (heads * width, 1, 4) for w in conv_weights):
        raise ShapeError(f"conv_weights must be three tensors [heads·width, 1, 4] = ({heads * width}, 1, 4)")
    return _decode(
        q,
        k,
        v,
        z,
        b,
        gate,
        conv_weights=conv_weights,
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        state=state,
        conv_state=conv_state,
        slots=slots,
        commits=commits,
        copies=copies,
        scale=width**-0.5 if scale is None else scale,
        lower_bound=lower_bound,
        eps=eps,
        null_slot=null_slot,
    )


def _check_floor(floor: float | None) -> None:
    if floor is not None and not -5.0 <= floor < 0.0:
        raise ConfigError(f"the gate's lower bound is {floor}; the factorised tile form needs it in [-5, 0)")


def _check_raw(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check what every operator on raw projections takes."""
    _check(q, k, v, {"z": (z, q.shape), "b": (b, q.shape[:3])}, state, cu_seqlens)
    _check_floor(lower_bound)
    if A_log.shape != q.shape[2:3] or dt_bias.shape != q.shape[2:]:
        raise ShapeError(
            f"A_log must be [heads] = {tuple(q.shape[2:3])} and dt_bias [heads, key] = {tuple(q.shape[2:])}, "
            f"got {tuple(A_log.shape)} and {tuple(dt_bias.shape)}"
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    like_q: dict[str, tuple[Tensor, tuple[int, ...]]],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    if q.ndim != 4 or k.shape != q.shape:
        raise ShapeError(f"q and k must be [B, T, H, K] of one shape, got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ShapeError(
            f"v must be [B, T, H, V] with q's B, T, H = {tuple(q.shape[:3])}, got {tuple(v.shape)}; "
            "grouped value heads must be repeated explicitly"
        )
    for name, (tensor, shape) in like_q.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ShapeError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    lengths = sequence_lengths(q.shape[0], q.shape[1], cu_seqlens)
    expected = (len(lengths), q.shape[2], v.shape[3], q.shape[3])
    if state is not None and tuple(state.shape) != expected:
        raise ShapeError(f"state must be [sequences, heads, value, key] = {expected}, got {tuple(state.shape)}")
