"""Tables on a device that follow from shapes and lengths, made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch

from tercet.ops.compiling import traced

P = ParamSpec("P")
T = TypeVar("T")


def kept(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Keep the *maxsize* newest results of a function that makes tensors of hashable arguments.

    Unlike `functools.lru_cache` it keeps no pretended tensors, which the next real call would get; its tensors take
    part in training even if inference mode asked for them first; and what names no device is made on the CPU, whatever
    the process's default is.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def make(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.inference_mode(False), torch.device("cpu"):
                return function(*args, **kwargs)

        cached = lru_cache(maxsize=maxsize)(make)

        @wraps(function)
        def table(*args: P.args, **kwargs: P.kwargs) -> T:
            if traced():
                return make(*args, **kwargs)
            return cached(*args, **kwargs)  # type: ignore[arg-type]

        table.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return table

    return decorate
