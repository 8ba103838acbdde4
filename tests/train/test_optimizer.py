"""The optimiser around Muon: AdamW groups, fp32 masters, clipping, bad steps, resume (training.md §1.4–§1.6)."""

import io

import pytest
import torch

from tercet.config import OptimConfig
from tercet.errors import CheckpointError, NumericsError
from tercet.model import to_compute_dtype
from tercet.train.optimizer import Optimizer
from tests.train.train_models import fill_gradients, small_model, snapshot


def assert_same(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> None:
    assert x.keys() == y.keys()
    assert all(torch.equal(x[name], y[name]) for name in x), [name for name in x if not torch.equal(x[name], y[name])]


def flat_state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    parameters = optimizer.state_dict()["parameters"]
    return {f"{name}/{key}": value.clone() for name, kept in parameters.items() for key, value in kept.items()}


def bf16_model():
    return to_compute_dtype(small_model(torch.float32), torch.bfloat16)


def test_adamw_equals_torch_with_decay_by_group():
    ours, theirs = small_model(), small_model()
    optimizer = Optimizer(ours, OptimConfig(matrix_optimizer="adamw", grad_clip=1e9))
    undecayed = [p for name, p in theirs.named_parameters() if name.endswith(("A_log", "dt_bias"))]
    decayed = [p for name, p in theirs.named_parameters() if not name.endswith(("A_log", "dt_bias"))]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, lr in enumerate((1e-2, 5e-3, 2e-3, 1e-2)):
        for model in (ours, theirs):
            fill_gradients(model, seed=step)
        for group in reference.param_groups:
            group["lr"] = lr
        optimizer.step(lr)
        reference.step()
        for x, y in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_update_and_weight_rms_are_those_of_the_tensors():
    model = small_model()
    optimizer = Optimizer(model, OptimConfig(grad_clip=1e9, weight_decay=0.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model, seed=0)
    report = optimizer.step(1e-3, measure_weights=True)
    for group in ("muon", "adamw", "adamw_no_decay"):
        members = [(name, p.detach()) for name, p in model.named_parameters() if optimizer.group(name) == group]
        moved = torch.cat([(p - before[name]).flatten() for name, p in members]) / 1e-3
        assert report.update_rms[group] == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-9)
        weights = torch.cat([p.flatten() for _, p in members])
        assert report.weight_rms[group] == pytest.approx(float(weights.square().mean().sqrt()), rel=1e-12)
    assert optimizer.step(1e-3).weight_rms == {}


def test_a_parameter_without_gradient_is_untouched():
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())
    fill_gradients(model, seed=0)
    optimizer.step(1e-2)
    names = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.layers.1.block_sparse_moe.experts.w1",
    ]
    before, state = snapshot(model), flat_state(optimizer)
    fill_gradients(model, seed=1)
    for name in names:
        model.get_parameter(name).grad = None
    optimizer.step(1e-2)
    after, new_state = snapshot(model), flat_state(optimizer)
    for name in names:
        assert torch.equal(before[name], after[name])
        assert all(torch.equal(state[key], new_state[key]) for key in state if key.startswith(f"{name}/"))
    moved = [name for name, _ in model.named_parameters() if not torch.equal(before[name], after[name])]
    assert len(moved) == len(list(model.parameters())) - len(names)
    # Bias correction counts a parameter's own steps.
    assert int(optimizer.state_dict()["parameters"]["model.norm.weight"]["steps"]) == 1


def test_norms_and_clipping():
    model, free = small_model(), small_model()
    fill_gradients(model, seed=0, scale=1.0)
    fill_gradients(free, seed=0, scale=1.0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    routers = [g.flatten() for name, g in gradients.items() if name.endswith("block_sparse_moe.gate.weight")]
    clipped, unclipped = Optimizer(model, OptimConfig(grad_clip=2.0)), Optimizer(free, OptimConfig(grad_clip=1e9))
    report = clipped.step(1e-3)
    unclipped.step(1e-3)
    assert report.grad_norm["all"] == pytest.approx(float(total), rel=1e-12)
    assert report.grad_norm["routers"] == pytest.approx(float(torch.cat(routers).norm()), rel=1e-12)
    embeddings = gradients["model.embed_tokens.weight"]
    assert report.grad_norm["embeddings"] == pytest.approx(float(embeddings.norm()), rel=1e-12)
    momentum = clipped.state_dict()["parameters"]["model.layers.0.self_attn.o_proj.weight"]["momentum"]
    other = unclipped.state_dict()["parameters"]["model.layers.0.self_attn.o_proj.weight"]["momentum"]
    torch.testing.assert_close(momentum, other * (2.0 / total), rtol=1e-12, atol=0.0)


def test_gradients_are_consumed_and_accumulate_over_backward_passes():
    once, twice = small_model(), small_model()
    fill_gradients(once, seed=0)
    fill_gradients(twice, seed=0)
    for parameter in twice.parameters():
        parameter.grad.mul_(0.5)
    halves = {name: p.grad.clone() for name, p in twice.named_parameters()}
    one, two = Optimizer(once, OptimConfig()), Optimizer(twice, OptimConfig())
    two.accumulate()
    for name, parameter in twice.named_parameters():
        parameter.grad.add_(halves[name])  # what a second backward pass does
    two.accumulate()
    assert one.step(1e-2).grad_norm == two.step(1e-2).grad_norm
    assert_same(snapshot(once), snapshot(twice))
    assert all(parameter.grad is None for parameter in twice.parameters())


def test_bf16_parameters_follow_an_fp32_master():
    model = bf16_model()
    optimizer = Optimizer(model, OptimConfig())
    name = "model.layers.0.self_attn.q_proj.weight"
    parameter = model.get_parameter(name)
    assert parameter.dtype == torch.bfloat16
    assert optimizer.weight(name).dtype == torch.float32
    assert optimizer.weight("model.layers.0.self_attn.A_log") is not None
    start = optimizer.weight(name).clone()
    for step in range(20):
        fill_gradients(model, seed=step)
        optimizer.step(1e-5)
        for other_name, other in model.named_parameters():
            assert torch.equal(other, optimizer.weight(other_name).to(other.dtype))
    # Steps far below bf16's resolution add up in the master.
    assert not torch.equal(optimizer.weight(name), start)
    assert float((optimizer.weight(name) - optimizer.weight(name).bfloat16().float()).abs().max()) > 0


def test_bf16_gradients_are_summed_in_fp32():
    model = bf16_model()
    optimizer = Optimizer(model, OptimConfig())
    name = "model.layers.0.self_attn.o_proj.weight"
    for value in [1.0] + [2.0**-9] * 8:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.accumulate()
        assert model.get_parameter(name).grad is None
        model.get_parameter("model.layers.0.self_attn.A_log").grad = None
    report = optimizer.step(1e-3)
    momentum = optimizer.state_dict()["parameters"][name]["momentum"]
    # In bf16, 1 + 2⁻⁹ would round back to 1 every time.
    torch.testing.assert_close(momentum * max(1.0, report.grad_norm["all"]), torch.full_like(momentum, 1 + 2.0**-6))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [small_model, bf16_model])
