"""The suite "code": HumanEval+ and MBPP+ of a checkpoint, as eval/suite.py asks for it.

Scores are named humaneval_plus/pass@1 and so on (mbpp_plus, builtin_code). With one sample they are greedy,
and the official numbers; with several they are estimates from samples, and pass@1 of them is called
sampled_pass@1, so that it is never taken for the greedy one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from eval.code_data import NAMES, SOURCES, Benchmark, fetch, load
from eval.code_judge import Judge, JudgeError, preflight
from eval.code_prompts import Style
from eval.code_score import CodeSettings, identity, score_code
from eval.evalplus_env import FOLDER, Environment, EvalplusMissing, setup
from eval.sandbox import SandboxUnavailable, probe
from eval.suite import Job, Key, SuiteResult

KEYS = {
    "code_benchmarks": Key("humaneval,mbpp", "code: some of humaneval, mbpp, builtin (small, needs no data)"),
    "code_data": Key("data/evalplus", "code: folder with the benchmarks (`python -m eval fetch code`)"),
    "code_style": Key("base", "code: base, or chat for an instruction-tuned model"),
    "code_samples": Key("1", "code: samples of each problem; pass@k is given for k up to it"),
    "code_temperature": Key("0", "code: 0 is greedy; several samples need more, 0.8 say"),
    "code_top_p": Key("0.95", "code: of sampling"),
    "code_tokens": Key("768", "code: new tokens at most"),
    "code_seed": Key("0", "code: of sampling"),
    "code_limit": Key("", "code: so many problems, evenly spread"),
    "code_batch": Key("32", "code: prompts generated at once"),
    "code_workers": Key("", "code: programs judged at once; default: one per CPU core"),
}
RUNNER_PACKAGES = ("evalplus", "numpy", "tree-sitter", "tree-sitter-python")  # what verdicts may depend on
SCORE_NAMES = {"humaneval": "humaneval_plus", "mbpp": "mbpp_plus", "builtin": "builtin_code"}


@dataclass(frozen=True)
class CodeSuite:
    """`benchmarks` are names of eval/code_data.py; `data` is their folder."""

    benchmarks: tuple[str, ...]
    data: Path
    generation: CodeSettings
    workers: int | None = None
    trust_remote_code: bool = False
    evalplus: Path = FOLDER
    name: str = "code"

    def load(self) -> list[Benchmark]:
        return [load(name, self.data) for name in self.benchmarks]

    def settings(self) -> dict[str, Any]:
        if self.generation.style == "chat":
            from eval.code_generate import template_sha256

            template = {"chat_template": template_sha256()}
        else:
            template = {}
        return {b.name: identity(b, self.generation) for b in self.load()} | template

    def run(self, job: Job) -> SuiteResult:
        benchmarks = self.load()
        try:
            probe()
            environment = setup(self.evalplus)
            judges = [Judge(environment, benchmark, self.workers) for benchmark in benchmarks]
            for judge in judges:
                preflight(judge, self.evalplus / "preflight")
            return self._score(judges, environment, job)
        except (SandboxUnavailable, EvalplusMissing, JudgeError) as error:
            return SuiteResult(not_run=str(error))

    def _score(self, judges: list[Judge], environment: Environment, job: Job) -> SuiteResult:
        from eval.code_generate import load_generator

        generate = load_generator(
            job.checkpoint, device=job.device, dtype=job.dtype, trust_remote_code=self.trust_remote_code
        )
        result = SuiteResult()
        for judge in judges:
            before = generate.too_long
            benchmark = judge.benchmark
            found = score_code(
                generate, benchmark, self.generation, job.folder / benchmark.name, judge, generate.render
            )
            name = SCORE_NAMES[benchmark.name]
            result.scores |= _scores(name, found)
            result.notes += _notes(name, found, generate.too_long - before, self.generation)
            result.tasks[name] = {
                "n": found.pop("tasks"),
                "correct": found.pop("right"),
                "accuracy": found["plus"]["pass@1"]["value"],
                **found,
                "runner_packages": {package: environment.packages[package] for package in RUNNER_PACKAGES},
            }
        return result


def _scores(name: str, found: Mapping[str, Any]) -> dict[str, float]:
    """Headline numbers: with the plus tests, with the base tests, and without the tasks that cannot pass."""
    scores = {}
    parts = {"": "plus", "_base_tests": "base", "_corrected": "plus_corrected"}
    for suffix, part in parts.items():
        for k, interval in found.get(part, {}).items():
            key = f"sampled_{k}" if k == "pass@1" and found["samples"] > 1 else k
            scores[f"{name}{suffix}/{key}"] = interval["value"]
    return scores


def _notes(name: str, found: Mapping[str, Any], too_long: int, settings: CodeSettings) -> list[str]:
    interval = found["plus"]["pass@1"]
    notes = [
        f"{name}: pass@1 {interval['value']:.4f}, 95 % interval {interval['low']:.4f} to {interval['high']:.4f} "
        f"over problems ({settings.style} prompts, {found['runner']}, data {found['version']})"
    ]
    if left_out := found.get("cannot_pass"):
        corrected = found["plus_corrected"]
        value = f"{corrected['pass@1']['value']:.4f}" if corrected else "without value"
        notes.append(
            f"{name}: the runner fails every solution of {', '.join(left_out)}; without it pass@1 is {value}"
        )
    if found["refused"]:
        reasons = sorted(set(found["refused"].values()))
        notes.append(f"{name}: {len(found['refused'])} programs count as wrong because {'; '.join(reasons)}")
    if too_long:
        notes.append(f"{name}: {too_long} prompts did not fit the model's context and count as wrong")
    if settings.limit:
        notes.append(f"{name}: {found['tasks']} problems only, so it is not the benchmark's number")
    return notes


def make_suite(values: Mapping[str, str], trust_remote_code: bool = False) -> CodeSuite:
    """The suite of a command line: `values` holds a text for each of KEYS. Raises ValueError."""
    names = tuple(name for name in values["code_benchmarks"].split(",") if name)
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"code_benchmarks={values['code_benchmarks']} must name some of {', '.join(NAMES)}")
    generation = CodeSettings(
        style=cast("Style", values["code_style"]),
        samples=_number(int, values, "code_samples"),
        temperature=_number(float, values, "code_temperature"),
        top_p=_number(float, values, "code_top_p"),
        max_new_tokens=_number(int, values, "code_tokens"),
        seed=_number(int, values, "code_seed"),
        limit=_number(int, values, "code_limit") if values["code_limit"] else None,
        batch=_number(int, values, "code_batch"),
    )
    workers = _number(int, values, "code_workers") if values["code_workers"] else None
    return CodeSuite(names, Path(values["code_data"]), generation, workers, trust_remote_code)


def _number(kind: Any, values: Mapping[str, str], key: str) -> Any:
    try:
        return kind(values[key])
    except ValueError:
        raise ValueError(f"{key}={values[key]} is no {'whole ' * (kind is int)}number") from None


def fetch_code(folder: Path) -> list[Path]:
    """Bring both benchmarks into `folder`, checked. Raises ValueError and URLError."""
    return [fetch(name, folder) for name in SOURCES]
