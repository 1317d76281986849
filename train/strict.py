"""Build dataclasses from plain values, strictly: unknown keys, missing keys and wrong types are all reported.

Pydantic ignores unknown keys on nested models and OmegaConf's structured configs do not know `Literal`; what a
configuration needs beyond them fits on one page.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that can't run. `problems` holds one line for each thing that is wrong."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def build(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    """Build `target` (a dataclass or a leaf type) from plain values; append what is wrong to `problems`."""
    if dataclasses.is_dataclass(target):
        return _build_dataclass(target, value, path, problems)
    origin, args = typing.get_origin(target), typing.get_args(target)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        return build(next(arg for arg in args if arg is not types.NoneType), value, path, problems)
    if origin is Literal:
        if value not in args:
            problems.append(f"{path}={value!r} must be one of {', '.join(map(str, args))}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(build(args[0], item, f"{path}[{i}]", problems) for i, item in enumerate(value))
        if len(value) != len(args):
            problems.append(f"{path} must have {len(args)} values, got {len(value)}")
            return None
        return tuple(
            build(arg, item, f"{path}[{i}]", problems)
            for i, (arg, item) in enumerate(zip(args, value, strict=True))
        )
    if origin is dict and isinstance(value, Mapping):
        return {key: build(args[1], item, f"{path}.{key}", problems) for key, item in value.items()}
    if target is float and type(value) is int:
        return float(value)
    expected = origin or target
    # bool is a subclass of int, but True is not a number of steps.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        problems.append(f"{path}={value!r} must be of type {getattr(expected, '__name__', expected)}")
    return value


def _build_dataclass(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(f"{path or 'the configuration'}={value!r} must be a section of keys")
        return None
    if path and hasattr(target, "from_dict"):  # a section that reads mappings by itself, as strictly
        return _checked(lambda: target.from_dict(value), path, problems)
    hints = typing.get_type_hints(target)
    fields = {f.name: f for f in dataclasses.fields(target) if f.init}
    before = len(problems)
    for key in value:
        if key not in fields:
            problems.append(f"{path}{'.' if path else ''}{key} is not a key; keys: {', '.join(fields)}")
    built = {}
    for name, f in fields.items():
        where = f"{path}.{name}" if path else name
        if name in value and value[name] != "???":
            built[name] = build(hints[name], value[name], where, problems)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append(f"{where} is missing")
    if len(problems) > before:
        return None  # its own checks would only repeat what was said
    return _checked(lambda: target(**built), path, problems)


def _checked(make: Callable[[], Any], path: str, problems: list[str]) -> Any:
    """`make()`, or None with its complaints appended to `problems`, one a line."""
    try:
        return make()
    except ConfigError as error:
        problems.extend(error.problems)
    except ValueError as error:
        lines = str(error).splitlines()
        told = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines
        problems.extend(f"{path}: {line}" for line in told)
    return None
