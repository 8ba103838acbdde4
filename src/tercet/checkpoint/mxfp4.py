"""MXFP4: four-bit codes with one power-of-two scale per 32 inputs (checkpoint.md §5; OCP Microscaling v1.0).

    value = code · 2^(scale byte − 127),   code ∈ ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}

Byte j of a row holds element 2j in its low nibble and 2j + 1 in its high nibble. Decoding is exact, in fp32 and in
bf16 alike: a code has two significant bits and both formats reach down to 2^−128. Encoding rounds to nearest, ties to
the even code, and saturates at 6; the scale of a block with largest magnitude amax = f · 2^e, f ∈ [1, 2), is 2^(e−2),
doubled

* ``even``  if f ≥ 1.75 (the default, and compressed-tensors' rule): amax/scale ∈ [3.5, 7),
* ``floor`` never (the OCP text): amax/scale ∈ [4, 8), values above 6 saturate,
* ``rceil`` if f > 1.5: amax/scale ∈ (3, 6], nothing saturates.

Shape suffixes: O outputs, I inputs, P packed bytes (I/2), G groups (I/32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from tercet.checkpoint.layouts import GROUP, RULES, Rule
from tercet.errors import CheckpointError, ConfigError, NumericsError, ShapeError

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0–7; codes 8–15 are their negatives, so 8 is −0."""

_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between neighbouring codes, and whether the midpoint itself goes up (to the even code)."""

_DOUBLED_FROM = {"even": 1.75, "floor": 2.0, "rceil": 1.5}


@dataclass(frozen=True)
class PackedWeight:
    """A quantised matrix as files hold it."""

    packed: UInt8[Tensor, "*lead outputs bytes"]
    scale: UInt8[Tensor, "*lead outputs groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values; see `decode`."""
        return decode(self.packed, self.scale, dtype)


