"""Score a checkpoint on DCLM CORE, or on the small built-in tasks in the same formats.

Each item's result is one JSON line, written in chunks as scoring goes on; a killed run goes on after the last
chunk. With several processes each scores every n-th missing item into a file of its own, and the files are
merged when a task is complete, so that the number of processes changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.adapter import Scorer, load_scorer
from eval.aggregate import VERSIONS, baseline, centred, mean_centred
from eval.core_prompts import RULES, Prompt, RulesName
from eval.core_tasks import BUILTIN, BUILTIN_FOLDER, CORE, Task, TaskData, categories, load_task, subset
from eval.results import append_lines, read_lines, write_atomic
from eval.suite import Job, SuiteResult

VERSION = 1  # of the scoring itself: raise it when the same settings would give other numbers
CHUNK = 64  # items between two writes; also what is sorted by length together


@dataclass(frozen=True)
class CoreSuite:
    """CORE over the tasks whose files are in `data`; `limit` caps the items of each task."""

    name: str
    table: Mapping[str, Task]
    data: Path
    rules: RulesName = "dclm"
    limit: int | None = None
    only: tuple[str, ...] = ()
    """Names of the tasks to score; all for none."""
    batch_tokens: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.only) - set(self.table))
        if unknown:
            raise ValueError(f"unknown tasks {', '.join(unknown)}; there are {', '.join(self.table)}")
        if self.limit is not None:
            short = [f"{t.name} ({t.shots})" for t in self.tasks if self.limit <= t.shots]
            if short:
                most = max(task.shots for task in self.tasks)
                raise ValueError(
                    f"limit={self.limit} is not above the shots of {', '.join(short)}: "
                    f"a task's cap must exceed its shots, so take limit={most + 1} or more"
                )

    @property
    def tasks(self) -> list[Task]:
        return [task for task in self.table.values() if not self.only or task.name in self.only]

    def load(self) -> list[TaskData]:
        """Every task that has a file. Raises ValueError when there is none at all, or not one asked for."""
        if not self.data.is_dir():
            raise ValueError(f"data={self.data} is not a folder; `python -m eval fetch core` fills one")
        loaded = {task.name: load_task(task, self.data) for task in self.tasks}
        absent = [name for name, data in loaded.items() if data is None]
        if absent and (self.only or len(absent) == len(loaded)):
            raise ValueError(
                f"data={self.data} has no file of {', '.join(absent)}; `python -m eval fetch core` fills a folder"
            )
        return [data for data in loaded.values() if data is not None]

    def settings(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "rules": self.rules,
            "limit": self.limit,
            "tasks": {data.task.name: data.sha256 for data in self.load()},
        }

    def run(self, job: Job) -> SuiteResult:
        loaded = self.load()
        _merge(loaded, job.folder)
        if any(_missing(data, self, job.folder) for data in loaded):
            if job.processes == 1:
                score_share(self, job, 0)
            else:
                _score_in_processes(self, job)
            _merge(loaded, job.folder)
        tasks = {data.task.name: summarise(data, self, job.folder) for data in loaded}
        return SuiteResult(headline(self, tasks), tasks, notes=_notes(self, tasks))


def core_suite(name: str, data: Path, **options: Any) -> CoreSuite:
    """The suite "core" over a data folder, or "builtin", which is small and so always scored whole."""
    if name == "builtin":
        return CoreSuite(name, BUILTIN, BUILTIN_FOLDER, **options | {"limit": None, "only": ()})
    return CoreSuite(name, CORE, data, **options)


# --- scoring


def items_file(folder: Path, task: str) -> Path:
    return folder / f"{task}.jsonl"


def _share_file(folder: Path, task: str, rank: int) -> Path:
    return folder / f".{task}.{rank}.part.jsonl"


def _missing(data: TaskData, suite: CoreSuite, folder: Path) -> list[int]:
    done = {line["item"] for line in read_lines(items_file(folder, data.task.name))}
    return [item for item in _selected(data, suite) if item not in done]


def _selected(data: TaskData, suite: CoreSuite) -> list[int]:
    """Which items a run scores: nanochat's rules bring a cap of their own."""
    if suite.rules == "nanochat":
        return sorted(RULES["nanochat"].shots(data, suite.limit))
    return subset(data, suite.limit)


def score_share(suite: CoreSuite, job: Job, rank: int) -> None:
    """Score every `processes`-th missing item of every task, from the `rank`-th on."""
    device = job.device
    if job.processes > 1 and device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // job.processes))
    elif job.processes > 1:
        device = f"cuda:{rank}"
    scorer = load_scorer(
        job.checkpoint,
        device=device,
        dtype=job.dtype,
        batch_tokens=suite.batch_tokens,
        trust_remote_code=suite.trust_remote_code,
    )
    for data in suite.load():
        items = _missing(data, suite, job.folder)[rank :: job.processes]
        score_items(data, items, suite, scorer, _share_file(job.folder, data.task.name, rank))


def score_items(data: TaskData, items: list[int], suite: CoreSuite, scorer: Scorer, file: Path) -> None:
    """Append a line to `file` for each of `items`."""
    rules = RULES[suite.rules]
    shots = rules.shots(data, suite.limit) if items else {}
    for begin in range(0, len(items), CHUNK):
        started = time.perf_counter()
        chunk = items[begin : begin + CHUNK]
        prompts = [rules.prompt(data, item, shots[item], scorer.encoder) for item in chunk]
        lines = score_prompts(data, prompts, scorer)
        seconds = (time.perf_counter() - started) / len(chunk)
        append_lines(file, [{**line, "seconds": round(seconds, 6)} for line in lines])