def test_a_bad_step_changes_nothing(make, value):
    model = make()
    optimizer = Optimizer(model, OptimConfig())
    fill_gradients(model, seed=0)
    optimizer.step(1e-2)
    weights, state = snapshot(model), flat_state(optimizer)
    fill_gradients(model, seed=1)
    model.get_parameter("model.layers.1.block_sparse_moe.gate.weight").grad[0, 0] = value
    report = optimizer.step(1e-2)
    assert report.skipped
    assert_same(weights, snapshot(model))
    assert_same(state, flat_state(optimizer))
    assert all(parameter.grad is None for parameter in model.parameters())
    # The step after it is the one that would have come without it.
    twin = make()
    other = Optimizer(twin, OptimConfig())
    for seed in (0, 2):
        fill_gradients(twin, seed=seed)
        other.step(1e-2)
    fill_gradients(model, seed=2)
    assert not optimizer.step(1e-2).skipped
    assert_same(snapshot(model), snapshot(twin))


def test_three_bad_steps_in_a_row_stop_the_run():
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())

    def step(bad: bool) -> bool:
        fill_gradients(model, seed=0)
        if bad:
            model.lm_head.weight.grad[0, 0] = float("nan")
        return optimizer.step(1e-3).skipped

    assert [step(bad) for bad in (True, True, False, True, True)] == [True, True, False, True, True]
    with pytest.raises(NumericsError, match="3 steps in a row"):
        step(True)


@pytest.mark.parametrize("make", [small_model, bf16_model])
@pytest.mark.parametrize("matrix_optimizer", ["muon", "adamw"])
def test_resume_is_bit_identical(make, matrix_optimizer):
    config = OptimConfig(matrix_optimizer=matrix_optimizer)
    model = make()
    optimizer = Optimizer(model, config)
    for step in range(5):
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        fill_gradients(model, seed=step)
        optimizer.step(1e-2)
    resumed = make()
    for parameter in resumed.parameters():
        parameter.data.normal_()
    again = Optimizer(resumed, config)
    fill_gradients(resumed, seed=9)
    again.step(1e-2)
    file.seek(0)
    saved = torch.load(file)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    for step in range(2, 5):
        fill_gradients(resumed, seed=step)
        again.step(1e-2)
    assert_same(snapshot(model), snapshot(resumed))
    assert_same(flat_state(optimizer), flat_state(again))


def test_a_run_goes_on_in_another_dtype_from_its_masters():
    model = bf16_model()
    optimizer = Optimizer(model, OptimConfig())
    fill_gradients(model, seed=0)
    optimizer.step(1e-4)
    wide = small_model(torch.float32)
    wide.load_state_dict(model.state_dict())
    other = Optimizer(wide, OptimConfig())
    other.load_state_dict(optimizer.state_dict())
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, optimizer.weight(name))


def test_state_of_another_model_or_optimiser_is_refused():
    model = small_model()
    optimizer = Optimizer(model, OptimConfig())
    fill_gradients(model, seed=0)
    optimizer.step(1e-3)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="matrix_optimizer"):
        Optimizer(small_model(), OptimConfig(matrix_optimizer="adamw")).load_state_dict(state)
    with pytest.raises(CheckpointError, match="another preset"):
        Optimizer(small_model(mtp=False), OptimConfig()).load_state_dict(state)
    name = "model.layers.0.self_attn.o_proj.weight"
    broken = {**state["parameters"], name: {"momentum": torch.zeros(3, 3)}}
    other = Optimizer(small_model(), OptimConfig())
    with pytest.raises(CheckpointError, match=r"\[3, 3\]"):
        other.load_state_dict({**state, "parameters": broken})
    assert not flat_state(other)  # refused before anything was taken over
