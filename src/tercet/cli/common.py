"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from typing import Any

from tercet.config import RunConfig
from tercet.errors import ConfigError
from tercet.presets import PRESETS, preset
from tercet.util.settings import override, parse_assignment, read_toml


def add_configuration(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``PRESET``, ``--config`` and ``--set``."""
    names = ", ".join(PRESETS)
    count = None if required else "?"
    parser.add_argument("preset", metavar="PRESET", nargs=count, help=f"configuration to start from: {names}")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings laid over the preset")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="assignments",
        help="override one setting, e.g. optim.lr=3e-4 or model.moe.num_experts=32 (repeatable; wins over --config)",
    )


def configuration(args: argparse.Namespace, extra: dict[str, Any] | None = None) -> RunConfig:
    """Return the preset with ``--config``, *extra* and ``--set`` laid over it, in that order.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    return overlay(preset(args.preset), args, extra)


def overlay(config: RunConfig, args: argparse.Namespace, extra: dict[str, Any] | None = None) -> RunConfig:
    """Return *config* with ``--config``, *extra* and ``--set`` laid over it, in that order.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    if args.config:
        config = override(config, read_toml(args.config))
    if extra:
        config = override(config, extra)
    pairs = [parse_assignment(text) for text in args.assignments]
    if twice := [key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1]:
        raise ConfigError(f"--set gives {twice[0]} twice")
    return override(config, dict(pairs))