def _power(exponent_byte: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^(byte − 127) exactly, by writing the exponent field; byte 0 is the subnormal 2^−127."""
    bits = exponent_byte.to(torch.int32)
    field = torch.where(bits == 0, 0x0040_0000, bits << 23)
    return field.view(torch.float32).to(dtype)


def _pairs(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "256 2"]:
    """Return the two values of every packed byte at scale 1: low nibble first."""
    codes = torch.tensor(CODES + tuple(-code for code in CODES), dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([codes[byte & 15], codes[byte >> 4]], dim=-1)


def decode(
    packed_OP: UInt8[Tensor, "*lead outputs bytes"],
    scale_OG: UInt8[Tensor, "*lead outputs groups"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*lead outputs inputs"]:
    """Return the exact values.

    Args:
        packed_OP: two codes a byte.
        scale_OG: one E8M0 byte per 32 values.
        dtype: float32, bfloat16 or float64.

    Raises:
        ShapeError: not uint8, or the scales do not match the codes: ``[outputs, inputs/32]``.
        CheckpointError: a scale byte is 255 (NaN), or a value is beyond *dtype*'s range.
    """
    if packed_OP.dtype != torch.uint8 or scale_OG.dtype != torch.uint8:
        raise ShapeError(f"MXFP4 codes and scales must be uint8, got {packed_OP.dtype} and {scale_OG.dtype}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ShapeError(f"MXFP4 decodes exactly to float32, bfloat16 or float64, not to {dtype}")
    inputs = 2 * packed_OP.shape[-1]
    if inputs % GROUP or scale_OG.shape != (*packed_OP.shape[:-1], inputs // GROUP):
        raise ShapeError(
            f"{tuple(packed_OP.shape)} packed bytes hold {inputs} inputs a row and need scales of shape "
            f"{(*packed_OP.shape[:-1], inputs // GROUP)} (inputs in groups of {GROUP}), got {tuple(scale_OG.shape)}"
        )
    largest = int(scale_OG.max()) if scale_OG.numel() else 0
    if largest == 255:
        raise CheckpointError("an MXFP4 scale byte is 255 (NaN), which no valid checkpoint contains")
    pairs = _pairs(dtype, packed_OP.device)
    codes = torch.index_select(pairs, 0, packed_OP.flatten().to(torch.int32))
    values_OGg = codes.view(*scale_OG.shape, GROUP) * _power(scale_OG, dtype)[..., None]
    if largest >= 253 and not values_OGg.isfinite().all():
        raise CheckpointError(f"MXFP4 values at scale 2^{largest - 127} are beyond {dtype}; decode to float64")
    return values_OGg.flatten(-2)


def encode(
    x_OI: Float[Tensor, "*lead outputs inputs"], rule: Rule = "even", *, keep: PackedWeight | None = None
) -> PackedWeight:
    """Quantise a matrix; blocks run along the last axis.

    A block of zeros gets scale byte 0. The sign of a zero survives, so −0 stays code 8.

    Args:
        x_OI: finite values; the last axis is a multiple of 32.
        rule: scale rule, see the module's text.
        keep: an earlier encoding of the same shape. Blocks whose values it already represents, sign of zero included,
            keep their bytes — the rule that wrote a checkpoint need not be known to preserve it.

    Raises:
        ShapeError: the last axis is not a multiple of 32, or *keep* has another shape.
        NumericsError: a value is not finite.
        ConfigError: unknown rule.
    """
    if rule not in _DOUBLED_FROM:
        raise ConfigError(f"unknown MXFP4 scale rule {rule!r}; use one of {', '.join(RULES)}")
    if x_OI.ndim < 1 or x_OI.shape[-1] % GROUP:
        raise ShapeError(f"MXFP4 needs inputs in groups of {GROUP}, got the shape {tuple(x_OI.shape)}")
    if keep is not None and keep.shape != tuple(x_OI.shape):
        raise ShapeError(f"the earlier encoding has shape {keep.shape}, the matrix {tuple(x_OI.shape)}")
    x_OGg = x_OI.detach().to(torch.promote_types(x_OI.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    if not x_OGg.isfinite().all():
        raise NumericsError("cannot quantise to MXFP4: the matrix contains infinite or NaN values")
    scale_OG = _scale_bytes(x_OGg.abs().amax(-1), rule)
    # Dividing by the scale is multiplying by 2^(127 − byte): exact, except for values far below the smallest code.
    scaled_OGg = x_OGg * _power(254 - scale_OG.to(torch.int32), x_OGg.dtype)[..., None]
    codes_OGg = _nearest_code(scaled_OGg.abs()) + 8 * torch.signbit(x_OGg).to(torch.uint8)
    pairs = codes_OGg.flatten(-2).unflatten(-1, (-1, 2))
    packed_OP = pairs[..., 0] | (pairs[..., 1] << 4)
    if keep is not None:
        same_OG = _same_values(x_OGg, keep)
        scale_OG = torch.where(same_OG, keep.scale, scale_OG)
        same_OP = same_OG.repeat_interleave(GROUP // 2, dim=-1)
        packed_OP = torch.where(same_OP, keep.packed, packed_OP)
    return PackedWeight(packed_OP, scale_OG)


def _scale_bytes(amax_OG: Tensor, rule: Rule) -> UInt8[Tensor, "*lead outputs groups"]:
    mantissa, exponent = torch.frexp(amax_OG)  # amax = mantissa · 2^exponent, mantissa in [0.5, 1)
    f = 2 * mantissa
    doubled = f > _DOUBLED_FROM[rule] if rule == "rceil" else f >= _DOUBLED_FROM[rule]
    byte = (exponent - 1 + doubled.to(exponent.dtype) - 2 + 127).clamp(0, 254)
    return torch.where(amax_OG == 0, 0, byte).to(torch.uint8)


def _nearest_code(magnitude: Tensor) -> UInt8[Tensor, ...]:
    """Return the code 0–7 nearest to each non-negative value, ties to the even code."""
    infinity = torch.tensor(torch.inf, dtype=magnitude.dtype)
    bounds = [
        mid if up else torch.nextafter(torch.tensor(mid, dtype=magnitude.dtype), infinity) for mid, up in _MIDPOINTS
    ]
    boundaries = torch.tensor([float(bound) for bound in bounds], dtype=magnitude.dtype, device=magnitude.device)
    return torch.bucketize(magnitude, boundaries, right=True, out_int32=True).to(torch.uint8)


def _same_values(x_OGg: Tensor, keep: PackedWeight) -> Tensor:
    """Return which blocks *keep* represents exactly, telling −0 from 0."""
    kept_OGg = keep.decode(torch.float64).unflatten(-1, (-1, GROUP))
    x_OGg = x_OGg.to(torch.float64)
    return ((x_OGg == kept_OGg) & (torch.signbit(x_OGg) == torch.signbit(kept_OGg))).all(-1)
