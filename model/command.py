"""Command lines of the form `python -m model <verb> key=value … --switch`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C has ended, as shells have it."""


class UsageError(ValueError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Key:
    """One key=value. parse turns the text into the value; default None means that it must be given.

    Of several values the last counts, unless the key repeats.
    """

    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    repeats: bool = False
    """Whether its value is the list of all that was given."""

    def read(self, name: str, texts: list[str]) -> Any:
        """The value for all that was given under the key's name. Raises UsageError."""
        if not texts and self.default is None:
            raise UsageError(f"{name}= is needed: {self.help}")
        values = []
        for text in texts if self.repeats else texts[-1:]:
            try:
                values.append(self.parse(text))
            except ValueError as error:
                kind = {int: "an integer", float: "a number"}.get(self.parse, str(error))
                raise UsageError(f"{name}={text} must be {kind}") from None
        if self.repeats:
            return values
        return values[0] if values else self.default


@dataclass(frozen=True)
class Verb:
    help: str
    run: Callable[[dict[str, Any], set[str]], None]
    keys: dict[str, Key] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    bare: str = ""
    """The key whose value may be given without its name."""


def run(verbs: dict[str, Verb], arguments: list[str]) -> int:
    """Run one command; returns its exit status. Mistakes of the user end with status 2 and one message on stderr."""
    name, *words = arguments or ["--help"]
    try:
        if name in ("--help", "-h"):
            print("python -m model <verb> key=value … --switch; <verb> --help lists its keys\n")
            print("\n".join(f"  {verb:<10}{spec.help}" for verb, spec in verbs.items()))
        elif name not in verbs:
            raise UsageError(f"there is no verb {name!r}; there are: {', '.join(verbs)}")
        elif "--help" in words or "-h" in words:
            print(_describe(name, verbs[name]))
        else:
            verbs[name].run(*_parse(verbs[name], words))
    except (ValueError, OSError) as error:
        print(f"python -m model {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\npython -m model {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _describe(name: str, verb: Verb) -> str:
    lines = [f"python -m model {name}: {verb.help}", ""]
    for key, spec in verb.keys.items():
        default = "(needed)" if spec.default is None else spec.default
        lines.append(f"  {f'{key}={default}':<24} {spec.help}{' (may be repeated)' if spec.repeats else ''}")
    lines += [f"  {switch:<24} {text}" for switch, text in verb.switches.items()]
    return "\n".join(lines)


def _parse(verb: Verb, words: list[str]) -> tuple[dict[str, Any], set[str]]:
    """The value of every key, and the switches given. Raises one UsageError with all problems."""
    given: dict[str, list[str]] = {key: [] for key in verb.keys}
    switches, problems = set(), []
    for word in words:
        key, equals, text = word.partition("=")
        if word in verb.switches:
            switches.add(word)
        elif equals and key in given:
            given[key].append(text)
        elif verb.bare and not given[verb.bare] and not equals and not word.startswith("-"):
            given[verb.bare].append(word)
        elif word.startswith("--"):
            problems.append(f"{word} is not a switch; switches: {', '.join(verb.switches) or 'none'}")
        elif equals:
            problems.append(f"{key}= is not a key; keys: {', '.join(verb.keys) or 'none'}")
        else:
            problems.append(f"{word!r} is not key=value; keys: {', '.join(verb.keys) or 'none'}")
    values = {}
    for key, spec in verb.keys.items():
        try:
            values[key] = spec.read(key, given[key])
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems))
    return values, switches
