"""HumanEval+ and MBPP+ of one model: generate, judge, count.

    score_code(generate, load("humaneval", data), CodeSettings(), folder, Judge(environment(), benchmark))

Everything found is flushed to `folder` as it comes, so that a killed evaluation goes on where it was:

    settings.json   what the numbers depend on; another evaluation is refused here
    samples.jsonl   task, sample number, prompt's hash, continuation, program
    verdicts.jsonl  one line for each different program
    items.jsonl     at the end: each sample with its verdict
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from eval.code_data import Benchmark
from eval.code_judge import MIN_TIME_LIMIT, Judge, Solution, Verdict
from eval.code_prompts import Render, Style, prompt, solution, stops
from eval.evalplus_env import PIN
from eval.pass_at_k import estimate
from eval.results import append_line, append_lines, read_lines, write_atomic

KS = (1, 2, 4, 8, 16)


class Generate(Protocol):
    """A model that continues texts."""

    def __call__(
        self,
        prompts: list[str],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: list[str],
    ) -> list[str]:
        """The continuation of each prompt, which begins with BOS. Greedy at temperature 0.

        A row may end at any stop, the stop included or not, or run on: what is behind is cut off.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """What to generate. The defaults are evalplus' greedy evaluation."""

    style: Style = "base"
    samples: int = 1
    """Of each task; pass@k is given for every k of KS up to it."""
    temperature: float = 0.0
    top_p: float = 0.95
    """Without effect when greedy."""
    max_new_tokens: int = 768
    seed: int = 0
    limit: int | None = None
    """Score this many tasks, evenly spread; None: all."""
    batch: int = 32
    """Prompts given to the model at once; it sets which sample gets which random numbers."""

    def __post_init__(self) -> None:
        wrong = {
            f"style={self.style} is neither base nor chat": self.style not in ("base", "chat"),
            f"samples={self.samples} is not positive": self.samples < 1,
            f"temperature={self.temperature} is negative": self.temperature < 0,
            f"samples={self.samples} at temperature=0 would all be the same; set temperature=0.8": (
                self.samples > 1 and self.temperature == 0
            ),
            f"top_p={self.top_p} is not in (0, 1]": not 0 < self.top_p <= 1,
            f"max_new_tokens={self.max_new_tokens} is not positive": self.max_new_tokens < 1,
            f"limit={self.limit} is not positive": self.limit is not None and self.limit < 1,
            f"batch={self.batch} is not positive": self.batch < 1,
        }
        if any(wrong.values()):
            raise ValueError("; ".join(problem for problem, found in wrong.items() if found))


@dataclass(frozen=True)
class Sample:
    """One generated program."""

    task_id: str
    number: int
    prompt_sha256: str
    continuation: str
    program: str


def identity(benchmark: Benchmark, settings: CodeSettings) -> dict[str, Any]:
    """All that the numbers depend on besides the model, as JSON values."""
    return {
        "benchmark": benchmark.name,
        "version": benchmark.version,
        "sha256": benchmark.sha256,
        "runner": PIN,
        "min_time_limit": MIN_TIME_LIMIT,
        **asdict(settings),
    }


