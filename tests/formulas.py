"""K3 and Kimi-Linear written a second time: one sequence, one token after another, straight from model.md, in fp64.

Works on the published tensor names, so it also fixes what each name means. Slow and obvious on purpose.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tercet.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig

Weights = Mapping[str, Tensor]


def k3_miniature(**changed) -> ModelConfig:
    """Every mechanism of K3 in six layers: three AttnRes blocks, the last two layers MLA."""
    values = {
        "vocab_size": 48,
        "hidden_size": 24,
        "num_layers": 6,
        "full_attention_layers": (3, 5),
        "intermediate_size": 40,
        "first_dense_layers": 1,
        "activation": "situ",
        "attn_res_block_size": 2,
        "rms_norm_eps": 1e-5,
        "kda": KDAConfig(
            num_heads=2, head_dim=12, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True
        ),
        "mla": MLAConfig(
            num_heads=2,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=6,
            v_head_dim=10,
            output_gate=True,
        ),
        "moe": MoEConfig(
            num_experts=7,
            num_experts_per_token=3,
            num_shared_experts=2,
            intermediate_size=14,
            latent_size=18,
            latent_norm=True,
            routed_scaling_factor=1.0,
            renormalize=True,
        ),
        "initializer_range": 0.2,
    }
    return ModelConfig(**{**values, **changed})


def kimi_linear_miniature(**changed) -> ModelConfig:
    """Kimi-Linear's switches: softplus gate, low-rank output gate, plain residuals, full-width experts, SwiGLU."""
    values = {
        "num_layers": 5,
        "full_attention_layers": (3, 4),
        "activation": "silu",
        "attn_res_block_size": None,
        "kda": KDAConfig(
            num_heads=2, head_dim=12, short_conv_kernel_size=4, gate_lower_bound=None, full_rank_gate=False
        ),
        "mla": MLAConfig(
            num_heads=2,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=6,
            v_head_dim=10,
            output_gate=False,
        ),
        "moe": MoEConfig(
            num_experts=7,
            num_experts_per_token=3,
            num_shared_experts=1,
            intermediate_size=14,
            latent_size=None,
            latent_norm=False,
            routed_scaling_factor=2.446,
            renormalize=True,
        ),
    }
    return k3_miniature(**{**values, **changed})


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5 * weight


def glu(config: ModelConfig, g: Tensor, u: Tensor) -> Tensor:
    if config.activation == "silu":
        return g * sigmoid(g) * u
    return 4 * torch.tanh(g / 4) * sigmoid(g) * 25 * torch.tanh(u / 25)


def mlp(w: Weights, at: str, config: ModelConfig, x: Tensor) -> Tensor:
    return (
        glu(config, x @ w[f"{at}.gate_proj.weight"].T, x @ w[f"{at}.up_proj.weight"].T) @ w[f"{at}.down_proj.weight"].T
    )


def kda(w: Weights, at: str, config: ModelConfig, x: Tensor) -> Tensor:
    """model.md §4; x is ``[T, H]``."""
    c, T = config.kda, len(x)

    def filtered(name: str) -> Tensor:
        rows = torch.cat([x.new_zeros(3, c.width), x @ w[f"{at}.{name}_proj.weight"].T])
        taps = w[f"{at}.{name}_conv1d.weight"][:, 0]
        y = torch.stack([sum(taps[:, j] * rows[t + j] for j in range(4)) for t in range(T)])
        return (y * sigmoid(y)).view(T, c.num_heads, c.head_dim)

    q, k, v = (filtered(name) for name in "qkv")
    q, k = (y / ((y * y).sum(-1, keepdim=True) + 1e-6) ** 0.5 for y in (q, k))
    z = x @ w[f"{at}.f_a_proj.weight"].T @ w[f"{at}.f_b_proj.weight"].T + w[f"{at}.dt_bias"]
    z = z.view(T, c.num_heads, c.head_dim)
    rate = w[f"{at}.A_log"].exp()[:, None]
    g = -rate * (1 + z.exp()).log() if c.gate_lower_bound is None else c.gate_lower_bound * sigmoid(rate * z)
    beta = sigmoid(x @ w[f"{at}.b_proj.weight"].T)
    if c.full_rank_gate:
        gate = x @ w[f"{at}.g_proj.weight"].T
    else:
        gate = x @ w[f"{at}.g_a_proj.weight"].T @ w[f"{at}.g_b_proj.weight"].T
    heads = []
    for h in range(c.num_heads):
        S, rows = x.new_zeros(c.head_dim, c.head_dim), []
        for t in range(T):
            S = g[t, h].exp()[:, None] * S
            S = S + beta[t, h] * torch.outer(k[t, h], v[t, h] - S.T @ k[t, h])
            rows.append(S.T @ q[t, h] * c.head_dim**-0.5)
        heads.append(torch.stack(rows))
    o = rms(torch.stack(heads, 1), w[f"{at}.o_norm.weight"], config.rms_norm_eps)
    return (o.reshape(T, -1) * sigmoid(gate)) @ w[f"{at}.o_proj.weight"].T


