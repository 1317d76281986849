"""Read the benchmarks that training text is checked against.

Three public layouts are understood by the keys of their records, gzipped or not: evalplus and HumanEval
(`task_id`, `prompt`, `entry_point`, `canonical_solution`), MBPP as first published (`text`, `code`,
`test_list`), and the task files of DataComp-LM's CORE (`query` and `choices`, `context` and `continuation`,
or `context_options` and `continuation`). A file's name up to its first dot names the benchmark.

evalplus rewrote most of HumanEval's reference solutions: of the 164 first published, an index of evalplus's file
alone knows 5 by their code (and all by their prompts). Give both files.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PieceKind = Literal["prompt", "solution", "passage"]

# Tasks that quote public prose (Wikipedia, news, children's books) and ask about it. The prose is no test: a
# corpus may well hold it, so it is told apart from the question.
_PASSAGE_END = {
    "boolq": "\nQuestion:",
    "squad": "\nQuestion:",
    "coqa": "\nPreceding questions:",
}


@dataclass(frozen=True)
class Signature:
    """The function that a code task asks for."""

    name: str
    parameters: tuple[str, ...]
    annotations: tuple[str, ...]  # one per parameter, "" where there is none


@dataclass(frozen=True)
class Item:
    """One task of a benchmark: the texts that must not be trained on, and the function it asks for."""

    benchmark: str
    name: str
    pieces: tuple[tuple[PieceKind, str], ...]
    signature: Signature | None = None


def read_benchmarks(paths: Iterable[Path]) -> list[Item]:
    """All items of the benchmark files at `paths`.

    Raises ValueError that names file and line for a record of no known layout, and when no file is given.
    """
    files = sorted(paths)
    if not files:
        raise ValueError("no benchmark files given: name the .jsonl or .jsonl.gz files to protect")
    return [item for file in files for item in _read_file(file)]


def benchmark_files(patterns: str) -> list[Path]:
    """The files that comma-separated paths or glob patterns name. ValueError for one that matches nothing."""
    found: list[Path] = []
    for pattern in patterns.split(","):
        path = Path(pattern.strip()).expanduser()
        matches = (
            [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        )
        if not matches:
            raise ValueError(f"{pattern.strip()!r} matches no file")
        found += matches
    return found


def _read_file(file: Path) -> Iterator[Item]:
    benchmark = file.name.split(".")[0]
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                try:
                    yield _item(benchmark, number, json.loads(line))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    raise ValueError(f"{file}: line {number + 1}: {error}") from error
    except (OSError, EOFError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error


def _item(benchmark: str, number: int, record: dict[str, Any]) -> Item:
    if "entry_point" in record and "prompt" in record:
        return _code_item(benchmark, record)
    if "code" in record and "test_list" in record:
        tests = "\n".join(record["test_list"])
        name = re.findall(r"def\s+(\w+)", record["code"])
        signature = find_signature(record["code"], name[-1]) if name else None
        pieces = _pieces(("prompt", f"{record['text']}\n{tests}"), *_solutions([record["code"]]))
        return Item(benchmark, f"Mbpp/{record['task_id']}", pieces, signature)
    return Item(benchmark, str(number), _language_pieces(benchmark, record))


def _code_item(benchmark: str, record: dict[str, Any]) -> Item:
    prompt, solution, name = record["prompt"], record["canonical_solution"], record["entry_point"]
    # HumanEval's solution is the body of a function whose head, with the description below it, is the prompt.
    head = find_head(prompt, name)
    forms = [solution, head[0] + solution] if head else [solution]
    pieces = _pieces(("prompt", prompt), ("prompt", record.get("assertion", "")), *_solutions(forms))
    return Item(benchmark, str(record["task_id"]), pieces, find_signature(prompt + solution, name))


def _language_pieces(benchmark: str, record: dict[str, Any]) -> tuple[tuple[PieceKind, str], ...]:
    if "context_options" in record:
        text = f"{record['context_options'][record['gold']]} {record['continuation']}"
    elif "query" in record:
        text = f"{record['query']} {record['choices'][record['gold']]}"
    elif "context" in record:
        text = f"{record['context']} {record['continuation']}"
    else:
        raise ValueError(f"a record with the keys {sorted(record)} is of no known benchmark layout")
    end = next((end for task, end in _PASSAGE_END.items() if benchmark.startswith(task)), None)
    passage, mark, question = text.partition(end) if end else ("", "", text)
    if not mark:
        return _pieces(("prompt", text))
    return _pieces(("passage", passage), ("prompt", question))


def _solutions(forms: list[str]) -> list[tuple[PieceKind, str]]:
    """Solutions as they are and without comments, where they have any."""
    bare = [re.sub(r"^[ \t]*#.*\n|[ \t]+# .*", "", form, flags=re.MULTILINE) for form in forms]
    return [("solution", text) for text in dict.fromkeys([*forms, *bare])]


def _pieces(*pieces: tuple[PieceKind, str]) -> tuple[tuple[PieceKind, str], ...]:
    return tuple((kind, text) for kind, text in pieces if text.strip())


def find_head(code: str, name: str) -> re.Match[str] | None:
    """The first `def name(...) -> ...:` in `code`, with the line break after it."""
    return re.search(r"def\s+" + re.escape(name) + r"\s*\(.*?\)[^\n]*:\s*\n", code, re.DOTALL)


def find_signature(code: str, name: str, start: int = 0) -> Signature | None:
    """The signature of the first `def name(...)` of `code` from `start` on; None without a whole one."""
    head = re.compile(r"def\s+" + re.escape(name) + r"\s*\(").search(code, start)
    if head is None:
        return None
    parameters, annotations = [], []
    for part in _split_parameters(code, head.end()) or ():
        match = re.match(r"\s*\*{0,2}\s*([A-Za-z_]\w*)\s*(?::\s*(.*?))?\s*(?:=.*)?$", part, re.DOTALL)
        if match is None:
            continue  # the bare * and / of a parameter list
        parameters.append(match[1])
        annotations.append("".join((match[2] or "").split()))
    return Signature(name, tuple(parameters), tuple(annotations)) if parameters else None


def _split_parameters(code: str, start: int, limit: int = 600) -> list[str] | None:
    """The comma-separated parts from `start` to the closing bracket; None when there is none near."""
    parts, depth, begin = [], 0, start
    for position in range(start, min(len(code), start + limit)):
        character = code[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return [*parts, code[begin:position]]
        elif character == "," and depth == 0:
            parts.append(code[begin:position])
            begin = position + 1
    return None