def score_code(
    generate: Generate,
    benchmark: Benchmark,
    settings: CodeSettings,
    folder: Path,
    judge: Judge,
    render: Render | None = None,
) -> dict[str, Any]:
    """Score a model; `render` is its chat template, for the chat style.

    Returns {"benchmark", "version", "runner", "style", "tasks", "samples", "base": {"pass@k": {"value", "low",
    "high"}}, "plus": likewise, "right": samples that pass the plus tests, "refused": programs whose verdict
    was not believed, "seconds": {"generate", "judge"}}, and, where tasks that cannot be passed are scored,
    "plus_corrected" without "cannot_pass".

    Raises ValueError when `folder` holds another evaluation, JudgeError and SandboxUnavailable when nothing can
    be said.
    """
    _claim(folder, identity(benchmark, settings))
    tasks = chosen_tasks(benchmark, settings.limit)
    start = time.monotonic()
    samples = _generated(generate, benchmark, tasks, settings, folder, render)
    generated = time.monotonic()
    verdicts = _judged(samples, folder, judge)
    judged = time.monotonic()

    rows = [
        {
            **asdict(sample),
            **{name: asdict(verdicts[_of(sample)])[name] for name in ("base", "plus", "refused")},
        }
        for sample in samples
    ]
    write_atomic(folder / "items.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    right_base = {task: 0 for task in tasks}
    right_plus = {task: 0 for task in tasks}
    for sample in samples:
        right_base[sample.task_id] += verdicts[_of(sample)].passed_base
        right_plus[sample.task_id] += verdicts[_of(sample)].passed
    possible = {task: right for task, right in right_plus.items() if task not in benchmark.cannot_pass}
    found = {
        "benchmark": benchmark.name,
        "version": benchmark.version,
        "runner": PIN,
        "style": settings.style,
        "tasks": len(tasks),
        "samples": settings.samples,
        "base": _curve(settings.samples, right_base),
        "plus": _curve(settings.samples, right_plus),
        "right": sum(right_plus.values()),
        "refused": {s: verdict.refused for s, verdict in verdicts.items() if verdict.refused},
        "seconds": {"generate": round(generated - start, 2), "judge": round(judged - generated, 2)},
    }
    if len(possible) < len(tasks):
        found["plus_corrected"] = _curve(settings.samples, possible)
        found["cannot_pass"] = sorted(set(right_plus) - set(possible))
    return found


def chosen_tasks(benchmark: Benchmark, limit: int | None) -> list[str]:
    """The tasks to score, in the benchmark's order: all, or `limit` evenly spread ones."""
    names = list(benchmark.problems)
    if limit is None or limit >= len(names):
        return names
    return [names[i * len(names) // limit] for i in range(limit)]


def _curve(samples: int, right: dict[str, int]) -> dict[str, dict[str, float]]:
    return (
        {f"pass@{k}": estimate(samples, list(right.values()), k) for k in KS if k <= samples} if right else {}
    )


def _claim(folder: Path, what: dict[str, Any]) -> None:
    file = folder / "settings.json"
    if not file.exists():
        write_atomic(file, json.dumps(what, indent=1) + "\n")
        return
    held = json.loads(file.read_text())
    differ = [name for name in {**held, **what} if held.get(name) != what.get(name)]
    if differ:
        pairs = ", ".join(f"{name}={held.get(name)} and not {what.get(name)}" for name in differ)
        raise ValueError(f"{folder} holds an evaluation with {pairs}; give another folder or remove it")


def _generated(
    generate: Generate,
    benchmark: Benchmark,
    tasks: list[str],
    settings: CodeSettings,
    folder: Path,
    render: Render | None,
) -> list[Sample]:
    """All samples, by task and number; those that `folder` lacks are generated, batch by batch."""
    file = folder / "samples.jsonl"
    held = {(row["task_id"], row["number"]): Sample(**row) for row in read_lines(file)}
    ends = stops(settings.style, benchmark.dataset)
    for seed, number, batch in _batches(tasks, settings):
        if all((task, number) in held for task in batch):
            continue
        texts = [benchmark.problems[task].row["prompt"] for task in batch]
        prompts = [prompt(text, settings.style, render) for text in texts]
        continuations = generate(
            prompts=prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed,
            stops=ends,
        )
        new = [
            Sample(
                task,
                number,
                hashlib.sha256(given.encode()).hexdigest(),
                continuation,
                solution(text, continuation, settings.style, benchmark.dataset),
            )
            for task, text, given, continuation in zip(batch, texts, prompts, continuations, strict=True)
        ]
        append_lines(file, [asdict(sample) for sample in new])
        held.update({(sample.task_id, sample.number): sample for sample in new})
    return [held[task, number] for task in tasks for number in range(settings.samples)]


def _batches(tasks: list[str], settings: CodeSettings) -> Iterator[tuple[int, int, list[str]]]:
    """(seed, sample number, tasks): the same wherever an evaluation is taken up again."""
    for number in range(settings.samples):
        for first in range(0, len(tasks), settings.batch):
            name = f"{settings.seed} {number} {first}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            yield seed, number, tasks[first : first + settings.batch]


def _solution(sample: Sample) -> Solution:
    return Solution(sample.task_id, sample.program)


def _of(sample: Sample) -> str:
    return _solution(sample).sha256


def _judged(samples: list[Sample], folder: Path, judge: Judge) -> dict[str, Verdict]:
    """The verdict on each different program, by its hash."""
    file = folder / "verdicts.jsonl"
    held = {row["sha256"]: Verdict(**row) for row in read_lines(file)}

    def found(verdict: Verdict) -> None:
        append_line(file, asdict(verdict))
        held[verdict.sha256] = verdict

    programs = {_of(sample): _solution(sample) for sample in samples}
    judge.judge([program for name, program in programs.items() if name not in held], found)
    return {name: held[name] for name in programs}
