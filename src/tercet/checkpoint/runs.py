"""Between published checkpoints and training runs.

RUN/config.json                  run configuration
RUN/tokenizer/                   if the published checkpoint brings a rank file
RUN/checkpoints/step-00000000/   weights in the format of `state`, experts dequantised, published dtypes kept
RUN/published/                   what `tercet.checkpoint.base` keeps for a faithful export

An imported run has no optimiser state: training it starts with a fresh optimiser, under any settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tercet.checkpoint.base import Base
from tercet.checkpoint.convert import Experts, plan, planned_data, write_published
from tercet.checkpoint.directory import CheckpointDirectory
from tercet.checkpoint.layouts import LAYOUTS, Rule, StoredTensor, layout, natural_layout
from tercet.checkpoint.progress import Advance, byte_progress
from tercet.checkpoint.state import Piece, describe, number_files, write_companions
from tercet.checkpoint.writer import Provide, new_directory, write_shard
from tercet.config import RunConfig
from tercet.data import Tokenizer
from tercet.errors import CheckpointError
from tercet.presets import PRESETS, preset
from tercet.util.files import write_json
from tercet.util.settings import to_dict

KEPT_FOLDER = "published"
RANK_FILE = "tiktoken.model"


def import_checkpoint(
    source: str | Path, run: str | Path, *, dtype: str | None = None, show: bool | None = None
) -> Path:
    """Turn a published checkpoint into a training run.

    Args:
        source: published directory.
        run: new run directory.
        dtype: safetensors dtype of the matrices; None keeps the published one (MXFP4 experts become BF16, exactly).
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: *source* is not a sound published checkpoint, or *run* exists.
        StorageError: the disk refused a write; nothing is left behind.
    """
    directory = CheckpointDirectory.open(source)
    base = Base.of(directory)
    tensors = plan(directory, LAYOUTS["run"], experts="plain", dtype=dtype, kept=base)
    kept = base.kept_tensors()
    with new_directory(run) as part:
        write_json(part / "config.json", to_dict(run_config(directory)))
        if (directory.path / RANK_FILE).is_file():
            Tokenizer.load(directory.path).save(part / "tokenizer")
        total = sum(tensor.nbytes for tensor in [*tensors, *kept])
        with byte_progress(f"importing {directory.path.name}", total, show) as advance:
            base.keep(part / KEPT_FOLDER, advance)
            step = part / "checkpoints" / "step-00000000"
            step.mkdir(parents=True)
            _write_weights(step, tensors, planned_data(directory), advance)
    return Path(run)


def _write_weights(step: Path, tensors: Sequence[StoredTensor], provide: Provide, advance: Advance) -> None:
    """Write a checkpoint of weights alone, cut into files as the trainer cuts them."""
    by_name = {tensor.name: tensor for tensor in tensors}
    (named,) = number_files([[Piece(tensor.name, tensor.nbytes) for tensor in tensors]])
    for file, names in named.items():
        write_shard(step / file, [by_name[name] for name in names], provide, advance)
    placed = {name: (file, by_name[name].nbytes) for file, names in named.items() for name in names}
    files = {file: describe(step / file) for file in named}
    write_companions(step, 0, {"skipped_in_a_row": 0}, placed, files)


def run_config(directory: CheckpointDirectory) -> RunConfig:
    """Return the run configuration of an imported checkpoint: its preset's if it is one, else defaults."""
    for name in PRESETS:
        if (known := preset(name)).model == directory.model:
            return known
    return RunConfig(preset="imported", model=directory.model)


def find_base(directory: CheckpointDirectory, base: str | Path | None) -> Base | None:
    """Return the base named by the caller, or what an imported run keeps, or a published directory itself."""
    if base is not None:
        return Base.open(base)
    if directory.layout.name != "run":
        return Base.of(directory)
    kept = _root(directory) / KEPT_FOLDER
    return Base.open(kept) if kept.is_dir() else None


def export_checkpoint(
    source: str | Path,
    path: str | Path,
    *,
    layout_name: str | None = None,
    experts: Experts = "keep",
    dtype: str | None = None,
    rule: Rule = "even",
    base: str | Path | None = None,
    show: bool | None = None,
) -> Path:
    """Write a training run, one of its checkpoints, or a published directory as a published directory.

    Args:
        source: what to export.
        path: a new directory.
        layout_name: ``k3`` or ``kimi-linear``; by default the one the model belongs to.
        experts: see `write_published`.
        dtype: see `write_published`.
        rule: scale rule of newly encoded MXFP4 blocks.
        base: published checkpoint the run started from; by default what the run keeps of it.
        show: progress bar; None shows it on a terminal.

    Raises:
        CheckpointError, ConfigError, StorageError: see `write_published`.
    """
    directory = CheckpointDirectory.open(source)
    chosen = layout(layout_name) if layout_name else natural_layout(directory.model)
    found = find_base(directory, base)
    if found is not None and base is None and found.layout is not chosen:
        found = None  # the caller asked for another family of layouts than the run came from
    tokenizer = _tokenizer(directory) if found is None else None
    written = write_published(directory, path, chosen, experts=experts, dtype=dtype, rule=rule, base=found, show=show)
    if tokenizer is not None:
        tokenizer.save(written)
    return written


def _root(directory: CheckpointDirectory) -> Path:
    """Return the run's own directory, of which *directory* may be one checkpoint."""
    path = directory.path
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _tokenizer(directory: CheckpointDirectory) -> Tokenizer | None:
    """Return the run's tokenizer.

    Raises:
        CheckpointError: it has ids that the model does not have (known_faults_model.md M28).
    """
    folder = _root(directory) / "tokenizer"
    if not folder.is_dir():
        return None
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > directory.model.vocab_size:
        raise CheckpointError(
            f"{folder} has {tokenizer.vocab_size:,} ids, but the model embeds {directory.model.vocab_size:,}"
        )
    return tokenizer
