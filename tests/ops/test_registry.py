"""Tiers: automatic choice, forced choice, and no silence when a tier declines."""

import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tercet.errors import ConfigError, TercetWarning, UnsupportedError
from tercet.ops import OPERATORS, registry, use_tier
from tercet.ops.registry import Operator


@pytest.fixture
def operator():
    """An operator whose tiers say their own names."""
    module = types.ModuleType("tests_imaginary_triton")
    module.call = lambda x: "triton"
    module.declines = lambda x: "too small" if x.numel() < 4 else None
    sys.modules[module.__name__] = module
    yield Operator("imaginary", lambda x: "reference", lambda x: "torch", module.__name__)
    del OPERATORS["imaginary"], sys.modules[module.__name__]


def test_cpu_takes_torch_and_never_warns(operator):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator(torch.zeros(9, device="cpu")) == "torch"


def test_without_a_torch_tier_the_reference_runs():
    made = Operator("plain", lambda x: "reference")
    assert made(torch.zeros(1)) == "reference" and made.tiers() == ("reference",)
    with use_tier("torch"):
        assert made(torch.zeros(1)) == "reference"
    del OPERATORS["plain"]


def test_forced_torch_never_means_triton(operator, monkeypatch):
    monkeypatch.setattr(Operator, "_automatic", lambda *_: "triton")
    operator.kernels = sys.modules[operator.triton_module]
    operator.torch_tier = None
    assert operator(torch.zeros(9)) == "triton"
    with use_tier("torch"):
        assert operator(torch.zeros(9)) == "reference"


def test_forced_tiers_nest(operator):
    with use_tier("reference"):
        assert operator(torch.zeros(9)) == "reference"
        with use_tier("torch"):
            assert operator(torch.zeros(9)) == "torch"
        with use_tier(None):
            assert operator(torch.zeros(9)) == "torch"
        assert operator(torch.zeros(9)) == "reference"
    with pytest.raises(RuntimeError), use_tier("reference"):
        raise RuntimeError
    assert operator(torch.zeros(9)) == "torch"


def test_forced_triton_on_cpu_raises_with_the_reason(operator, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_tier("triton"), pytest.raises(UnsupportedError, match="on the CPU and TRITON_INTERPRET is not 1"):
        operator(torch.zeros(9, device="cpu"))


def test_forced_triton_declines_with_its_own_reason(operator, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_tier("triton"):
        assert operator(torch.zeros(9)) == "triton"
        with pytest.raises(UnsupportedError, match="imaginary: the triton tier declines: too small"):
            operator(torch.zeros(2))


def test_missing_module_is_a_reason(operator):
    operator.triton_module = "tercet.ops.nowhere"
    with use_tier("triton"), pytest.raises(UnsupportedError, match="cannot be imported"):
        operator(torch.zeros(9))


class OnGPU(torch.Tensor):
    """A CPU tensor that says it is on a GPU, to exercise the choice without one."""

    device = torch.device("cuda")


def test_gpu_takes_triton_or_says_once_why_not(operator, monkeypatch):
    monkeypatch.setattr(registry, "obstacle", lambda device: None)
    assert operator(torch.zeros(9).as_subclass(OnGPU)) == "triton"
    small = torch.zeros(2).as_subclass(OnGPU)
    with pytest.warns(TercetWarning, match="imaginary runs on the torch tier: triton declines: too small"):
        assert operator(small) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator(small) == "torch"
    assert operator.refusals == {"too small": "torch"}


@pytest.mark.parametrize(
    ("amd", "capability", "reason"),
    [
        (True, (9, 4), "not been run on one"),
        (False, (7, 5), "8.0 and newer, this one has 7.5"),
        (False, (8, 0), None),
        (False, (12, 0), None),
    ],
)
def test_a_gpu_without_kernels_gets_the_torch_tier_and_a_reason(operator, monkeypatch, amd, capability, reason):
    registry._obstacle.cache_clear()
    monkeypatch.setattr(registry, "AMD", amd)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if reason is None:
        assert operator(torch.zeros(9).as_subclass(OnGPU)) == "triton"
    else:
        with pytest.warns(TercetWarning, match=reason):
            assert operator(torch.zeros(9).as_subclass(OnGPU)) == "torch"
        with use_tier("triton"):
            assert operator(torch.zeros(9).as_subclass(OnGPU)) == "triton"
    registry._obstacle.cache_clear()


def test_unknown_tier():
    with pytest.raises(ConfigError, match="did you mean 'triton'"), use_tier("tritn"):
        pass


def test_every_operator_has_its_formula():
    assert OPERATORS and all("reference" in o.tiers() for o in OPERATORS.values())


def test_a_forced_tier_holds_in_every_thread(operator):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()  # the thread is older than the choice
        with use_tier("reference"):
            assert pool.submit(operator, torch.zeros(9)).result() == "reference"
        assert pool.submit(operator, torch.zeros(9)).result() == "torch"
