"""The 22 tasks of DCLM CORE: kinds, shots, baselines, and reading their files.

A data folder holds one JSON-lines file per task, plain or gzipped, under the names of llm-foundry's
`local_data`, in any layout of subfolders. Items have the fields

    multiple choice     query, choices, gold
    schema              context_options, continuation, gold
    language modelling  context, continuation (and category, for tasks scored by category)
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

Kind = Literal["multiple_choice", "schema", "language_modeling"]
Item = dict[str, Any]

FIELDS: dict[Kind, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
CHOICES: dict[Kind, str] = {"multiple_choice": "choices", "schema": "context_options"}


@dataclass(frozen=True)
class Task:
    """One task. A random guesser's accuracy is `baseline` in the first version of CORE, `baseline_v2` in the
    one of September 2025, which changed three of them."""

    name: str
    kind: Kind
    shots: int
    items: int
    """How many items the complete file has."""
    baseline: float
    baseline_v2: float
    file: str
    delimiter: str = " "
    """Between question and answer."""
    by_category: bool = False
    """Shots are drawn within the item's category and the accuracy is the mean over categories."""


ANSWER = "\nAnswer: "


def _task(
    name: str,
    kind: Kind,
    shots: int,
    items: int,
    baseline: float = 0.0,
    *,
    v2: float | None = None,
    file: str | None = None,
    delimiter: str = " ",
    by_category: bool = False,
) -> Task:
    second = baseline if v2 is None else v2
    return Task(name, kind, shots, items, baseline, second, file or name, delimiter, by_category)


_TASKS = (
    _task("hellaswag_zeroshot", "multiple_choice", 0, 10042, 0.25, file="hellaswag"),
    _task("jeopardy", "language_modeling", 10, 2117, file="jeopardy_all", delimiter=ANSWER, by_category=True),
    _task("bigbench_qa_wikidata", "language_modeling", 10, 20321),
    _task("arc_easy", "multiple_choice", 10, 2376, 0.25, delimiter=ANSWER),
    _task("arc_challenge", "multiple_choice", 10, 1172, 0.25, delimiter=ANSWER),
    _task("copa", "multiple_choice", 0, 100, 0.5),
    _task("commonsense_qa", "multiple_choice", 10, 1221, 0.2, v2=0.403),
    _task("piqa", "multiple_choice", 10, 1838, 0.5, delimiter=ANSWER),
    _task("openbook_qa", "multiple_choice", 0, 500, 0.25),
    _task("lambada_openai", "language_modeling", 0, 5153),
    _task("hellaswag", "multiple_choice", 10, 10042, 0.25),
    _task("winograd", "schema", 0, 273, 0.5, file="winograd_wsc"),
    _task("winogrande", "schema", 0, 1267, 0.5),
    _task("bigbench_dyck_languages", "language_modeling", 10, 1000),
    _task("agi_eval_lsat_ar", "multiple_choice", 3, 230, 0.2, v2=0.25),
    _task("bigbench_cs_algorithms", "language_modeling", 10, 1320),
    _task("bigbench_operators", "language_modeling", 10, 210),
    _task("bigbench_repeat_copy_logic", "language_modeling", 10, 32),
    _task("squad", "language_modeling", 10, 10570),
    _task("coqa", "language_modeling", 0, 7983),
    _task("boolq", "multiple_choice", 10, 3270, 0.62, delimiter=ANSWER),
    _task("bigbench_language_identification", "multiple_choice", 10, 10000, 0.091, v2=0.25),
)
CORE: dict[str, Task] = {task.name: task for task in _TASKS}

_BUILTIN = (
    _task("builtin_choice", "multiple_choice", 3, 24, 0.25),
    _task("builtin_schema", "schema", 0, 12, 0.5),
    _task("builtin_recall", "language_modeling", 3, 24, delimiter=ANSWER, by_category=True),
)
BUILTIN: dict[str, Task] = {task.name: task for task in _BUILTIN}
BUILTIN_FOLDER = Path(__file__).parent / "builtin"


@dataclass(frozen=True)
class TaskData:
    """The items of a task as its file has them."""

    task: Task
    path: Path
    items: tuple[Item, ...]
    sha256: str
    """Of the uncompressed file."""

    @property
    def complete(self) -> bool:
        return len(self.items) == self.task.items


def find_file(task: Task, folder: Path) -> Path | None:
    """The task's file, or one that holds a part of it (`<file>_subset….jsonl`), or None."""
    for pattern in (f"{task.file}.jsonl", f"{task.file}.jsonl.gz", f"{task.file}_subset*.jsonl*"):
        if found := sorted(folder.rglob(pattern)):
            return found[0]
    return None


def load_task(task: Task, folder: Path) -> TaskData | None:
    """Read and check a task's items; None when `folder` has no file of it. Raises ValueError with every
    faulty line, up to ten."""
    path = find_file(task, folder)
    if path is None:
        return None
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    items, problems = [], []
    for number, line in enumerate(raw.decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            items.append(json.loads(line))
            fault = _fault(task, items[-1])
        except json.JSONDecodeError as error:
            fault = f"not JSON: {error}"
        if fault:
            problems.append(f"- line {number}: {fault}")
    if not items:
        problems.append("- no items")
    if problems:
        shown = problems[:10] + ([f"- and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise ValueError(f"{path} cannot be used for {task.name}:\n" + "\n".join(shown))
    return TaskData(task, path, tuple(items), hashlib.sha256(raw).hexdigest())


def _fault(task: Task, item: Any) -> str | None:
    """What is wrong with an item, or None."""
    if not isinstance(item, dict):
        return "not an object"
    fields = FIELDS[task.kind] | ({"category": str} if task.by_category else {})
    wrong = [name for name, kind in fields.items() if not isinstance(item.get(name), kind)]
    if wrong:
        return f"needs {', '.join(f'{name} ({fields[name].__name__})' for name in wrong)}"
    if task.kind != "language_modeling" and not 0 <= item["gold"] < len(item[CHOICES[task.kind]]):
        return f"gold is {item['gold']} of {len(item[CHOICES[task.kind]])} options"
    answers = item["choices"] if task.kind == "multiple_choice" else [item["continuation"]]
    return None if all(str(answer).strip() for answer in answers) else "an empty answer"


def categories(data: TaskData) -> dict[str, list[int]]:
    """Item indices of each category, sorted by name; one category "" for tasks without."""
    if not data.task.by_category:
        return {"": list(range(len(data.items)))}
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(data.items):
        groups.setdefault(item["category"], []).append(index)
    return dict(sorted(groups.items()))


def subset(data: TaskData, limit: int | None) -> list[int]:
    """Indices of the `limit` items of a capped run, in file order; all of them for None.

    The choice depends on the task and the file's length alone, a larger cap contains the smaller one, and
    every category gets its turn.
    """
    if limit is None or limit >= len(data.items):
        return list(range(len(data.items)))
    draw = random.Random(f"{data.task.name}/{len(data.items)}")
    groups = [draw.sample(group, len(group)) for group in categories(data).values()]
    turns = chain.from_iterable(zip_longest(*groups))
    order = [index for index in turns if index is not None]
    return sorted(order[:limit])
