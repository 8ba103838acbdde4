"""The optimiser: Muon and AdamW groups over fp32 weights, global norm clipping, bad steps skipped (training.md §1).

Parameters that the model keeps in bf16 have an fp32 master copy and an fp32 gradient here; after a step they are cast
from the master. All state goes by parameter name, so a checkpoint does not depend on the order of parameters.

Several ranks share the work by ZeRO-1 (parallel.md §4): the gradients of a parameter are summed on the rank that owns
it, only the owner keeps master and moments and updates, and everybody receives the new weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tercet.config import ModelConfig, OptimConfig
from tercet.errors import CheckpointError, NumericsError
from tercet.ops import accumulate
from tercet.parallel import Ranks, assign_owners
from tercet.train.groups import GROUPS, Assignment, Group, assign
from tercet.train.muon import CPU_STACK_ELEMENTS, MAX_STACK_ELEMENTS, Stack, muon_step, plan_stacks

MAX_SKIPPED_IN_A_ROW = 3

FLOPS_PER_ELEMENT = 100.0
"""What updating one element costs beside Newton–Schulz, about: it waits for memory, not for arithmetic."""


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
    """What is optimised: the fp32 master, or the parameter's own memory; on other ranks than the owner the latter."""
    assignment: Assignment
    owner: int = 0
    """Rank that updates it."""
    mine: bool = True
    """Whether that is this rank."""
    gradient: Tensor | None = None
    """Sum of gradients of this step where the parameter is not its own master."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """``momentum`` under Muon; ``first`` and ``second`` moment and the number of ``steps`` under AdamW."""

    @property
    def narrow(self) -> bool:
        """Whether the parameter is kept in less than fp32, so that master and gradient sums are separate tensors."""
        return self.parameter.dtype != _wide(self.parameter.dtype)

    @property
    def has_master(self) -> bool:
        return self.narrow and self.mine

    @property
    def pending(self) -> Tensor | None:
        """The gradient of this step, if any reached the parameter."""
        return self.gradient if self.narrow else self.parameter.grad

    def nothing(self) -> None:
        """Take a gradient of zeros: the parameter got one on other ranks only."""
        zeros = torch.zeros_like(self.parameter, dtype=_wide(self.parameter.dtype))
        if self.narrow:
            self.gradient = zeros
        else:
            self.parameter.grad = zeros


class Optimizer:
    """Optimises every parameter of a model.

    A step is: any number of backward passes, each followed by `accumulate`, then `step`.
    A parameter without a gradient is left untouched: no update, no decay, no change of momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        model_config: ModelConfig | None = None,
        *,
        ranks: Ranks | None = None,
    ):
        """Assign every parameter of *model*.

        Args:
            model: a model whose parameters carry the published names.
            config: rates and rules.
            model_config: defaults to ``model.config``.
            ranks: the processes that hold the same model; all of them call every method, in the same order.

        Raises:
            ConfigError: a parameter has no assignment, or ``head_group`` does not divide the heads.
        """
        self.config = config
        self._ranks = ranks or Ranks()
        described = model_config or model.config
        assert isinstance(described, ModelConfig)
        self.skipped_in_a_row = 0
        self._slots: dict[str, _Slot] = {}
        assignments: dict[str, Assignment] = {}
        for name, parameter in model.named_parameters():
            assignment = assign(name, tuple(parameter.shape), described, head_group=config.muon.head_group)
            if config.matrix_optimizer == "adamw" and assignment.group == "muon":
                assignment = Assignment("adamw")
            assignments[name] = assignment
        parameters = dict(model.named_parameters())
        costs = {name: _work(tuple(parameters[name].shape), a) for name, a in assignments.items()}
        self.owners = assign_owners(costs, self._ranks.world)
        """Rank that updates each parameter, by name."""
        for name, parameter in parameters.items():
            mine, data = self.owners[name] == self._ranks.rank, parameter.detach()
            weight = data.to(_wide(data.dtype)) if mine else data
            self._slots[name] = _Slot(name, parameter, weight, assignments[name], self.owners[name], mine)
        self._planned: tuple[str, ...] = ()
        self._stacks: list[Stack] = []

    def group(self, name: str) -> Group:
        """Return the group of parameter *name*."""
        return self._slots[name].assignment.group

    def weight(self, name: str) -> Float[Tensor, "*shape"]:
        """Return the fp32 weight that is optimised: the master copy, or (not owned, or fp32) the parameter itself."""
        return self._slots[name].weight

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add this backward pass's gradients to the fp32 sum and free them.

        Parameters that are fp32 themselves accumulate in ``.grad``, as autograd does.
        """
        totals, parts = [], []
        for slot in self._slots.values():
            gradient = slot.parameter.grad
            if gradient is None or not slot.narrow:
                continue
            if slot.gradient is None:
                slot.gradient = gradient.to(_wide(gradient.dtype))
            else:
                totals.append(slot.gradient)
                parts.append(gradient)
            slot.parameter.grad = None
        accumulate(totals, parts)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for slot in self._slots.values():
            slot.gradient = slot.parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, *, measure_weights: bool = False) -> StepReport:
        """Clip, update every parameter that has a gradient on any rank, and drop the gradients.

        Args:
            lr: η of this step.
            measure_weights: also report the weights' RMS per group.

        Returns:
            Norms and what happened. With a non-finite norm nothing at all is changed.

        Raises:
            NumericsError: the third step in a row had a non-finite norm.
        """
        self.accumulate()
        slots = self._with_gradients()
        mine = [slot for slot in slots if slot.mine]
        gradients = _gradients(mine)
        norms = _norms([slot.name for slot in slots], self._each_norm(slots, gradients))
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
        update_rms = self._update(mine, lr)
        copied = [slot for slot in mine if slot.has_master]
        if copied:
            torch._foreach_copy_([slot.parameter for slot in copied], [slot.weight for slot in copied])
        self.zero_grad()
        self._spread(slots)
        return StepReport(norms, False, update_rms, self.weight_rms() if measure_weights else {})

    def _with_gradients(self) -> list[_Slot]:
        """Return the parameters that got a gradient anywhere, after summing the gradients on their owners."""
        everything = list(self._slots.values())
        found = self._ranks.any([slot.pending is not None for slot in everything])
        slots = [slot for slot, has in zip(everything, found) if has]
        for slot in slots:
            if slot.pending is None:
                slot.nothing()
        self._ranks.sum_to_owners(_gradients(slots), [slot.owner for slot in slots])
        return slots

    def _each_norm(self, slots: list[_Slot], gradients: list[Tensor]) -> list[float]:
        """Return the L2 norm of every slot's gradient, from the owners' *gradients*; the same numbers on all ranks."""
        if not slots:
            return []
        own = torch.stack(torch._foreach_norm(gradients)) if gradients else slots[0].weight.new_empty(0).float()
        if self._ranks.world == 1:
            return own.tolist()
        norms = own.new_zeros(len(slots))
        norms[[n for n, slot in enumerate(slots) if slot.mine]] = own
        return self._ranks.sum(norms).tolist()

    def _spread(self, slots: Sequence[_Slot]) -> None:
        """Bring everybody the owners' weights."""
        self._ranks.spread_from_owners([slot.parameter for slot in slots], [slot.owner for slot in slots])

    def weight_rms(self) -> dict[Group, float]:
        """Return the RMS of the weights of each group."""
        return {
            group: _rms([slot.weight for slot in self._slots.values() if slot.assignment.group == group])
            for group in GROUPS
        }

    @torch.no_grad()
    def scale_rows(self, name: str, factors: Float[Tensor, "rows"]) -> None:
        """Multiply the rows of a matrix by *factors*, in the master and in all copies; momentum stays."""
        slot = self._slots[name]
        if slot.mine:
            slot.weight.mul_(factors.to(slot.weight)[:, None])
        if slot.has_master:
            slot.parameter.copy_(slot.weight)
        self._spread([slot])

    def _update(self, slots: list[_Slot], lr: float) -> dict[Group, float]:
        """Apply Muon and AdamW to *slots*; returns the RMS of the updates."""
        update_rms: dict[Group, float] = {}
        elements = dict.fromkeys(GROUPS, 0)
        for group in GROUPS:
            members = [slot for slot in slots if slot.assignment.group == group]
            if not members:
                continue
            for slot in members:
                if not slot.state:
                    slot.state = _fresh_state(slot)
            elements[group] = sum(slot.weight.numel() for slot in members)
            if group == "muon":
                update_rms[group] = self._muon(members, lr)
            else:
                decay = self.config.weight_decay if group == "adamw" else 0.0
                update_rms[group] = self._adamw(members, lr, decay)
        return update_rms if self._ranks.world == 1 else self._mean_over_ranks(update_rms, elements)

    def _mean_over_ranks(self, rms: dict[Group, float], elements: dict[Group, int]) -> dict[Group, float]:
        """Return the RMS over all ranks' elements."""
        own = [[rms.get(group, 0.0) ** 2 * elements[group], elements[group]] for group in GROUPS]
        total = self._ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return {group: (square / count) ** 0.5 for group, (square, count) in zip(GROUPS, total) if count}

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
        """Return the state of owned parameters by name; tensors are shared, not copied. Legal between steps."""
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
        parameters. So a run may go on in another compute dtype. Several ranks each bring the state of what they own.

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
        self._spread(list(self._slots.values()))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights of *dtype* are optimised: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _work(shape: tuple[int, ...], assignment: Assignment) -> float:
    """Estimate an update in FLOPs: memory traffic of every element, and five Newton–Schulz steps of every block."""
    elements = math.prod(shape)
    blocks = ((view.blocks, *sorted((view.rows, shape[-1]))) for view in assignment.views)
    return FLOPS_PER_ELEMENT * elements + sum(n * 5.0 * (4 * r * r * c + 2 * r**3) for n, r, c in blocks)


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


def _norms(names: Sequence[str], each: Sequence[float]) -> dict[str, float]:
    """L2 norms over all gradients, and over the parts that are logged on their own, from that of *each*."""
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
