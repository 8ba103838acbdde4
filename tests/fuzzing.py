"""Hypothesis tests twice: briefly with the others, for long under ``-m slow``."""

import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def longer(test: Any, *strategies: st.SearchStrategy[Any], examples: int = 20_000) -> Callable[..., None]:
    """Return the slow twin of a hypothesis test: the same body on other inputs, and more of them."""
    body = test.hypothesis.inner_test
    bare = types.FunctionType(body.__code__, body.__globals__, body.__name__, body.__defaults__, body.__closure__)
    bare.__annotations__ = body.__annotations__
    many = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    return pytest.mark.slow(many(given(*strategies)(bare)))
