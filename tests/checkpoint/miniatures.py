"""The two miniatures that the tests of this room read, load, copy and break."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tercet.checkpoint.layouts import LAYOUTS
from tercet.checkpoint.miniature import as_kimi_linear, write_miniature
from tercet.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig

MINIATURE = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    num_layers=4,
    full_attention_layers=(2, 3),
    intermediate_size=96,
    first_dense_layers=1,
    activation="situ",
    attn_res_block_size=2,
    rms_norm_eps=1e-5,
    kda=KDAConfig(num_heads=2, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
    mla=MLAConfig(
        num_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        output_gate=True,
    ),
    moe=MoEConfig(
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=1,
        intermediate_size=32,
        latent_size=32,
        latent_norm=True,
        routed_scaling_factor=1.0,
        renormalize=True,
    ),
)

MINIATURES = {"k3": MINIATURE, "kimi-linear": as_kimi_linear(MINIATURE)}


@functools.cache
def published(name: str) -> Path:
    """Return a directory with the miniature in layout *name*, written once a process; copy it before changing it."""
    root = Path(tempfile.mkdtemp(prefix="tercet-miniature-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    write_miniature(root / name, LAYOUTS[name], MINIATURES[name])
    return root / name


def editable(name: str, target: Path) -> Path:
    """Return a copy of a miniature inside *target*."""
    return Path(shutil.copytree(published(name), target / name))
