"""Verdicts of the official runner on programs that may try to cheat or break it.

evalplus runs what it judges in a child of its own process, of the same user: within one run, a hostile
solution could end the runner, write its results file first, or speak on the pipes between its workers. So

1. each solution gets a run of the unmodified runner of its own, in a sandbox of its own, on a data file that
   holds its problem alone (0.2 s for a simple one). Whatever a solution does, no other verdict is within reach;
2. in this run, eval/evalplus_judge.py believes what the runner holds in its own memory over any file;
3. a solution that passes is run a second time as a control, with altered expected outputs. One that passes this
   too has not computed its answers: it changed the verdict in the shared memory, read the expected outputs,
   replaced the comparison, or returned something that equals everything. It is refused;
4. a run that ends without a verdict (the solution ended its judge) is a failure if the reference solution of
   the same problem does get one; otherwise this machine cannot judge, and nothing is reported.

What remains: a solution can still give itself a pass, and nothing else, if it takes the runner apart from inside
and does so in the first run but not in the second, by luck or by finding traces of the alteration in memory.
Four MBPP+ tasks whose comparison evalplus replaces by a formula of its own (UNCONTROLLED) have no control.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.code_data import Benchmark, Problem
from eval.evalplus_env import Environment
from eval.results import write_atomic
from eval.sandbox import MIB, Finished, Limits, run

JUDGE = Path(__file__).with_name("evalplus_judge.py")
LIMITS = Limits(
    wall=300,  # evalplus' own limit is 62 s for the base tests and again for the plus tests
    cpu=300,
    memory=4096 * MIB,
    tmp_size=512 * MIB,
    file_size=512 * MIB,
    output=8 * MIB,
)
LARGE = {  # 780 MB of expected outputs; one run at a time
    "Mbpp/255": replace(LIMITS, memory=12288 * MIB, tmp_size=1024 * MIB, file_size=1024 * MIB),
}
UNCONTROLLED = frozenset({"are_equivalent", "sum_div", "surface_Area", "digit_distance_nums"})
MOST_WORKERS = (
    16  # by default: more make the host's share of the work the bottleneck, and time limits tighter
)
MIN_TIME_LIMIT = 4.0  # seconds for one test


class JudgeError(RuntimeError):
    """This machine does not judge as it must; no score is given."""


@dataclass(frozen=True)
class Solution:
    task_id: str
    text: str
    sanitize: bool = True
    """Pass it through evalplus' sanitizer first, as its own generator does."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"{self.task_id}\0{self.sanitize}\0{self.text}".encode()).hexdigest()