def score_prompts(data: TaskData, prompts: list[Prompt], scorer: Scorer) -> list[dict[str, Any]]:
    """One line for each prompt: scores are the options' mean −log p per token."""
    scores = iter(scorer.score([span for prompt in prompts for span in prompt.spans]))
    lines = []
    for prompt in prompts:
        own = [next(scores) for _ in prompt.spans]
        means = [score.mean for score in own]
        line: dict[str, Any] = {"item": prompt.item, "prompt": _prompt_hash(prompt), "scores": means}
        if data.task.by_category:
            line["category"] = data.items[prompt.item]["category"]
        if prompt.gold is None:
            line["correct"] = own[0].greedy
        else:
            line["prediction"], line["gold"] = means.index(min(means)), prompt.gold
            line["correct"] = line["prediction"] == prompt.gold
        lines.append(line)
    return lines


def _prompt_hash(prompt: Prompt) -> str:
    """Twelve hex digits that identify the token ids and the scored spans."""
    text = json.dumps([(span.start, span.tokens) for span in prompt.spans])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _score_in_processes(suite: CoreSuite, job: Job) -> None:
    # CUDA does not survive a fork; on the CPU nothing has been computed yet, and a fork saves importing torch.
    context: Any = multiprocessing.get_context("fork" if job.device == "cpu" else "spawn")
    workers = [context.Process(target=score_share, args=(suite, job, r)) for r in range(job.processes)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.kill()
    failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
    if failed:
        raise RuntimeError(f"scoring processes {failed} of {job.processes} failed; their errors are above")


def _merge(loaded: list[TaskData], folder: Path) -> None:
    """Bring the parts of all processes, of this attempt or of a killed one, into one file sorted by item."""
    for data in loaded:
        parts = sorted(folder.glob(f".{data.task.name}.*.part.jsonl"))
        if not parts:
            continue
        file = items_file(folder, data.task.name)
        lines = {line["item"]: line for part in [file, *parts] for line in read_lines(part)}
        write_atomic(file, "".join(json.dumps(lines[item]) + "\n" for item in sorted(lines)))
        for part in parts:
            part.unlink()


# --- results


def summarise(data: TaskData, suite: CoreSuite, folder: Path) -> dict[str, Any]:
    """A task's entry in the results."""
    wanted = set(_selected(data, suite))
    lines = [line for line in read_lines(items_file(folder, data.task.name)) if line["item"] in wanted]
    if len(lines) != len(wanted):
        raise RuntimeError(f"{folder}: {len(lines)} of {len(wanted)} items of {data.task.name} are scored")
    by_category = data.task.by_category and suite.rules == "dclm"
    groups = categories(data) if by_category else {"": list(range(len(data.items)))}
    correct = {line["item"]: line["correct"] for line in lines}
    shares = {}
    for name, group in groups.items():
        scored = [correct[item] for item in group if item in correct]
        if scored:
            shares[name] = sum(scored) / len(scored)
    accuracy = sum(shares.values()) / len(shares)
    return {
        "n": len(lines),
        "correct": sum(correct.values()),
        "accuracy": accuracy,
        **({"categories": shares} if by_category else {}),
        **{f"centred_{v}": centred(data.task, accuracy, v) for v in VERSIONS},
        **{f"baseline_{v}": baseline(data.task, v) for v in VERSIONS},
        "shots": data.task.shots,
        "file": data.path.name,
        "file_sha256": data.sha256,
        "items_in_file": len(data.items),
        "items_in_full": data.task.items,
        "seconds": round(sum(line["seconds"] for line in lines), 3),
    }


def headline(suite: CoreSuite, tasks: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """The means under a name that says what they are means of, and each task's centred accuracy (v2).

    core           all 22 complete tasks under DCLM's rules, no cap
    core_21        the same without SQuAD
    <name>_max500  either, of a run with at most 500 items a task
    core_part      any other set of tasks; not comparable with anything but itself
    """
    scores = {}
    if suite.name == "builtin":
        label, counted = "builtin", list(tasks)
    else:
        label, counted = _label(suite, tasks)
    means = {name: tasks[name]["accuracy"] for name in counted}
    if means:
        for version in VERSIONS:
            scores[f"{label}/{version}"] = mean_centred(means, suite.table, version)
    scores |= {f"{suite.name}_task/{name}": entry["centred_v2"] for name, entry in tasks.items()}
    return scores


def _label(suite: CoreSuite, tasks: Mapping[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """What the mean may be called, and which tasks it is over."""
    whole = [name for name, entry in tasks.items() if entry["items_in_file"] == entry["items_in_full"]]
    missing = [name for name in CORE if name not in whole]
    if missing and missing != ["squad"]:
        label, whole = "core_part", list(tasks)
    else:
        label = "core_21" if missing else "core"
    cap = "" if suite.limit is None else f"_max{suite.limit}"
    rules = "" if suite.rules == "dclm" else f"_{suite.rules}"
    return label + rules + cap, whole


def _notes(suite: CoreSuite, tasks: Mapping[str, dict[str, Any]]) -> list[str]:
    notes = []
    absent = [name for name in (task.name for task in suite.tasks) if name not in tasks]
    if absent:
        notes.append(f"no file of {', '.join(absent)}")
    for name, entry in tasks.items():
        if entry["items_in_file"] != entry["items_in_full"]:
            notes.append(
                f"{entry['file']} has {entry['items_in_file']} of {entry['items_in_full']} items of {name}, "
                "so it is no part of a mean that is called core"
            )
    return notes
