"""The optimiser: Muon and AdamW groups over fp32 weights, global norm clipping, bad steps skipped (training.md §1).

Parameters that the model keeps in bf16 have an fp32 master copy and an fp32 gradient here; after a step they are cast
from the master. All state goes by parameter name, so a checkpoint does not depend on the order of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig, OptimConfig
from tercet.errors import CheckpointError, NumericsError
from tercet.train.groups import GROUPS, Assignment, Group, assign
from tercet.train.muon import CPU_STACK_ELEMENTS, MAX_STACK_ELEMENTS, Stack, muon_step, plan_stacks

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did."""

    grad_norm: dict[str, float]
    """L2 norms before clipping: ``all``, and of it ``routers`` and ``embeddings`` (the input embedding)."""
    skipped: bool
    """The norm was not finite and nothing was changed: QK-Clip and balancing must not act either."""
    update_rms: dict[Group, float] = field(default_factory=dict)
    """RMS of the update per group, before η and without decay."""
    weight_rms: dict[Group, float] = field(default_factory=dict)
    """RMS of the weights per group after the step; only when asked for."""


@dataclass
class _Slot:
    """One parameter with everything kept for it."""

    name: str
    parameter: nn.Parameter
    weight: Tensor
    """What is optimised: the fp32 master, or the parameter's own memory."""
    assignment: Assignment
    gradient: Tensor | None = None
    """Sum of gradients of this step where the parameter is not its own master."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """``momentum`` under Muon; ``first`` and ``second`` moment and the number of ``steps`` under AdamW."""

    @property
    def has_master(self) -> bool:
        return self.weight.data_ptr() != self.parameter.data_ptr()

    @property
    def pending(self) -> Tensor | None:
        """The gradient of this step, if any reached the parameter."""
        return self.gradient if self.has_master else self.parameter.grad


class Optimizer:
    """Optimises every parameter of a model.

    A step is: any number of backward passes, each followed by `accumulate`, then `step`.
    A parameter without a gradient is left untouched: no update, no decay, no change of momentum.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, model_config: ModelConfig | None = None):
        """Assign every parameter of *model*.

        Args:
            model: a model whose parameters carry the published names.
            config: rates and rules.
            model_config: defaults to ``model.config``.

        Raises:
            ConfigError: a parameter has no assignment, or ``head_group`` does not divide the heads.
        """
        self.config = config
        described = model_config or model.config
        assert isinstance(described, ModelConfig)
        self.skipped_in_a_row = 0
        self._slots: dict[str, _Slot] = {}
        for name, parameter in model.named_parameters():
            assignment = assign(name, tuple(parameter.shape), described, head_group=config.muon.head_group)
            if config.matrix_optimizer == "adamw" and assignment.group == "muon":
                assignment = Assignment("adamw")
            data = parameter.detach()
            wide = torch.promote_types(data.dtype, torch.float32)
            self._slots[name] = _Slot(name, parameter, data if data.dtype == wide else data.to(wide), assignment)
        self._planned: tuple[str, ...] = ()
        self._stacks: list[Stack] = []

    def group(self, name: str) -> Group:
        """Return the group of parameter *name*."""
        return self._slots[name].assignment.group

    def weight(self, name: str) -> Float[Tensor, "*shape"]:
        """Return the fp32 weight that is optimised: the master copy, or the parameter itself."""
        return self._slots[name].weight

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add this backward pass's gradients to the fp32 sum and free them.

        Parameters that are fp32 themselves accumulate in ``.grad``, as autograd does.
        """
        for slot in self._slots.values():
            gradient = slot.parameter.grad
            if gradient is None or not slot.has_master:
                continue
            if slot.gradient is None:
                slot.gradient = gradient.to(slot.weight.dtype)
            else:
                slot.gradient.add_(gradient)
            slot.parameter.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for slot in self._slots.values():
            slot.gradient = slot.parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, *, measure_weights: bool = False) -> StepReport:
        """Clip, update every parameter that has a gradient, and drop the gradients.

        Args:
            lr: η of this step.
            measure_weights: also report the weights' RMS per group.

        Returns:
            Norms and what happened. With a non-finite norm nothing at all is changed.

        Raises:
            NumericsError: the third step in a row had a non-finite norm.
        """
        self.accumulate()
        slots = [slot for slot in self._slots.values() if slot.pending is not None]
        gradients = _gradients(slots)
        norms = _norms([slot.name for slot in slots], gradients)
        if not norms["all"] < float("inf"):
            self.zero_grad()
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise NumericsError(
                    f"the gradient norm was {norms['all']} in {self.skipped_in_a_row} steps in a row; "
                    "resume from the last checkpoint with a lower optim.lr, or look for bad data at this position"
                )
            return StepReport(norms, skipped=True)
        self.skipped_in_a_row = 0
        if norms["all"] > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / norms["all"])
        update_rms = self._update(slots, lr)
        for slot in slots:
            if slot.has_master:
                slot.parameter.copy_(slot.weight)
        self.zero_grad()
        return StepReport(norms, False, update_rms, self.weight_rms() if measure_weights else {})

    def weight_rms(self) -> dict[Group, float]:
        """Return the RMS of the weights of each group."""
        return {
            group: _rms([slot.weight for slot in self._slots.values() if slot.assignment.group == group])
            for group in GROUPS
        }

    @torch.no_grad()
    def scale_rows(self, name: str, factors: Float[Tensor, "rows"]) -> None:
        """Multiply the rows of a matrix by *factors*, in the master and in the model's copy; momentum stays."""
        slot = self._slots[name]
        slot.weight.mul_(factors.to(slot.weight)[:, None])
        if slot.has_master:
            slot.parameter.copy_(slot.weight)

    def _update(self, slots: list[_Slot], lr: float) -> dict[Group, float]:
        """Apply Muon and AdamW to *slots*; returns the RMS of the updates."""
        update_rms: dict[Group, float] = {}
        for group in GROUPS:
            members = [slot for slot in slots if slot.assignment.group == group]
            if not members:
                continue
            for slot in members:
                if not slot.state:
                    slot.state = _fresh_state(slot)
            if group == "muon":
                update_rms[group] = self._muon(members, lr)
            else:
                decay = self.config.weight_decay if group == "adamw" else 0.0
                update_rms[group] = self._adamw(members, lr, decay)
        return update_rms

    def _muon(self, slots: list[_Slot], lr: float) -> float:
        names = tuple(slot.name for slot in slots)
        if names != self._planned:
            self._planned = names
            self._stacks = plan_stacks(
                [tuple(slot.weight.shape) for slot in slots],
                [slot.assignment.views for slot in slots],
                limit=CPU_STACK_ELEMENTS if slots[0].weight.device.type == "cpu" else MAX_STACK_ELEMENTS,
            )
        return muon_step(
            self._stacks,
            [slot.weight for slot in slots],
            _gradients(slots),
            [slot.state["momentum"] for slot in slots],
            lr=lr,
            weight_decay=self.config.weight_decay,
            config=self.config.muon,
        )

    def _adamw(self, slots: list[_Slot], lr: float, weight_decay: float) -> float:
        """Decoupled AdamW; each parameter counts its own steps, because it may have had no gradient in some."""
        beta_1, beta_2 = self.config.adam_betas
        weights = [slot.weight for slot in slots]
        gradients = _gradients(slots)
        first, second = ([slot.state[key] for slot in slots] for key in ("first", "second"))
        for slot in slots:
            slot.state["steps"] += 1
        steps = [int(slot.state["steps"]) for slot in slots]
        torch._foreach_lerp_(first, gradients, 1.0 - beta_1)
        torch._foreach_mul_(second, beta_2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta_2)
        updates = torch._foreach_sqrt(second)
        torch._foreach_div_(updates, [(1.0 - beta_2**n) ** 0.5 for n in steps])
        torch._foreach_add_(updates, self.config.adam_eps)
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first)
        torch._foreach_div_(updates, [1.0 - beta_1**n for n in steps])
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        torch._foreach_add_(weights, updates, alpha=-lr)
        return _rms(updates)

    def state_dict(self) -> dict[str, Any]:
        """Return all state by parameter name; tensors are shared, not copied. Legal between steps."""
        parameters = {}
        for name, slot in self._slots.items():
            kept = dict(slot.state)
            if slot.has_master:
                kept["master"] = slot.weight
            if kept:
                parameters[name] = kept
        return {"skipped_in_a_row": self.skipped_in_a_row, "parameters": parameters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after the model's own weights have been loaded.

        A saved master restores the parameter too, whatever its dtype now; without one, masters start from the
        parameters. So a run may go on in another compute dtype.

        Raises:
            CheckpointError: a parameter is unknown, or its state is of another optimiser or shape.
        """
        saved = state["parameters"]
        for name in saved:
            if name not in self._slots:
                raise CheckpointError(
                    f"the optimiser state has {name!r}, which this model does not; is it another preset's?"
                )
        for name, slot in self._slots.items():
            _check_state(slot, saved.get(name, {}))
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        for name, slot in self._slots.items():
            kept = dict(saved.get(name, {}))
            master = kept.pop("master", slot.parameter)
            slot.weight.copy_(master)
            slot.parameter.copy_(slot.weight)
            slot.gradient = slot.parameter.grad = None
            slot.state = {key: value.to(_device(slot, key), copy=True) for key, value in kept.items()}


def _gradients(slots: Sequence[_Slot]) -> list[Tensor]:
    return [slot.pending for slot in slots if slot.pending is not None]


def _fresh_state(slot: _Slot) -> dict[str, Tensor]:
    if slot.assignment.group == "muon":
        return {"momentum": torch.zeros_like(slot.weight)}
    first, second = torch.zeros_like(slot.weight), torch.zeros_like(slot.weight)
    return {"first": first, "second": second, "steps": torch.zeros((), dtype=torch.int64)}


def _device(slot: _Slot, key: str) -> torch.device:
    """Step counts stay on the host: they only ever become Python numbers."""
    return torch.device("cpu") if key == "steps" else slot.weight.device


def _check_state(slot: _Slot, kept: dict[str, Tensor]) -> None:
    """Refuse state that this slot could not have written."""
    expected = {"momentum"} if slot.assignment.group == "muon" else {"first", "second", "steps"}
    keys = set(kept) - {"master"}
    if keys and keys != expected:
        raise CheckpointError(
            f"the optimiser state of {slot.name!r} holds {sorted(keys)}, this run needs {sorted(expected)}: "
            "was optim.matrix_optimizer changed?"
        )
    for key, value in kept.items():
        if key != "steps" and value.shape != slot.weight.shape:
            raise CheckpointError(
                f"the optimiser state {key!r} of {slot.name!r} is {list(value.shape)}, "
                f"the parameter {list(slot.weight.shape)}"
            )


def _norms(names: Sequence[str], gradients: list[Tensor]) -> dict[str, float]:
    """L2 norms over all gradients, and over the parts that are logged on their own."""
    if not gradients:
        return {"all": 0.0, "routers": 0.0, "embeddings": 0.0}
    each = torch.stack(torch._foreach_norm(gradients)).tolist()
    squares = {"all": 0.0, "routers": 0.0, "embeddings": 0.0}
    for name, norm in zip(names, each):
        squares["all"] += norm**2
        if name.endswith("block_sparse_moe.gate.weight"):
            squares["routers"] += norm**2
        elif name == "model.embed_tokens.weight":
            squares["embeddings"] += norm**2
    return {key: value**0.5 for key, value in squares.items()}


def _rms(tensors: list[Tensor] | tuple[Tensor, ...]) -> float:
    """Root mean square over all elements of *tensors*."""
    elements = sum(tensor.numel() for tensor in tensors)
    if not elements:
        return 0.0
    return float(torch.stack(torch._foreach_norm(tensors)).square().sum()) ** 0.5 / elements**0.5
