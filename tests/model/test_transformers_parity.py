"""The same weights in transformers' Kimi-Linear give the same logits, gradients and routing (M7; checkpoint.md §9).

Values are compared under one forced routing, because near ties flip between implementations; the choice of experts is
compared apart, where the margin decides.
"""

import pytest
import torch

from numerics import relative_error
from tercet.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from tercet.model import CausalLM, Context, Observer, build
from tercet.model.names import published_tensors

transformers = pytest.importorskip("transformers", minversion="5.20")


def miniature() -> ModelConfig:
    """Kimi-Linear at 1/20 of its widths: 27-layer pattern cut to seven, one dense layer, softplus gate."""
    return ModelConfig(
        vocab_size=200,
        hidden_size=96,
        num_layers=7,
        full_attention_layers=(3, 6),
        intermediate_size=160,
        first_dense_layers=1,
        activation="silu",
        attn_res_block_size=None,
        rms_norm_eps=1e-5,
        kda=KDAConfig(num_heads=3, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=None, full_rank_gate=False),
        mla=MLAConfig(
            num_heads=3,
            q_lora_rank=None,
            kv_lora_rank=40,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            output_gate=False,
        ),
        moe=MoEConfig(
            num_experts=16,
            num_experts_per_token=4,
            num_shared_experts=1,
            intermediate_size=48,
            latent_size=None,
            latent_norm=False,
            routed_scaling_factor=2.446,
            renormalize=True,
        ),
        initializer_range=0.1,
    )


def runtime_form(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename published tensors to transformers' runtime form: nested gate, joined filters, stacked experts."""
    out: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if ".experts." in name or "_conv1d" in name:
            continue
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        out[name.replace("block_sparse_moe", "mlp")] = x.view(1, 1, -1, 1) if name.endswith("A_log") else x
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        if not config.is_mla(layer):
            filters = [tensors[f"{at}.self_attn.{n}_conv1d.weight"] for n in "qkv"]
            out[f"{at}.self_attn.conv1d.weight"] = torch.cat(filters)
        if config.is_moe(layer):
            w1, w2, w3 = (
                torch.stack(
                    [tensors[f"{at}.block_sparse_moe.experts.{e}.{w}.weight"] for e in range(config.moe.num_experts)]
                )
                for w in ("w1", "w2", "w3")
            )
            out[f"{at}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
            out[f"{at}.mlp.experts.down_proj"] = w2
    return out


def theirs(config: ModelConfig) -> torch.nn.Module:
    """Build transformers' model for *config*."""
    kda, mla, moe = config.kda, config.mla, config.moe
    return transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            moe_intermediate_size=moe.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=mla.num_heads,
            num_key_value_heads=mla.num_heads,
            n_shared_experts=moe.num_shared_experts,
            routed_scaling_factor=moe.routed_scaling_factor,
            kv_lora_rank=mla.kv_lora_rank,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            v_head_dim=mla.v_head_dim,
            num_experts_per_tok=moe.num_experts_per_token,
            num_local_experts=moe.num_experts,
            rms_norm_eps=config.rms_norm_eps,
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=1,
            linear_head_dim=kda.head_dim,
            linear_num_heads=kda.num_heads,
            linear_conv_kernel_dim=kda.short_conv_kernel_size,
            layer_types=[
                "full_attention" if config.is_mla(n) else "linear_attention" for n in range(config.num_layers)
            ],
            mlp_layer_types=["sparse" if config.is_moe(n) else "dense" for n in range(config.num_layers)],
            use_cache=False,
        )
    ).float()


class Routings(Observer):
    """Keeps every router's decision."""

    def __init__(self):
        self.seen = {}

    def routing(self, layer, routing):
        self.seen[layer] = routing


@pytest.fixture(scope="module")
def pair() -> tuple[CausalLM, torch.nn.Module, torch.Tensor, dict[int, torch.Tensor]]:
    """Our model, theirs with our weights, tokens, and the experts that theirs chooses."""
    config = miniature()
    ours = build(config, seed=5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, x in [*ours.named_parameters(), *ours.named_buffers()]:
            if x.ndim == 1 and not name.endswith("A_log"):
                x += 0.1 * torch.randn(x.shape, generator=generator)
    other = theirs(config)
    state = runtime_form(config, {name: x.detach() for name, x in published_tensors(ours)})
    other.load_state_dict(state, strict=True)
    chosen: dict[int, torch.Tensor] = {}
    for n, layer in enumerate(other.model.layers):
        if config.is_moe(n):
            layer.mlp.gate.register_forward_hook(lambda m, i, out, n=n: chosen.update({n: out[2].detach()}))
    tokens = torch.randint(config.vocab_size, (2, 75), generator=generator)
    with torch.no_grad():
        other(tokens)
    return ours, other, tokens, dict(chosen)


def test_every_tensor_has_a_place(pair):
    ours, other, _, _ = pair
    assert sum(x.numel() for x in ours.state_dict().values()) == sum(x.numel() for x in other.state_dict().values())


def test_logits(pair):
    ours, other, tokens, chosen = pair
    with torch.no_grad():
        expected = other(tokens).logits
        got = ours(tokens, Context(forced_routing=chosen))
    assert relative_error(got, expected) < 2e-5


def test_gradients(pair):
    ours, other, tokens, chosen = pair
    config = ours.config
    loss = torch.nn.functional.cross_entropy
    for model, logits in ((other, other(tokens).logits), (ours, ours(tokens, Context(forced_routing=chosen)))):
        model.zero_grad()
        loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads = dict(ours.named_parameters())
    published = {}
    for name, x in published_tensors(ours):
        parameter = grads.get(name)
        if parameter is not None:
            published[name] = parameter.grad
        elif ".experts." in name:
            at, expert, which = name.removesuffix(".weight").rsplit(".", 2)
            published[name] = grads[f"{at}.{which}"].grad[int(expert)]
        else:
            published[name] = torch.zeros_like(x)
    expected = {name: p.grad for name, p in other.named_parameters()}
    converted = runtime_form(config, published)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert relative_error(converted[name].view_as(gradient), gradient) < 2e-4, name


def test_routing(pair):
    """Without forcing, the same experts wherever the deciding margin exceeds rounding; weights follow."""
    ours, _, tokens, chosen = pair
    recorder = Routings()
    with torch.no_grad():
        ours(tokens, Context(observer=recorder, forced_routing=None))
    assert recorder.seen.keys() == chosen.keys()
    for layer, routing in recorder.seen.items():
        bias = ours.model.layers[layer].block_sparse_moe.gate.e_score_correction_bias
        biased = routing.scores + bias
        margin = biased.gather(1, routing.experts).amin(1) - routing.cutoff
        decided = margin > 1e-4
        assert decided.float().mean() > 0.95
        mine, yours = (x.sort(1).values for x in (routing.experts, chosen[layer]))
        assert torch.equal(mine[decided], yours[decided])


def test_padding_free_batches_agree_with_packing(pair):
    ours, other, tokens, chosen = pair
    with torch.no_grad():
        expected = other(tokens).logits.view(1, 150, -1)
        bounds = torch.tensor([0, 75, 150])
        got = ours(tokens.view(1, 150), Context(cu_seqlens=bounds, forced_routing=chosen))
    assert relative_error(got, expected) < 2e-5
