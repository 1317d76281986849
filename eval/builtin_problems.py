"""Eight small problems of our own in the format of HumanEval+, for the smoke run and the tests.

The official runner takes them like its own data: they pass through the same prompts, sanitizer, sandbox and
runner in seconds. They say nothing about a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    signature: str
    docstring: str
    body: str
    base: list[list[Any]]
    """Arguments of each base test; the runner takes the expected outputs from `body`."""
    plus: list[list[Any]]
    atol: float = 0

    @property
    def name(self) -> str:
        return self.signature.removeprefix("def ").partition("(")[0]


PROBLEMS = [
    Problem(
        "def add(a: int, b: int) -> int:",
        "Return the sum of a and b.\n    >>> add(2, 3)\n    5",
        "    return a + b\n",
        [[2, 3], [0, 0], [-4, 4]],
        [[10**20, 1], [-1, -1], [7, -9]],
    ),
    Problem(
        "def count_vowels(text: str) -> int:",
        "Count the letters a, e, i, o and u in text, in either case.\n    >>> count_vowels('Idea')\n    3",
        "    return sum(letter in 'aeiou' for letter in text.lower())\n",
        [["Idea"], [""], ["rhythm"]],
        [["AEIOU aeiou"], ["x" * 100], ["queue"]],
    ),
    Problem(
        "def running_max(values: list) -> list:",
        "Return the largest value seen so far at each place.\n    >>> running_max([1, 3, 2])\n    [1, 3, 3]",
        "    seen = []\n    for value in values:\n"
        "        seen.append(value if not seen else max(seen[-1], value))\n    return seen\n",
        [[[1, 3, 2]], [[]], [[5, 4, 3]]],
        [[[-1, -2, 0]], [[2, 2]], [[1.5, 1, 9]]],
    ),
    Problem(
        "def is_balanced(text: str) -> bool:",
        "Say whether every round bracket in text is closed, in order.\n    >>> is_balanced('(())')\n    True",
        "    depth = 0\n    for letter in text:\n        depth += (letter == '(') - (letter == ')')\n"
        "        if depth < 0:\n            return False\n    return depth == 0\n",
        [["(())"], [")("], [""]],
        [["a(b)c"], ["(("], ["())("]],
    ),
    Problem(
        "def mean(values: list) -> float:",
        "Return the arithmetic mean of a list that is not empty.\n    >>> mean([1, 2])\n    1.5",
        "    return sum(values) / len(values)\n",
        [[[1, 2]], [[4]], [[0, 0, 1]]],
        [[[0.1, 0.2, 0.3]], [[-1, 1]], [[10**6, 1]]],
        atol=1e-6,
    ),
    Problem(
        "def unique_sorted(values: list) -> list:",
        "Return the distinct values in ascending order.\n    >>> unique_sorted([3, 1, 3])\n    [1, 3]",
        "    return sorted(set(values))\n",
        [[[3, 1, 3]], [[]], [[2, 2, 2]]],
        [[[5, -5, 0]], [[1]], [[9, 8, 7, 8, 9]]],
    ),
    Problem(
        "def gcd(a: int, b: int) -> int:",
        "Return the greatest common divisor of two positive numbers.\n    >>> gcd(12, 18)\n    6",
        "    while b:\n        a, b = b, a % b\n    return a\n",
        [[12, 18], [7, 13], [5, 5]],
        [[1, 10**9], [2**40, 2**20], [270, 192]],
    ),
    Problem(
        "def word_lengths(text: str) -> dict:",
        "Map each word of text, split at spaces, to its length.\n"
        "    >>> word_lengths('to be')\n    {'to': 2, 'be': 2}",
        "    return {word: len(word) for word in text.split()}\n",
        [["to be"], [""], ["one"]],
        [["a a a"], ["  spaced   out "], ["x yy zzz"]],
    ),
]


def dataset() -> str:
    """The problems as the lines of a HumanEval+ data file."""
    lines = []
    for number, problem in enumerate(PROBLEMS):
        row = {
            "task_id": f"Builtin/{number}",
            "prompt": f'{problem.signature}\n    """{problem.docstring}\n    """\n',
            "entry_point": problem.name,
            "canonical_solution": problem.body,
            "test": "",
            "contract": "",
            "base_input": problem.base,
            "plus_input": problem.plus,
            "atol": problem.atol,
        }
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)
