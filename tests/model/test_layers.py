"""Each layer alone: against its formula, absorbed against expanded, and its state through every way of cutting."""

from dataclasses import replace

import pytest
import torch

from formulas import k3_miniature, kimi_linear_miniature
from formulas import kda as kda_formula
from formulas import mla as mla_formula
from formulas import mlp as mlp_formula
from formulas import moe as moe_formula
from numerics import relative_error
from tercet.errors import ShapeError
from tercet.model import Context, MLAState, new_states
from tercet.model.kda import KimiDeltaAttention
from tercet.model.layers import MLP
from tercet.model.mla import MultiHeadLatentAttention
from tercet.model.moe import LatentMoE
from tercet.model.names import published_tensors

CONFIGS = pytest.mark.parametrize("make", [k3_miniature, kimi_linear_miniature])
LAYERS = pytest.mark.parametrize("kind", [KimiDeltaAttention, MultiHeadLatentAttention])


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """Give every tensor random fp64 values of a size that keeps activations near one."""
    module = module.double()
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        with torch.no_grad():
            x.normal_(std=0.3)
            if name.endswith("norm.weight"):
                x.add_(1)
    return module


def call(module: torch.nn.Module, x: torch.Tensor, context: Context) -> torch.Tensor:
    return module(x) if isinstance(module, MLP) else module(x, context)


@CONFIGS
@pytest.mark.parametrize("part", ["kda", "mla", "moe", "mlp"])
def test_formula_and_all_gradients(make, part):
    config = make()
    module, formula = {
        "kda": lambda: (KimiDeltaAttention(config, 0), kda_formula),
        "mla": lambda: (MultiHeadLatentAttention(config, 3), mla_formula),
        "moe": lambda: (LatentMoE(config, 1), moe_formula),
        "mlp": lambda: (MLP(config, config.intermediate_size), mlp_formula),
    }[part]()
    module = filled(module)
    x = torch.randn(9, config.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    cotangent = torch.randn_like(x)
    published = {f"at.{name}": value for name, value in published_tensors(module)}
    for e in range(config.moe.num_experts if part == "moe" else 0):
        published |= {f"at.experts.{e}.{w}.weight": getattr(module.experts, w)[e] for w in ("w1", "w2", "w3")}
    expected = formula(published, "at", config, x)
    ours = call(module, x[None], Context())[0]
    assert relative_error(ours, expected) < 1e-12
    pairs = zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (ours, expected)))
    for n, (gradient, reference) in enumerate(pairs):
        assert relative_error(gradient, reference) < 1e-9, n


@CONFIGS
@LAYERS
@pytest.mark.parametrize("lengths", [(9,), (4, 0, 5), (1, 8)])
def test_packed_equals_separate(make, kind, lengths):
    config = make()
    module = filled(kind(config, 3))
    x = torch.randn(1, sum(lengths), config.hidden_size, dtype=torch.float64)
    bounds = torch.tensor((0, *torch.tensor(lengths).cumsum(0).tolist()))
    with torch.no_grad():
        packed = module(x, Context(cu_seqlens=bounds))
        separate = [module(piece, Context()) for piece in x.split(list(lengths), 1) if piece.shape[1]]
    assert relative_error(packed, torch.cat(separate, 1)) < 1e-13


@CONFIGS
@pytest.mark.parametrize(("kind", "layer"), [(KimiDeltaAttention, 0), (MultiHeadLatentAttention, 3)])
@pytest.mark.parametrize("cuts", [(1,) * 9, (4, 5), (0, 9), (3, 1, 1, 4)])
def test_any_cut_equals_whole(make, kind, layer, cuts):
    """Chunked ≡ stepwise ≡ whole; for MLA also absorbed ≡ expanded (anchor 4)."""
    config = make()
    module = filled(kind(config, layer))
    x = torch.randn(2, 9, config.hidden_size, dtype=torch.float64)
    states = new_states(config, 2, dtype=torch.float64)
    with torch.no_grad():
        pieces = [module(piece, Context(states=states)) for piece in x.split(list(cuts), 1)]
        assert relative_error(torch.cat(pieces, 1), module(x, Context())) < 1e-13


def test_absorbed_attention_has_the_same_gradient():
    config = k3_miniature()
    module = filled(MultiHeadLatentAttention(config, 3))

    def absorbed(x):
        return module(x, Context(states=new_states(config, 1, dtype=torch.float64)))

    x = torch.randn(1, 7, config.hidden_size, dtype=torch.float64)
    assert relative_error(absorbed(x), module(x, Context())) < 1e-13


