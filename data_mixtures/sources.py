"""The catalogue: where every training text comes from, what it holds and what its terms are.

One YAML file describes one data set. A file with a `sources` mapping describes several parts of it (the
configs of one hub repository share path, licence and revision); a file without one describes a single source
named after the file. The catalogue is all files of configs/data/sources; a user's own source is one more file
there, or any file whose path is given to `load_source`. Keys and their meaning are those of `Source`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from data_mixtures.strict_yaml import read_mapping

Kind = Literal["hub", "parquet", "jsonl", "text"]
Category = Literal["general", "code", "math_reasoning", "chat", "identity"]
Format = Literal["text", "instruction", "messages"]

CATALOGUE_FOLDER = Path(__file__).resolve().parents[1] / "configs" / "data" / "sources"

# Which columns make a document, by the shape of the data.
_COLUMNS: dict[Format, frozenset[str]] = {
    "text": frozenset({"text"}),
    "instruction": frozenset({"prompt", "response"}),
    "messages": frozenset({"messages"}),
}
_OPTIONAL_COLUMNS = frozenset({"id", "system"})
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst"),
    "text": ("",),
}


class SourceError(ValueError):
    """A source or catalogue file that cannot be used; the message names the file, the key and the fix."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One named stream of documents.

    name: folder under the data root and key in a recipe's weights.
    kind, path: a hub data set id, or a file, folder or glob (relative to the YAML file that names it).
    category: what the plan adds up.
    columns: what each needed field is called in the data: `text`, or `prompt` and `response`, or `messages`;
        `id` and `system` where the data has them. Kind text has no columns.
    configs, split, revision: of a hub data set, read in the order given; the revision is the full commit hash
        and null until the user has looked at the data and pinned it.
    licence, gated, access: the terms, whether the hub asks for them, and what to do about it.
    expected_tokens: a count to plan with before the data is prepared; null when unknown.
    file: the YAML file it was read from.
    """

    name: str
    kind: Kind
    path: str
    category: Category
    licence: str
    columns: Mapping[str, str] = field(default_factory=dict)
    configs: tuple[str, ...] = ()
    split: str = "train"
    revision: str | None = None
    gated: bool = False
    access: str = ""
    expected_tokens: int | None = None
    file: Path = field(compare=False)

    @property
    def format(self) -> Format:
        """The shape of a document, from the columns it has."""
        if "messages" in self.columns:
            return "messages"
        return "instruction" if "prompt" in self.columns else "text"

    def pinned_revision(self) -> str:
        """The commit hash to read a hub data set at; SourceError when the user has not pinned one."""
        if self.revision is None:
            raise SourceError(
                f"{self.file}: source {self.name!r} has revision null; look at "
                f"https://huggingface.co/datasets/{self.path}/commits/main and set `revision:` to the full "
                "commit hash, so that a later change of the data set cannot change the run"
            )
        return self.revision

    def files(self) -> list[Path]:
        """The files of a local source, sorted; SourceError when there are none."""
        if self.kind == "hub":
            raise SourceError(f"{self.file}: source {self.name!r} is a hub data set and has no local files")
        base, pattern = _split_glob(Path(self.path))
        if pattern:
            candidates = base.glob(pattern)
        elif base.is_dir():
            candidates = base.rglob("*")
        else:
            candidates = iter([base])
        named = pattern or not base.is_dir()
        found = sorted(
            path
            for path in candidates
            if path.is_file() and (named or _has_suffix(path, self.kind, base)) and path != self.file
        )
        if not found:
            raise SourceError(f"{self.file}: source {self.name!r}: no {self.kind} files at {self.path}")
        return found


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A part of a catalogued data set that no recipe may use, and why."""

    path: str
    config: str
    reason: str
    file: Path


def catalogue(folder: Path = CATALOGUE_FOLDER) -> dict[str, Source]:
    """All sources of the catalogue by name, in file and then listing order.

    Raises SourceError for a bad file or for a name that two files use.
    """
    sources: dict[str, Source] = {}
    for file in sorted(folder.glob("*.yaml")):
        for source in _read_file(file)[0]:
            if source.name in sources:
                raise SourceError(f"source {source.name!r} is in {sources[source.name].file} and in {file}")
            sources[source.name] = source
    return sources


def left_out(folder: Path = CATALOGUE_FOLDER) -> list[LeftOut]:
    """The parts of the catalogued data sets that are left out on purpose, with the reasons."""
    return [entry for file in sorted(folder.glob("*.yaml")) for entry in _read_file(file)[1]]


def load_source(name_or_path: str | Path, folder: Path = CATALOGUE_FOLDER) -> Source:
    """A source by its catalogue name, or the one source that a YAML file holds.

    Raises SourceError for an unknown name (naming the closest ones) or a file with several sources.
    """
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        file = Path(name_or_path)
        found = _read_file(file)[0]
        if len(found) != 1:
            names = ", ".join(source.name for source in found)
            raise SourceError(f"{file}: holds {len(found)} sources ({names}); name one that is in {folder}")
        return found[0]
    known = catalogue(folder)
    if name_or_path not in known:
        raise SourceError(unknown_source(str(name_or_path), known, folder))
    return known[str(name_or_path)]


def unknown_source(name: str, known: Mapping[str, Source], folder: Path = CATALOGUE_FOLDER) -> str:
    """The message for a name that the catalogue does not have."""
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"unknown source {name!r}; {hint}Known sources are the YAML files of {folder}"


