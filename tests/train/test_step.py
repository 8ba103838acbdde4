"""One optimiser step by itself, and the measurement of it."""

import weakref

import pytest
import torch

from tercet.parallel import Ranks
from tercet.presets import preset
from tercet.train import timing
from tercet.train.step import Stepper, new_model
from tercet.util.settings import override

SETTINGS = {
    "data.sequence_length": 16,
    "data.batch_sequences": 3,
    "train.micro_batch_sequences": 1,
    "train.workers": 1,
    "train.dtype": "bfloat16",
}

pytestmark = pytest.mark.filterwarnings("ignore:one histogram bin holds")


def stepper_of(**changes):
    config = override(preset("tiny"), SETTINGS | changes)
    stepper = Stepper(new_model(config, torch.device("cpu")), config, Ranks())
    return stepper, [timing._random_batch(config, torch.device("cpu"))] * 3


def test_a_micro_batch_starts_without_the_gradients_of_the_one_before():
    """In bf16 they have gone into fp32 sums; kept alive they would be a second copy of the model."""
    stepper, batches = stepper_of()
    seen, alive = [], []
    accumulate, features = stepper.optimizer.accumulate, stepper.model.features

    def watched_accumulate():
        narrow = [p.grad for p in stepper.model.parameters() if p.dtype == torch.bfloat16]
        seen.extend(weakref.ref(gradient) for gradient in narrow if gradient is not None)
        accumulate()

    def watched_features(*args):
        alive.append(sum(ref() is not None for ref in seen))
        return features(*args)

    stepper.optimizer.accumulate = watched_accumulate
    stepper.model.features = watched_features
    stepper.step(batches, 1e-3, 0.0)
    assert len(seen) > 100
    assert alive == [0, 0, 0]


def test_measuring_changes_what_a_step_does_in_nothing():
    """Marks are identities: a watched step gives the weights of a plain one, and is as it was afterwards."""
    (plain, batches), (watched, _) = stepper_of(), stepper_of()
    plain.step(batches, 1e-3, 0.0)
    clock = timing._Clock(torch.device("cpu"))
    before = watched.workers
    with timing._watched(watched, clock):
        watched.step(batches, 1e-3, 0.0)
    for (name, a), b in zip(plain.model.named_parameters(), watched.model.parameters()):
        assert torch.equal(a, b), name
    assert watched.workers is before
    assert "step" not in vars(watched.optimizer)
    assert "forward" not in vars(watched.model.model.layers[0].self_attn)
    phases = clock.seconds()
    assert {"KDA", "MLA", "MoE", "MLP", "AttnRes", "loss", "optimizer", "balance"} == set(phases)
    assert all(seconds > 0 for seconds in phases.values())
