"""Real text that every Python installation has, for the smoke run.

* `prose`: the language reference that pydoc ships, and the docstrings of the standard library
* `code`: the standard library's own sources, without its tests, cut between top-level statements

(`smoke_text.py` generates the other two sources of the smoke run.) Everything is deterministic for a given
Python version. A document has the name of what it was
taken from, by which prose and code of one module can be kept together. Documents come in a fixed shuffled
order, so that a prefix is a fair sample.
"""

from __future__ import annotations

import ast
import itertools
import random
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

DOCUMENT_CHARS = 6000  # a source file longer than this is cut between top-level statements
SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    "pydoc_data",  # read as prose
    "encodings",  # mostly tables of code pages, nothing to learn
}
SEED = 20_250_101


def prose() -> Iterator[tuple[str, str]]:
    """(name, text): topics of pydoc, and for each module the docstrings of it, its classes and functions."""
    from pydoc_data.topics import topics  # half a megabyte of text, needed here only

    documents = [(f"topic {name}", text.strip() + "\n") for name, text in topics.items()]
    for module in _library():
        documents += [(module.name, part) for part in _cut(module.docstrings, "\n\n")]
    yield from _shuffled(documents)


def code() -> Iterator[tuple[str, str]]:
    """(module, text): modules of the standard library, the long ones in several documents."""
    documents = []
    for module in _library():
        parts = _cut(module.statements, "")
        parts[1:] = [f"# {module.name}, continued\n\n{part.lstrip()}" for part in parts[1:]]
        documents += [(module.name, part) for part in parts]
    yield from _shuffled(documents)


class _Module(NamedTuple):
    name: str  # path within the library
    docstrings: list[str]
    statements: list[str]


@lru_cache(maxsize=1)  # parsing takes seconds, and both prose and code need it
def _library() -> list[_Module]:
    """The standard library's modules that can be read and parsed, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]) or "_sysconfigdata" in path.name:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue  # a few files of an installation are templates or broken on purpose
        if source.strip():
            modules.append(_Module(relative.as_posix(), _docstrings(tree), _statements(source, tree)))
    return modules


def _docstrings(tree: ast.Module) -> list[str]:
    """The docstrings of a module, classes and functions with their names, in the order of the file."""
    paragraphs = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and len(text) > 20 and ">>>" not in text:  # examples in docstrings are code
            paragraphs.append(text if isinstance(node, ast.Module) else f"{node.name}: {text}")
    return paragraphs


def _statements(source: str, tree: ast.Module) -> list[str]:
    """A module cut before each top-level statement; joined they give the module."""
    lines = [line + "\n" for line in source.split("\n")]  # as ast counts them: only a newline ends a line
    starts = []
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        starts.append(min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1)
    bounds = sorted({0, *starts, len(lines)})
    return ["".join(lines[a:b]) for a, b in itertools.pairwise(bounds)]


def _cut(parts: list[str], separator: str) -> list[str]:
    """Join consecutive parts into documents of about DOCUMENT_CHARS; a longer part stays whole."""
    documents: list[str] = []
    current: list[str] = []
    size = 0
    for part in parts:
        if current and size + len(part) > DOCUMENT_CHARS:
            documents.append(separator.join(current))
            current, size = [], 0
        current.append(part)
        size += len(part)
    if current:
        documents.append(separator.join(current))
    return [document.rstrip() + "\n" for document in documents if document.strip()]


def _shuffled(documents: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The documents in a fixed random order; of equal texts the first."""
    unique = list({text: (name, text) for name, text in reversed(documents)}.values())
    random.Random(SEED).shuffle(unique)
    return unique