# What a YAML file may say about a source: key → (types, what to write instead).
_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "kind": ((str,), "one of " + ", ".join(get_args(Kind))),
    "path": ((str,), "a hub data set id, or a file, folder or glob"),
    "category": ((str,), "one of " + ", ".join(get_args(Category))),
    "licence": ((str,), "the licence's name"),
    "columns": ((dict,), "a mapping such as {text: content}"),
    "config": ((str, list), "a config's name or a list of them"),
    "split": ((str,), "a split's name"),
    "revision": ((str, type(None)), "a full commit hash (40 hex digits, quoted) or null"),
    "gated": ((bool,), "true or false"),
    "access": ((str,), "text"),
    "expected_tokens": ((int, type(None)), "a whole number of tokens or null"),
}
_REQUIRED = ("kind", "path", "category", "licence")


def _read_file(file: Path) -> tuple[list[Source], list[LeftOut]]:
    """All sources and left-out parts of one file; one SourceError with every problem found in it."""
    try:
        shared = read_mapping(file)
    except ValueError as error:
        raise SourceError(str(error)) from error
    parts = shared.pop("sources", {file.stem: {}})
    reasons = shared.pop("left_out", {})
    problems: list[str] = []
    for key, value in (("sources", parts), ("left_out", reasons)):
        if not isinstance(value, dict):
            raise SourceError(f"{file}: {key}: must be a mapping, got {value!r}")
    sources = []
    for name, part in parts.items():
        own = part if part is not None else {}
        if not isinstance(own, dict):
            problems.append(f"sources.{name}: must be a mapping, got {own!r}")
            continue
        fields = {**shared, **own}
        found = _problems(str(name), fields)
        problems += [f"{name}: {problem}" for problem in found]
        if not found:
            sources.append(_build(str(name), fields, file))
    for config, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            problems.append(f"left_out.{config}: must say the reason as text, got {reason!r}")
    if problems:
        raise SourceError(f"{file}: " + f"\n{file}: ".join(problems))
    path = str(shared.get("path", ""))
    return sources, [
        LeftOut(path=path, config=str(config), reason=" ".join(reason.split()), file=file)
        for config, reason in reasons.items()
    ]


def _problems(name: str, fields: dict[str, Any]) -> list[str]:
    """Everything wrong with one source's fields, each as 'key: what it is and what it should be'."""
    problems = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        problems.append("name: use lower-case letters, digits, _ and -; it becomes a folder and a key")
    for key in _REQUIRED:
        if key not in fields:
            problems.append(f"{key}: missing; give {_KEYS[key][1]}")
    for key, value in fields.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{key}: unknown key{hint} (known: {', '.join(_KEYS)})")
        elif not isinstance(value, _KEYS[key][0]) or (isinstance(value, bool) and key != "gated"):
            problems.append(f"{key}: must be {_KEYS[key][1]}, got {value!r}")
    if not problems:
        problems += _value_problems(fields)
    return problems


def _value_problems(fields: dict[str, Any]) -> list[str]:
    """Problems of fields whose keys and types are right."""
    problems = []
    kind, columns = fields["kind"], fields.get("columns", {})
    for key in ("kind", "category"):
        if fields[key] not in get_args(Kind if key == "kind" else Category):
            problems.append(f"{key}: must be {_KEYS[key][1]}, got {fields[key]!r}")
    for key in ("path", "licence"):
        if not fields[key].strip():
            problems.append(f"{key}: must be {_KEYS[key][1]}, got an empty text")
    if not all(isinstance(item, str) for item in [*columns.keys(), *columns.values()]):
        problems.append(f"columns: names must be text, got {columns!r}")
    elif kind == "text" and columns:
        problems.append(f"columns: a text source has none, got {columns!r}")
    elif kind != "text":
        given = frozenset(columns) - _OPTIONAL_COLUMNS
        if given not in _COLUMNS.values():
            problems.append(
                "columns: must name text, or prompt and response, or messages (and id, system where there "
                f"are such columns), got {columns!r}"
            )
    if kind != "hub":
        problems += [
            f"{key}: only a hub source has one" for key in ("config", "split", "revision") if fields.get(key)
        ]
    revision = fields.get("revision")
    if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", revision):
        problems.append(f"revision: must be {_KEYS['revision'][1]}, got {revision!r}")
    if fields.get("expected_tokens") is not None and fields["expected_tokens"] <= 0:
        problems.append(f"expected_tokens: must be positive, got {fields['expected_tokens']}")
    configs = fields.get("config", [])
    if isinstance(configs, list) and not all(isinstance(config, str) for config in configs):
        problems.append(f"config: must be {_KEYS['config'][1]}, got {configs!r} (quote a number)")
    return problems


def _build(name: str, fields: dict[str, Any], file: Path) -> Source:
    values = dict(fields)
    configs = values.pop("config", [])
    if values["kind"] != "hub":
        values["path"] = str(file.resolve().parent / Path(values["path"]).expanduser())
    return Source(
        name=name,
        configs=(configs,) if isinstance(configs, str) else tuple(configs),
        file=file,
        **values,
    )


def _split_glob(path: Path) -> tuple[Path, str]:
    """Split a path into the folder before its first wildcard and the pattern from there on ('' if none)."""
    for position, part in enumerate(path.parts):
        if any(character in part for character in "*?["):
            return Path(*path.parts[:position]), str(Path(*path.parts[position:]))
    return path, ""


def _has_suffix(path: Path, kind: str, base: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(base).parts)
    return not hidden and path.name.endswith(_SUFFIXES[kind])
