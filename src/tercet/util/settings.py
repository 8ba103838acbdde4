"""Read, override and write the frozen settings dataclasses.

Every path fails on an unknown key and names the nearest known one; values are checked against the annotated type.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tercet.errors import ConfigError, nearest

Settings = TypeVar("Settings")


def to_dict(settings: Any) -> dict[str, Any]:
    """Return *settings* as plain JSON-able data (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def from_dict(kind: type[Settings], data: Mapping[str, Any], where: str = "") -> Settings:
    """Build the dataclass *kind* from nested mappings.

    Raises:
        ConfigError: unknown key (names the nearest), missing key, or a value of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or kind.__name__} must be a table of settings, got {data!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown setting {where}{key!s}{nearest(str(key), fields)}")
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{where}{name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ConfigError(f"setting {where}{name} is missing and has no default")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Check *value* against the annotation *hint* and return it in its stored form."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        return _convert(inner[0], value, where)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}{nearest(str(value), map(str, args))}; use one of {list(args)}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise ConfigError(f"{where} needs {len(kinds)} values, got {len(value)}")
        return tuple(_convert(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, f"{where}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split one ``a.b=value``; the value is read as TOML, falling back to a bare string. ``none`` means None."""
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes KEY=VALUE, got {text!r}")
    raw = raw.strip()
    if raw.lower() == "none":
        return key.strip(), None
    try:
        return key.strip(), tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), raw


def override(settings: Settings, assignments: Mapping[str, Any]) -> Settings:
    """Return *settings* with dotted keys replaced and everything checked again.

    Raises:
        ConfigError: unknown key or a value of the wrong type.
    """
    data = to_dict(settings)
    for key, value in assignments.items():
        node, parts = data, key.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(node, dict) or part not in node:
                known = node if isinstance(node, dict) else {}
                raise ConfigError(
                    f"unknown setting {key!r}{nearest(part, known)} (at {'.'.join(parts[:depth]) or 'top'})"
                )
            if depth < len(parts) - 1:
                node = node[part]
        if isinstance(node[parts[-1]], dict):
            raise ConfigError(f"{key!r} is a group of settings; set one of: {', '.join(sorted(node[parts[-1]]))}")
        node[parts[-1]] = value
    return from_dict(type(settings), data)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file and flatten its tables to dotted keys for `override`.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, Any] = {}

    def walk(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk(f"{prefix}{key}.", value)
            else:
                flat[f"{prefix}{key}"] = value

    walk("", data)
    return flat


def difference(left: Any, right: Any) -> list[str]:
    """List the dotted settings in which two configurations differ, as ``key: left → right``."""
    rows: list[str] = []

    def walk(prefix: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                walk(f"{prefix}.{key}" if prefix else key, a.get(key), b.get(key))
        elif a != b:
            rows.append(f"{prefix}: {a!r} → {b!r}")

    walk("", to_dict(left), to_dict(right))
    return rows
