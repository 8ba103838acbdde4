"""The registry's view of the per-token log-probability kernels (`tercet.ops.cross_entropy.triton_`)."""

from tercet.ops.cross_entropy.triton_ import call_logprobs as call
from tercet.ops.cross_entropy.triton_ import declines

__all__ = ["call", "declines"]
