"""Kernels that were tuned for more shared memory than a GPU has run with fewer stages, or say that they cannot.

And those for one kind of GPU, in a language that is not settled, run where both are known.
"""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tercet.errors import UnsupportedError
from tercet.ops import gpu
from tercet.ops.gpu import Chip, Fitted


class Kernel:
    """Takes 40 KB a stage, of which the device has *room*."""

    __name__ = "greedy"

    def __init__(self, room):
        self.room, self.launches = room, []

    def __getitem__(self, grid):
        def launch(*args, num_stages=3, STAGES=0, **options):
            self.launches.append((num_stages, STAGES))
            if 40 * max(num_stages, STAGES) > self.room:
                raise OutOfResources(40 * max(num_stages, STAGES), self.room, "shared memory")
            return grid, args, options

        return launch


def test_runs_as_tuned_where_it_fits():
    kernel = Kernel(200)
    assert Fitted(kernel)[(7,)](1, 2, num_stages=4, BM=64) == ((7,), (1, 2), {"BM": 64})
    assert kernel.launches == [(4, 0)]


def test_loses_stages_once_and_remembers():
    kernel = Kernel(100)
    run = Fitted(kernel)
    for _ in range(2):
        run[(1,)](num_stages=4, BM=64)
    assert kernel.launches == [(4, 0), (3, 0), (2, 0), (2, 0)]
    run[(1,)](num_stages=2, BM=32)
    assert kernel.launches[-1] == (2, 0)


def test_other_options_are_tried_as_tuned():
    kernel = Kernel(100)
    run = Fitted(kernel)
    run[(1,)](num_stages=3, BM=64)
    kernel.room = 200
    run[(1,)](num_stages=3, BM=32)
    assert kernel.launches[-1] == (3, 0)


def test_a_loop_with_its_own_stages_loses_them_too():
    kernel = Kernel(100)
    Fitted(kernel)[(1,)](STAGES=6)
    assert kernel.launches[0] == (3, 6)
    assert kernel.launches[-1] == (1, 2)


def test_says_when_nothing_helps():
    with pytest.raises(UnsupportedError, match="greedy does not fit this GPU: it needs 40 of shared memory"):
        Fitted(Kernel(30))[(1,)](num_stages=2)


@pytest.mark.parametrize(
    ("chip", "version", "taken"),
    [
        (Chip(132, 227 << 10, 9), "3.6.0", True),
        (Chip(132, 227 << 10, 9), "3.99.1", False),
        (Chip(148, 227 << 10, 10), "3.6.0", False),
        (Chip(304, 64 << 10, 0), "3.6.0", False),
    ],
    ids=["Hopper", "another Triton", "Blackwell", "AMD"],
)
def test_gluon_where_it_is_known_to_work(chip, version, taken, monkeypatch):
    monkeypatch.setattr(gpu, "chip", lambda device: chip)
    monkeypatch.setattr(gpu.triton, "__version__", version)
    assert gpu.takes_gluon.__wrapped__(torch.device("cuda")) == taken