def mla(w: Weights, at: str, config: ModelConfig, x: Tensor) -> Tensor:
    """model.md §5: no rotation, the shared key part stays in the product, latent norms with 1e-6."""
    c, T = config.mla, len(x)
    if c.q_lora_rank is None:
        q = x @ w[f"{at}.q_proj.weight"].T
    else:
        q = rms(x @ w[f"{at}.q_a_proj.weight"].T, w[f"{at}.q_a_layernorm.weight"], 1e-6) @ w[f"{at}.q_b_proj.weight"].T
    q = q.view(T, c.num_heads, c.qk_head_dim)
    compressed = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    latent = rms(compressed[:, : c.kv_lora_rank], w[f"{at}.kv_a_layernorm.weight"], 1e-6)
    shared = compressed[:, c.kv_lora_rank :]
    kv = (latent @ w[f"{at}.kv_b_proj.weight"].T).view(T, c.num_heads, -1)
    heads = []
    for h in range(c.num_heads):
        key, value = kv[:, h, : c.qk_nope_head_dim], kv[:, h, c.qk_nope_head_dim :]
        nope, pe = q[:, h, : c.qk_nope_head_dim], q[:, h, c.qk_nope_head_dim :]
        scores = (nope @ key.T + pe @ shared.T) * c.qk_head_dim**-0.5
        rows = []
        for t in range(T):
            p = (scores[t, : t + 1] - scores[t, : t + 1].max()).exp()
            rows.append(p @ value[: t + 1] / p.sum())
        heads.append(torch.stack(rows))
    o = torch.stack(heads, 1).reshape(T, -1)
    if c.output_gate:
        o = o * sigmoid(x @ w[f"{at}.g_proj.weight"].T)
    return o @ w[f"{at}.o_proj.weight"].T


def moe(w: Weights, at: str, config: ModelConfig, x: Tensor) -> Tensor:
    """model.md §7.2: choose by score + bias, weigh by score, sum, norm, then the way up."""
    c = config.moe
    scores = sigmoid(x @ w[f"{at}.gate.weight"].T)
    z = x if c.latent_size is None else x @ w[f"{at}.routed_expert_down_proj.weight"].T
    rows = []
    for t in range(len(x)):
        chosen = (scores[t] + w[f"{at}.gate.e_score_correction_bias"]).argsort(descending=True)[
            : c.num_experts_per_token
        ]
        total = scores[t, chosen].sum() + 1e-20
        row = x.new_zeros(z.shape[1])
        for e in chosen.tolist():
            w1, w2, w3 = (w[f"{at}.experts.{e}.{n}.weight"] for n in ("w1", "w2", "w3"))
            p = scores[t, e] / total * c.routed_scaling_factor
            row = row + p * (w2 @ glu(config, w1 @ z[t], w3 @ z[t]))
        rows.append(row)
    r = torch.stack(rows)
    if c.latent_norm:
        r = rms(r, w[f"{at}.routed_expert_norm.weight"], config.rms_norm_eps)
    if c.latent_size is not None:
        r = r @ w[f"{at}.routed_expert_up_proj.weight"].T
    return r + mlp(w, f"{at}.shared_experts", config, x)


def mix(w: Weights, at: str, sources: list[Tensor], eps: float) -> Tensor:
    """model.md §6."""
    a, query = w[f"{at}_norm.weight"], w[f"{at}_proj.weight"][0]
    scores = torch.stack([(rms(v, a, eps) * query).sum(-1) for v in sources])
    p = (scores - scores.max(0).values).exp()
    return sum((p[i] / p.sum(0))[:, None] * v for i, v in enumerate(sources))


def attention(w: Weights, at: str, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    return (mla if layer in config.full_attention_layers else kda)(w, f"{at}.self_attn", config, x)


def feed_forward(w: Weights, at: str, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    if layer < config.first_dense_layers:
        return mlp(w, f"{at}.mlp", config, x)
    return moe(w, f"{at}.block_sparse_moe", config, x)


def mixture(w: Weights, config: ModelConfig, tokens: Tensor) -> Tensor:
    """The row in front of the final norm for every token of one sequence."""
    eps = config.rms_norm_eps
    bank, prefix = [], w["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        norm = w[f"{at}.input_layernorm.weight"], w[f"{at}.post_attention_layernorm.weight"]
        if config.attn_res_block_size is None:
            prefix = prefix + attention(w, at, config, layer, rms(prefix, norm[0], eps))
            prefix = prefix + feed_forward(w, at, config, layer, rms(prefix, norm[1], eps))
            continue
        u = mix(w, f"{at}.self_attention_res", [*bank, prefix], eps) if bank else prefix
        a = attention(w, at, config, layer, rms(u, norm[0], eps))
        if layer % config.attn_res_block_size == 0:
            bank, prefix = [*bank, prefix], a
        else:
            prefix = prefix + a
        h = mix(w, f"{at}.mlp_res", [*bank, prefix], eps)
        prefix = prefix + feed_forward(w, at, config, layer, rms(h, norm[1], eps))
    if config.attn_res_block_size is None:
        return prefix
    return mix(w, "model.output_attn_res", [*bank, prefix], eps)


def logits(w: Weights, config: ModelConfig, tokens: Tensor) -> Tensor:
    """The whole model for one sequence ``[T]``."""
    y = rms(mixture(w, config, tokens), w["model.norm.weight"], config.rms_norm_eps)
    return y @ w["lm_head.weight"].T


def mtp_rows(w: Weights, config: ModelConfig, rows: Tensor, next_tokens: Tensor) -> Tensor:
    """model.md §9: what the head reads for token t + 2."""
    at, eps = f"model.layers.{config.num_layers}", config.rms_norm_eps
    e = rms(w["model.embed_tokens.weight"][next_tokens], w[f"{at}.enorm.weight"], eps)
    x = torch.cat([e, rms(rows, w[f"{at}.hnorm.weight"], eps)], -1) @ w[f"{at}.eh_proj.weight"].T
    x = x + mla(w, f"{at}.self_attn", config, rms(x, w[f"{at}.input_layernorm.weight"], eps))
    x = x + moe(w, f"{at}.block_sparse_moe", config, rms(x, w[f"{at}.post_attention_layernorm.weight"], eps))
    return rms(x, w[f"{at}.shared_head.norm.weight"], eps)
