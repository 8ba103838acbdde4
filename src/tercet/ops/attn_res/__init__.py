"""Attention Residuals: each sub-layer reads a softmax mixture of finished block sums and the running partial sum.

Report §2.2, eq. 8–10. For sources ``v_1 … v_n``, norm weight a and pseudo-query w:

    s_i = rsqrt(mean(v_i²) + eps) · v_i · (a ⊙ w);   p = softmax(s);   out = Σ p_i v_i

with no scale, un-normalised values, everything in fp32 and one cast at the end. `attn_res_bank` and `attn_res_merge`
are the exact two-phase form for inference (report §5.4.2): the queries are parameters, so all queries of a block can
read the bank once, and each later merges the one source that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tercet.errors import ShapeError
from tercet.ops.attn_res import reference, torch_
from tercet.ops.attn_res.reference import Partial
from tercet.ops.norm import rms_norm
from tercet.ops.registry import Operator

_attn_res = Operator("attn_res", reference.attn_res, torch_.attn_res, "tercet.ops.attn_res.triton_")


def _then_norm(mix: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Return the tier of `attn_res_read` that runs *mix* and then the norm."""

    def run(*sources: Tensor, next_weight: Tensor, next_eps: float, **parameters: Any) -> tuple[Tensor, list[Tensor]]:
        return rms_norm(mix(*sources, **parameters), next_weight, eps=next_eps), list(sources)

    return run


_attn_res_read = Operator(
    "attn_res_read", _then_norm(reference.attn_res), _then_norm(torch_.attn_res), "tercet.ops.attn_res.triton_"
)

_bank = Operator("attn_res_bank", reference.bank, triton_module="tercet.ops.attn_res.triton_inference")
_merge = Operator("attn_res_merge", reference.merge, triton_module="tercet.ops.attn_res.triton_inference")


def attn_res(
    sources: Sequence[Float[Tensor, "*lead dim"]],
    norm_weight: Float[Tensor, "dim"],
    query: Float[Tensor, "dim"],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*lead dim"]:
    """Mix *sources* (bank slots in order, then the running sum) as above.

    Args:
        sources: at least one tensor, all of one shape.
        norm_weight: weight a of the key norm.
        query: pseudo-query w; zero gives the plain average.
        eps: added to the mean square.

    Returns:
        the mixture in the sources' dtype.

    Raises:
        ShapeError: no source, or shapes disagree.
    """
    _check(sources, norm_weight, query)
    return _attn_res(*sources, norm_weight=norm_weight, query=query, eps=eps)


def attn_res_read(
    sources: Sequence[Float[Tensor, "*lead dim"]],
    norm_weight: Float[Tensor, "dim"],
    query: Float[Tensor, "dim"],
    next_weight: Float[Tensor, "dim"],
    *,
    eps: float = 1e-5,
    next_eps: float = 1e-5,
) -> tuple[Float[Tensor, "*lead dim"], list[Float[Tensor, "*lead dim"]]]:
    """Return ``rms_norm(attn_res(sources), next_weight)``, what a sub-layer reads, and *sources* for their next reader.

    Both in one pass where a GPU kernel runs. A next reader who takes the returned sources, not the given ones, passes
    back their gradient so far, and this one's backward kernel adds its own part to it. Two readers of one tensor cost
    three more passes over both gradients and one more rounding. The values are those of *sources*.

    Args:
        sources: as for `attn_res`.
        norm_weight: as for `attn_res`.
        query: as for `attn_res`.
        next_weight: weight of the sub-layer's own norm.
        eps: as for `attn_res`.
        next_eps: its epsilon.

    Raises:
        ShapeError: no source, or shapes disagree.
    """
    _check(sources, norm_weight, query)
    if next_weight.shape != query.shape:
        raise ShapeError(f"the next norm is {tuple(next_weight.shape)} wide, the mixture {tuple(query.shape)}")
    return _attn_res_read(
        *sources, norm_weight=norm_weight, query=query, next_weight=next_weight, eps=eps, next_eps=next_eps
    )


def attn_res_weights(
    sources: Sequence[Float[Tensor, "*lead dim"]],
    norm_weight: Float[Tensor, "dim"],
    query: Float[Tensor, "dim"],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, sources * lead]:
    """Return the softmax weights p of `attn_res`, for reports (fp32)."""
    _check(sources, norm_weight, query)
    return reference.weights(sources, norm_weight, query, eps)


def attn_res_bank(
    sources: Sequence[Float[Tensor, "*lead dim"]],
    folded_queries: Float[Tensor, "queries dim"],
    *,
    eps: float = 1e-5,
) -> Partial:
    """Phase 1: read every bank slot for all queries of a block at once.

    Args:
        sources: the bank's slots.
        folded_queries: ``a ⊙ w`` of every sub-layer of the block, fp32.
        eps: added to the mean square.

    Raises:
        ShapeError: no source, or shapes disagree.
    """
    if folded_queries.ndim != 2:
        raise ShapeError(f"folded_queries must be [queries, dim], got {tuple(folded_queries.shape)}")
    _check(sources, *folded_queries[:1].expand(2, -1))
    return _bank(*sources, folded_queries=folded_queries, eps=eps)


def attn_res_merge(
    partial: Partial,
    j: int,
    source: Float[Tensor, "*lead dim"],
    folded_query: Float[Tensor, "dim"],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*lead dim"]:
    """Phase 2: add the running sum *source* to query *j* of *partial* and return the mixture in source's dtype.

    Raises:
        ShapeError: shapes disagree.
    """
    _check([source], folded_query, folded_query)
    if partial.value.shape[1:] != source.shape:
        raise ShapeError(f"the bank was read for rows {tuple(partial.value.shape[1:])}, got {tuple(source.shape)}")
    return _merge(source, partial=partial, j=j, folded_query=folded_query, eps=eps)


def _check(sources: Sequence[Tensor], norm_weight: Tensor, query: Tensor) -> None:
    if not sources:
        raise ShapeError("attn_res needs at least one source")
    shape = sources[0].shape
    if norm_weight.shape != shape[-1:] or query.shape != shape[-1:] or any(s.shape != shape for s in sources):
        shapes = {tuple(s.shape) for s in sources}
        raise ShapeError(
            f"attn_res needs sources of one shape and weight, query of their last dim; got sources {sorted(shapes)}, "
            f"weight {tuple(norm_weight.shape)}, query {tuple(query.shape)}"
        )