@dataclass(frozen=True)
class Verdict:
    """Of one solution. `base` and `plus` are evalplus' words: pass, fail, timeout."""

    sha256: str
    task_id: str
    base: str
    plus: str
    judged: str = ""
    """The program after the sanitizer."""
    refused: str = ""
    """Why a verdict of the runner is not believed, or why there was none."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """As the benchmark with the plus tests counts."""
        return self.base == self.plus == "pass" and not self.refused

    @property
    def passed_base(self) -> bool:
        return self.base == "pass" and not self.refused


class Judge:
    """Judges solutions of one benchmark, several at a time."""

    def __init__(
        self,
        environment: Environment,
        benchmark: Benchmark,
        workers: int | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.environment = environment
        self.benchmark = benchmark
        self.limits = limits
        self.workers = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self.program = JUDGE.read_bytes()
        self._large = threading.Lock()
        self._answered: dict[str, str] = {}
        self._answered_lock = threading.Lock()

    def judge(self, solutions: Iterable[Solution], found: Callable[[Verdict], None]) -> None:
        """Call `found` with the verdict on each solution, as it comes, from one thread at a time.

        Raises JudgeError, SandboxUnavailable and SandboxError; what was found before stays found.
        """
        lock = threading.Lock()
        failed = threading.Event()

        def step(solution: Solution) -> None:
            if failed.is_set():
                return
            try:
                verdict = self._judge_one(solution)
                with lock:
                    found(verdict)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for future in [pool.submit(step, solution) for solution in solutions]:
                    future.result()
            except BaseException:  # an interrupt comes here and not to the workers
                failed.set()
                raise

    def _judge_one(self, solution: Solution) -> Verdict:
        problem = self.benchmark.problems[solution.task_id]
        finished, answer = self._run(problem, solution)
        seconds = finished.seconds
        refused = answer.get("refused", "")
        if not answer:
            refused = f"its run ended without a verdict ({_ending(finished)})"
            self._reference_must_answer(problem)
        elif answer.get("base") == "pass" and problem.row["entry_point"] not in UNCONTROLLED:
            same = Solution(solution.task_id, answer["judged"], sanitize=False)
            finished, control = self._run(problem, same, control=True)
            seconds += finished.seconds
            if control.get("base") not in ("fail", "timeout"):
                refused = "it passes with altered expected outputs too"
        return Verdict(
            solution.sha256,
            solution.task_id,
            answer.get("base", "fail"),
            answer.get("plus", "fail"),
            answer.get("judged", ""),
            refused,
            round(seconds, 3),
        )

    def _reference_must_answer(self, problem: Problem) -> None:
        with self._answered_lock:
            if problem.task_id not in self._answered:
                reference = Solution(problem.task_id, problem.reference, sanitize=False)
                finished, answer = self._run(problem, reference)
                self._answered[problem.task_id] = "" if "base" in answer else _ending(finished)
            ending = self._answered[problem.task_id]
        if ending:
            raise JudgeError(
                f"neither a solution of {problem.task_id} nor its reference solution gets a verdict here: {ending}"
            )

    def _run(
        self, problem: Problem, solution: Solution, control: bool = False
    ) -> tuple[Finished, dict[str, Any]]:
        """One run of the runner in a sandbox, and its answer: {} where there was none to be believed."""
        nonce = secrets.token_hex(16)
        task = {
            "problem": problem.line,
            "dataset": self.benchmark.dataset,
            "solution": solution.text,
            "sanitize": solution.sanitize,
            "control": control,
            "min_time_limit": MIN_TIME_LIMIT,
        }
        room = self.environment.room({"/in/judge.py": self.program}, json.dumps(task).encode())
        command = [self.environment.python, "-s", "-P", "/in/judge.py", nonce]
        if problem.task_id not in LARGE:
            finished = run(command, room, self.limits)
        else:
            with self._large:
                finished = run(command, room, LARGE[problem.task_id])
        return finished, _answer(finished, nonce)


def _answer(finished: Finished, nonce: str) -> dict[str, Any]:
    """The judge's one line; {} where there is none, more than one, or one that the judge did not write."""
    if finished.ended != "exit" or finished.code != 0 or finished.stdout.count(b"\n") != 1:
        return {}
    try:
        answer = json.loads(finished.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) and answer.get("nonce") == nonce else {}


def _ending(finished: Finished) -> str:
    if finished.ended != "exit":
        return f"over the limit of the sandbox: {finished.ended}"
    lines = re.split(r"[\r\n]+", finished.stderr.decode(errors="replace").strip())
    said = [line for line in lines if line and not re.search(r"\d+(it|/\d+) \[", line)]  # no progress bars
    return f"exit code {finished.code}" + "".join(f": {line[-300:]}" for line in said[-1:])


def preflight(judge: Judge, cache: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Judge the reference solutions, unless this environment has already been found right with this data.

    {"passed": n, "tasks": n, "seconds": s}. All must pass but those that cannot; none may be refused. Raises
    JudgeError with the tasks that came out otherwise. The finding is kept in `cache`.
    """
    benchmark = judge.benchmark
    what = [
        sorted(judge.environment.packages.items()), benchmark.sha256, judge.limits, MIN_TIME_LIMIT,
        hashlib.sha256(judge.program).hexdigest(),
    ]  # fmt: skip
    key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    file = cache / f"preflight-{benchmark.name}-{key}.json"
    if file.exists():
        return json.loads(file.read_text())
    say(f"{benchmark.name}: judging the {len(benchmark.problems)} reference solutions first, once")
    solutions = [Solution(p.task_id, p.reference, sanitize=False) for p in benchmark.problems.values()]
    verdicts: dict[str, Verdict] = {}
    judge.judge(solutions, lambda verdict: verdicts.update({verdict.task_id: verdict}))
    wrong = [
        f"{verdict.task_id}: base {verdict.base}, plus {verdict.plus} {verdict.refused}".rstrip()
        for verdict in verdicts.values()
        if verdict.passed != (verdict.task_id not in benchmark.cannot_pass) or verdict.refused
    ]
    if wrong:
        raise JudgeError(
            f"reference solutions of {benchmark.name} do not come out as they must on this machine, so no score "
            f"is given: {'; '.join(sorted(wrong))}. A busy or slow machine misses time limits: use fewer workers"
        )
    finding = {
        "passed": sum(verdict.passed for verdict in verdicts.values()),
        "tasks": len(verdicts),
        "seconds": round(sum(verdict.seconds for verdict in verdicts.values()), 1),
    }
    write_atomic(file, json.dumps(finding) + "\n")
    return finding