def test_kda_state_after_packed_prefill_is_that_of_separate_prefills():
    config = k3_miniature()
    module = filled(KimiDeltaAttention(config, 0))
    x = torch.randn(1, 12, config.hidden_size, dtype=torch.float64)
    together = new_states(config, 3, dtype=torch.float64)
    with torch.no_grad():
        module(x, Context(states=together, cu_seqlens=torch.tensor([0, 2, 2, 12])))
        for n, part in enumerate((x[:, :2], x[:, 2:2], x[:, 2:])):
            alone = new_states(config, 1, dtype=torch.float64)
            if part.shape[1]:
                module(part, Context(states=alone))
            assert relative_error(together[0].recurrent[n], alone[0].recurrent[0]) < 1e-13
            assert relative_error(together[0].conv[n], alone[0].conv[0]) < 1e-13


def test_shared_key_part_is_used_and_never_rotated():
    """M18: dropping it changes the output; moving a prefix of identical tokens does not."""
    config = k3_miniature()
    module = filled(MultiHeadLatentAttention(config, 3))
    x = torch.randn(1, 6, config.hidden_size, dtype=torch.float64)
    order = torch.tensor([3, 1, 4, 0, 2, 5])
    with torch.no_grad():
        last = module(x, Context())[:, 5]
        assert relative_error(module(x[:, order], Context())[:, 5], last) < 1e-13  # order of the past is invisible
        module.kv_a_proj_with_mqa.weight[config.mla.kv_lora_rank :] = 0
        assert relative_error(module(x, Context())[:, 5], last) > 1e-3


def test_latent_norms_use_their_own_epsilon():
    """M16: 1e-6, whatever the configuration's."""
    module = MultiHeadLatentAttention(k3_miniature(rms_norm_eps=1e-2), 3)
    assert module.q_a_layernorm.eps == module.kv_a_layernorm.eps == 1e-6
    assert KimiDeltaAttention(k3_miniature(rms_norm_eps=1e-2), 0).o_norm.eps == 1e-2


def test_latent_norm_sees_the_whole_sum():
    """M5: the norm is not linear, so partial sums over experts may not pass it one by one."""
    config = k3_miniature()
    module = filled(LatentMoE(config, 1))
    x = torch.randn(1, 9, config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x, Context()) - module.shared_experts(x)
        saved = module.experts.w2.clone()
        parts = []
        for keep in (slice(0, 4), slice(4, 7)):
            module.experts.w2.zero_()
            module.experts.w2[keep] = saved[keep]
            parts.append(module(x, Context()) - module.shared_experts(x))
    assert relative_error(parts[0] + parts[1], whole) > 1e-2


def test_moe_without_shared_experts():
    config = k3_miniature()
    config = replace(config, moe=replace(config.moe, num_shared_experts=0))
    module = filled(LatentMoE(config, 1))
    x = torch.randn(1, 3, config.hidden_size, dtype=torch.float64)
    assert not hasattr(module, "shared_experts") and module(x, Context()).shape == x.shape


@CONFIGS
def test_router_stays_fp32_under_bf16(make):
    """M7: logits come from the upcast row and weight."""
    config = make()
    gate = filled(LatentMoE(config, 1)).gate.bfloat16()
    x = torch.randn(5, config.hidden_size).bfloat16()
    assert gate(x).dtype is torch.float32
    assert relative_error(gate(x), x.double() @ gate.weight.double().t()) < 1e-6


def test_published_names_of_a_block():
    names = {name for name, _ in published_tensors(LatentMoE(k3_miniature(), 1))}
    assert "gate.e_score_correction_bias" in names and "routed_expert_norm.weight" in names


def test_mla_cache_grows_and_counts_only_what_is_used():
    state = MLAState(2, 5, torch.float32, "cpu")
    assert state.nbytes == 0
    rows = torch.randn(70, 5)
    assert torch.equal(state.append(0, rows[:3]), rows[:3])
    assert torch.equal(state.append(0, rows[3:]), rows)
    assert torch.equal(state.append(1, rows[:1]), rows[:1])
    assert state.nbytes == 71 * 5 * 4 and state.lengths == [70, 1]
    copy = state.snapshot()
    state.append(1, rows[1:2])
    assert copy.lengths == [70, 1] and state.lengths == [70, 2]
    copy.append(1, rows[5:6])
    assert torch.equal(state.buffer[1, 1], rows[1])
    state.restore(copy)
    assert state.lengths == [70, 2] and torch.equal(state.buffer[1, 1], rows[5])
    picked = state.slice([1])
    assert picked.lengths == [2] and picked.nbytes == 2 * 5 * 4
    with pytest.raises(ShapeError, match="as many sequences"):
        state.restore(picked)
