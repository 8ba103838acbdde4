"""Sums of gradients: the kernel is PyTorch's addition; scaled, up to one rounding."""

import pytest
import torch

pytest.importorskip("triton")

from tercet.errors import ShapeError, UnsupportedError
from tercet.ops import accumulate, use_tier
from tercet.ops.accumulate import triton_


@pytest.mark.parametrize("shape", [(3, 5000), (1,), (0,)])
@pytest.mark.parametrize("strided", [False, True])
def test_is_addition(shape, strided, monkeypatch):
    monkeypatch.setattr(triton_, "_FEWEST", 1)
    total, part = torch.randn(shape), torch.randn(shape).bfloat16()
    if strided:
        part = torch.stack([part, part], dim=-1)[..., 0]
    expected = total + part
    with use_tier("triton"):
        accumulate(total, part)
        assert torch.equal(total, expected)
        accumulate(total, part, scale=-0.3)
    torch.testing.assert_close(total, expected - 0.3 * part.float(), atol=1e-7, rtol=3e-7)


def test_wrong_shapes_and_sums_in_another_type():
    with pytest.raises(ShapeError, match=r"\(3,\) cannot take a part \(2,\)"):
        accumulate(torch.zeros(3), torch.zeros(2))
    with use_tier("triton"), pytest.raises(UnsupportedError, match="not float64"):
        accumulate(torch.zeros(3, dtype=torch.float64), torch.zeros(3))
