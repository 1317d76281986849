"""Benchmark items hidden in documents in the ways they turn up in the wild, for measuring decontamination."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import textwrap
from collections.abc import Callable

Task = dict[str, str]  # prompt, canonical_solution, entry_point

_BEFORE = "Notes of the third week. We went through a few exercises and wrote down what we learned.\n\n"
_AFTER = "\n\nThat is all for today; the next meeting is about sorting and its cost.\n"


def verbatim(task: Task) -> str:
    """The task and its reference solution as published, inside other text."""
    return _BEFORE + task["prompt"] + task["canonical_solution"] + _AFTER


def reformatted(task: Task) -> str:
    """Other line breaks, tabs, quotes and markup; the same words in the same order."""
    code = task["prompt"] + task["canonical_solution"]
    code = code.replace("    ", "\t").replace('"""', "'''").replace("\n", "\r\n")
    prose = textwrap.fill(
        " ".join(task["prompt"].split()), 57, break_long_words=False, break_on_hyphens=False
    )
    quoted = "\n".join("> " + line.replace("_", "\\_") for line in prose.splitlines())
    return f"{_BEFORE}{quoted}\n\n```python\n{code}\n```{_AFTER}"


def renamed(task: Task) -> str:
    """Every parameter and local variable gets another name; description and function name stay."""
    return _BEFORE + _rename(task, _code(task)) + _AFTER


def comments_changed(task: Task) -> str:
    """Description and comments replaced by other words; the code stays as it is formatted by Python."""
    return _BEFORE + _without_docstrings(_code(task), "Exercise. See the sheet for what is asked.") + _AFTER


def comments_removed(task: Task) -> str:
    """No description and no comments; only the reference solution under its own name."""
    return _BEFORE + _without_docstrings(_code(task), None) + _AFTER


def renamed_without_comments(task: Task) -> str:
    """Nothing left but the function's name and the shape of the code."""
    return _BEFORE + _rename(task, _without_docstrings(_code(task), None)) + _AFTER


KINDS: dict[str, Callable[[Task], str]] = {
    "verbatim": verbatim,
    "reformatted": reformatted,
    "renamed variables": renamed,
    "comments changed": comments_changed,
    "comments removed": comments_removed,
    "renamed, comments removed": renamed_without_comments,
}


def _code(task: Task) -> str:
    """A whole module. MBPP's prompt is a docstring of the module, HumanEval's the head of the function."""
    return task["prompt"] + task["canonical_solution"]


def _without_docstrings(code: str, replacement: str | None) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            new = [] if replacement is None else [ast.Expr(ast.Constant(replacement))]
            node.body[:1] = new if len(node.body) > 1 else [*new, ast.Pass()]
    return ast.unparse(tree)


def _rename(task: Task, code: str) -> str:
    names = {
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    } - {task["entry_point"], *dir(builtins), *keyword.kwlist}
    new = {name: f"v{number}" for number, name in enumerate(sorted(names))}
    body = code.split('"""') if '"""' in code else code.split("'''")
    # Docstrings are the odd parts: they keep their words.
    return '"""'.join(
        part if number % 2 else re.sub(r"\b[A-Za-z_]\w*\b", lambda match: new.get(match[0], match[0]), part)
        for number, part in enumerate(body)
    )
