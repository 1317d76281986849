"""The commands of this package: `python -m data_mixtures <verb> key=value … --switch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class UsageError(ValueError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Key:
    """One key of a verb: its default as text (None: it must be given), and what it is for."""

    default: str | None
    help: str


@dataclass(frozen=True)
class Verb:
    """One command. `run` gets the values of all keys and switches and returns the exit code."""

    help: str
    run: Callable[[dict[str, str], set[str]], int]
    keys: dict[str, Key] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """Run one command. Mistakes of the user end with code 2 and one message on stderr."""
    name, *rest = argv or ["--help"]
    if name in ("--help", "-h"):
        print(_overview())
        return 0
    try:
        if name not in VERBS:
            raise UsageError(f"there is no verb {name!r}; there are: {', '.join(VERBS)}")
        verb = VERBS[name]
        if "--help" in rest or "-h" in rest:
            print(_describe(name, verb))
            return 0
        values, switches = _parse(name, verb, rest)
        return verb.run(values, switches)
    except (ValueError, FileNotFoundError) as error:
        print(f"python -m data_mixtures {name}: {error}", file=sys.stderr)
        return 2


def _parse(name: str, verb: Verb, arguments: list[str]) -> tuple[dict[str, str], set[str]]:
    values = {key: spec.default for key, spec in verb.keys.items()}
    switches: set[str] = set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument in verb.switches:
            switches.add(argument)
        elif equals and key in verb.keys:
            values[key] = value
        else:
            known = ", ".join([f"{key}=" for key in verb.keys] + list(verb.switches)) or "no arguments"
            raise UsageError(f"unknown argument {argument!r}; {name} takes {known}")
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise UsageError(f"missing {', '.join(f'{key}=' for key in missing)}; see `{name} --help`")
    return {key: value for key, value in values.items() if value is not None}, switches


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(["python -m data_mixtures <verb> key=value … --switch", "", *lines])


def _describe(name: str, verb: Verb) -> str:
    rows = [
        (f"{key}={'' if spec.default is None else spec.default}", spec.help)
        for key, spec in verb.keys.items()
    ]
    rows += verb.switches.items()
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(
        [f"python -m data_mixtures {name}: {verb.help}", *(f"  {a:{width}}  {b}" for a, b in rows)]
    )


def _smoke(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.smoke import prepare_smoke

    prepare_smoke(Path(values["root"]))
    return 0


VERBS = {
    "smoke": Verb(
        "prepare the data of the smoke run: tokenizer and four small sources",
        _smoke,
        {"root": Key("data/smoke", "folder to write to")},
    ),
}
