"""The official runner in the sandbox: right verdicts, and no way to another one.

The slow tests judge all of HumanEval+ and MBPP+; the others take the built-in problems.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.code import KEYS, make_suite
from eval.code_data import Benchmark, load
from eval.code_judge import LIMITS, Judge, JudgeError, Solution, Verdict, preflight
from eval.code_prompts import chat_renderer, prompt, stops
from eval.code_score import CodeSettings, score_code
from eval.evalplus_env import Environment, EvalplusMissing, environment
from eval.sandbox import SandboxUnavailable, probe, run
from eval.suite import Job
from tests.unit.eval_fixtures import small_tokenizer, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "evalplus"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark data is not there: {DATA}")


@pytest.fixture(scope="module")
def runner() -> Environment:
    try:
        probe()
        return environment()
    except (SandboxUnavailable, EvalplusMissing) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def builtin(runner: Environment) -> Judge:
    """With a short wall clock, since some cheats hang the runner; most of the time is waiting."""
    return Judge(runner, load("builtin"), workers=6, limits=replace(LIMITS, wall=15))


def judged(judge: Judge, programs: dict[Any, tuple[str, str]], sanitize: bool = False) -> dict[Any, Verdict]:
    """Key → verdict on (task, program)."""
    solutions = {key: Solution(task, text, sanitize) for key, (task, text) in programs.items()}
    found: dict[str, Verdict] = {}
    judge.judge(solutions.values(), lambda verdict: found.update({verdict.sha256: verdict}))
    return {key: found[solution.sha256] for key, solution in solutions.items()}


ADD = "def add(a, b):\n    return a + b\n"
WRONG_ADD = "def add(a, b):\n    return a - b\n"
ORDINARY = {
    "right": (ADD, "pass", "pass"),
    "wrong": (WRONG_ADD, "fail", "fail"),
    "right on the base tests alone": ("def add(a, b):\n    return min(a + b, 99)\n", "pass", "fail"),
    "empty": ("", "fail", "fail"),
    "syntax error": ("def add(a, b:\n", "fail", "fail"),
    "another name": ("def plus(a, b):\n    return a + b\n", "fail", "fail"),
    "raises": ("def add(a, b):\n    raise SystemExit\n", "fail", "fail"),
    "endless": ("def add(a, b):\n    while True: pass\n", "fail", "fail"),
    "asks for input": ("def add(a, b):\n    return int(input())\n", "fail", "fail"),
    "prints": ("def add(a, b):\n    print('x' * 10**6)\n    return a + b\n", "pass", "pass"),
    "deep recursion": ("def add(a, b):\n    return add(a, b)\n", "fail", "fail"),
    "much memory": ("def add(a, b):\n    return len(bytearray(10**11))\n", "fail", "fail"),
}


FRAMES = """
import sys, os
def seen(name):
    frame = sys._getframe(1)
    while frame:
        if name in frame.f_locals and 'entry_point' in frame.f_locals: return frame.f_locals
        frame = frame.f_back
"""
RESULTS = """{'date': '', 'hash': '', 'eval': {'Builtin/0': [{'task_id': 'Builtin/0', 'solution': SOURCE,
'base_status': 'pass', 'plus_status': 'pass', 'base_fail_tests': [], 'plus_fail_tests': []}]}}"""
CHEATS = {
    "sets the verdict in the shared memory": FRAMES
    + """
def add(a, b):
    its = seen('stat')
    for i in range(len(its['details'])): its['details'][i] = True
    its['progress'].value, its['stat'].value = len(its['details']), 0
    os._exit(0)
""",
    "reads the expected outputs": FRAMES
    + """
def add(a, b):
    its = seen('expected')
    return its['expected'][its['i']]
""",
    "equals everything": """
class Yes:
    def __eq__(self, other): return True
def add(a, b): return Yes()
""",
    "writes the results file": """
import io, json
text = io.FileIO('/tmp/samples.jsonl').read().decode()
SOURCE = json.loads(text)['solution']
def add(a, b):
    io.FileIO('/tmp/samples_eval_results.json', 'w').write(json.dumps(RESULTS).encode())
    return None
""".replace("RESULTS", RESULTS),
    "writes the results file from the background": """
import _posixsubprocess, io, json, os, sys
text = io.FileIO('/tmp/samples.jsonl').read().decode()
SOURCE = json.loads(text)['solution']
import multiprocessing.popen_fork
def add(a, b):
    import ctypes, time
    if ctypes.CDLL(None).fork() == 0:
        ctypes.CDLL(None).setsid()
        while True:
            try: io.FileIO('/tmp/samples_eval_results.json', 'w').write(json.dumps(RESULTS).encode())
            except OSError: pass
            time.sleep(0.01)
    return None
""".replace("RESULTS", RESULTS),
    "ends the runner": """
def add(a, b):
    import ctypes
    ctypes.CDLL(None).kill(-1, 9)
""",
    "ends the runner's parents one by one": """
def add(a, b):
    import ctypes, os
    for pid in range(os.getppid(), 1, -1): ctypes.CDLL(None).kill(pid, 9)
""",
    "prints a pass": """
def add(a, b):
    import os
    line = b'{"nonce": "", "base": "pass", "plus": "pass", "judged": ""}\\n'
    for fd in range(64):
        try: os.write(fd, line + b'pass@1: 1.000\\npass@1: 1.000\\n')
        except OSError: pass
    print('pass@1:\\t1.000')
""",
    "prints a pass and ends the runner": """
def add(a, b):
    import ctypes, os
    for fd in range(64):
        try: os.write(fd, b'{"base": "pass", "plus": "pass", "judged": ""}\\n')
        except OSError: pass
    ctypes.CDLL(None).kill(-1, 9)
""",
    "replaces the runner's modules": """
import sys
for module in list(sys.modules.values()):
    for name in ('PASS', 'FAIL', '_FAILED', '_TIMEOUT', '_UNKNOWN'):
        if hasattr(module, name): setattr(module, name, getattr(module, '_SUCCESS', 'pass'))
def add(a, b): return None
""",
    "replaces what the runner calls": """
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *arguments: True
builtins.len = lambda things: 3
builtins.BaseException = ValueError
def add(a, b): return None
""",
    "leaves with success": "import os\ndef add(a, b): os._exit(0)\n",
    "leaves while it is read": "import os\nos._exit(0)\n",
    "returns a number that equals all": """
class I(int):
    __ne__ = __eq__ = lambda self, other: True
def add(a, b): return I(0)
""",
    "fork loop": """
import ctypes
def add(a, b):
    while True: ctypes.CDLL(None).fork()
""",
    "stays behind": """
def add(a, b):
    import ctypes, time
    if ctypes.CDLL(None).fork() == 0: time.sleep(600)
    return None
""",
}
CHEAT_ALLCLOSE = """
import numpy
numpy.allclose = lambda *arguments, **named: True
def mean(values): return 0.0
"""


@pytest.fixture(scope="module")
def verdicts(builtin: Judge) -> dict[Any, Verdict]:
    """On the ordinary programs, the cheats and, at the same time, the reference solutions."""
    programs: dict[Any, tuple[str, str]] = {name: ("Builtin/0", text) for name, text in CHEATS.items()}
    programs["replaces the comparison"] = ("Builtin/4", CHEAT_ALLCLOSE)
    programs |= {name: ("Builtin/0", text) for name, (text, _, _) in ORDINARY.items()}
    references = {p.task_id: (p.task_id, p.reference) for p in builtin.benchmark.problems.values()}
    return judged(builtin, programs | references)


def test_ordinary_programs(verdicts: dict[Any, Verdict]) -> None:
    found = {name: (verdicts[name].base, verdicts[name].plus, verdicts[name].refused) for name in ORDINARY}
    assert found == {name: (base, plus, "") for name, (_, base, plus) in ORDINARY.items()}


def test_cheats_do_not_pass(verdicts: dict[Any, Verdict]) -> None:
    cheats = [*CHEATS, "replaces the comparison"]
    assert [name for name in cheats if verdicts[name].passed or verdicts[name].passed_base] == []
    altered = "it passes with altered expected outputs too"
    assert {name for name in cheats if verdicts[name].refused == altered} == {
        "sets the verdict in the shared memory",
        "reads the expected outputs",
        "equals everything",
        "returns a number that equals all",
        "replaces the comparison",
    }
    assert "tampered with" in verdicts["writes the results file"].refused
    assert verdicts["ends the runner"].refused == "its run ended without a verdict (exit code 137)"


def test_cheats_touch_no_other_verdict(verdicts: dict[Any, Verdict]) -> None:
    references = [f"Builtin/{number}" for number in range(8)]
    assert [name for name in references if not verdicts[name].passed] == []


def test_the_sanitizer_is_the_official_one(builtin: Judge) -> None:
    """It keeps imports and what the function needs, and drops what stands around it."""
    text = f"Here it is:\n\nimport os\nX = 1\ndef unused(): return 1\n{ADD}\nadd(1, 2) is three"
    verdict = judged(builtin, {"it": ("Builtin/0", text)}, sanitize=True)["it"]
    assert verdict.judged == "import os\n" + ADD.rstrip()
    assert verdict.passed
    assert not judged(builtin, {"it": ("Builtin/0", text)})["it"].passed


def test_prompts_and_stops_are_the_official_ones(runner: Environment) -> None:
    """Against evalplus' own functions, in its own environment."""
    template = (ROOT / "data_mixtures" / "chat_template.jinja").read_text()
    problem = load("builtin").problems["Builtin/1"].row["prompt"]
    render = chat_renderer(template)
    rendered: dict[str, str] = {}

    def record(messages: Any) -> str:
        rendered["messages"] = json.dumps(list(messages))
        return render(messages)

    ours = prompt(problem, "chat", record)
    script = """
import inspect, json, re, sys
from evalplus import codegen
from evalplus.provider.utility import EOS, _MAGIC_SPLITTER_, extra_eos_for_direct_completion, make_raw_chat_prompt
source = inspect.getsource(codegen.run_codegen)
prefix = {n: re.search(n + r' = "(.*)"', source)[1] for n in ('instruction_prefix', 'response_prefix')}
class Tokenizer:
    chat_template = ""
    def apply_chat_template(self, messages, tokenize):
        self.messages = messages
        return "x"
tokenizer = Tokenizer()
make_raw_chat_prompt(json.loads(sys.argv[1]).strip() + "\\n", tokenizer=tokenizer, **prefix)
print(json.dumps([EOS, extra_eos_for_direct_completion("humaneval"), extra_eos_for_direct_completion("mbpp"),
                  tokenizer.messages, _MAGIC_SPLITTER_]))
"""
    command = [runner.python, "-c", script, json.dumps(problem)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    eos, humaneval, mbpp, messages, splitter = json.loads(finished.stdout)
    assert stops("base", "humaneval") == eos + humaneval
    assert stops("base", "mbpp") == eos + mbpp
    assert stops("chat", "mbpp") == [*eos, "\n```\n"]
    assert ours == render(messages).partition(splitter)[0]
    assert [m["role"] for m in json.loads(rendered["messages"])] == [m["role"] for m in messages]


def answering(benchmark: Benchmark, right: Callable[[str], bool]) -> Any:
    """A model that knows the answers to some tasks."""
    answers = {prompt(p.row["prompt"], "base"): p for p in benchmark.problems.values()}

    def generate(prompts: list[str], **_: Any) -> list[str]:
        found = [answers[text] for text in prompts]
        return [p.row["canonical_solution"] if right(p.task_id) else "    return None\n" for p in found]

    return generate


def test_a_whole_evaluation(builtin: Judge, tmp_path: Path) -> None:
    assert preflight(builtin, tmp_path / "cache", lambda _: None)["passed"] == 8
    generate = answering(builtin.benchmark, lambda task: task in ("Builtin/0", "Builtin/3", "Builtin/6"))
    found = score_code(generate, builtin.benchmark, CodeSettings(), tmp_path / "scores", builtin)
    assert found["plus"]["pass@1"]["value"] == found["base"]["pass@1"]["value"] == 3 / 8
    assert found["right"] == 3
    assert found["refused"] == {}


@pytest.mark.usefixtures("runner")
def test_the_suite_on_a_checkpoint(tmp_path: Path) -> None:
    """From the weights to the scores; a model without training solves nothing."""
    checkpoint = write_checkpoint(tmp_path / "run", 5, small_tokenizer(tmp_path), longest=1024)
    words = {name: key.default or "" for name, key in KEYS.items()}
    suite = make_suite(words | {"code_benchmarks": "builtin", "code_tokens": "16", "code_workers": "4"})
    result = suite.run(Job(checkpoint, 5, tmp_path / "folder"))
    assert result.not_run is None
    assert result.scores == {"builtin_code/pass@1": 0, "builtin_code_base_tests/pass@1": 0}
    assert result.tasks["builtin_code"]["n"] == 8
    assert result.tasks["builtin_code"]["refused"] == {}


def test_preflight_is_done_once_and_refuses_a_judge_that_errs(builtin: Judge, tmp_path: Path) -> None:
    class Wrong(Judge):
        calls = 0

        def judge(self, solutions: Any, found: Any) -> None:
            Wrong.calls += 1
            for one in solutions:
                word = "fail" if one.task_id == self.errs_on else "pass"
                found(Verdict(one.sha256, one.task_id, "pass", word))

        errs_on = "Builtin/5"

    judge = Wrong(builtin.environment, builtin.benchmark)
    with pytest.raises(JudgeError, match="Builtin/5: base pass, plus fail"):
        preflight(judge, tmp_path, lambda _: None)
    Wrong.errs_on = ""
    finding = preflight(judge, tmp_path, lambda _: None)
    assert preflight(judge, tmp_path, lambda _: None) == finding
    assert Wrong.calls == 2


def test_a_machine_that_cannot_judge_gives_no_verdict(
    builtin: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even failures: the reference solution gets none either."""
    judge = Judge(builtin.environment, builtin.benchmark)
    monkeypatch.setattr(judge, "program", b"raise SystemExit(3)")
    with pytest.raises(JudgeError, match="neither a solution of Builtin/0 nor its reference"):
        judged(judge, {"it": ("Builtin/0", ADD)})


def test_without_the_environment_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalplusMissing, match="make setup-evalplus"):
        environment(tmp_path)


@pytest.mark.slow
def test_one_run_for_each_solution_finds_what_one_run_for_all_finds(builtin: Judge) -> None:
    """Against evalplus' own command on the whole set (half a minute: it waits for its watchdog)."""
    problems = list(builtin.benchmark.problems.values())
    wrong = ("    return None\n", "", "    while True: pass\n", "    return (\n", "    raise KeyError\n")
    texts = [p.reference for p in problems[:3]] + [
        p.row["prompt"] + end for p, end in zip(problems[3:], wrong, strict=True)
    ]
    texts[2] = (
        "def running_max(values):\n    return [max(values[: i + 1]) for i in range(min(3, len(values)))]\n"
    )
    texts[0] = "def add(a, b):\n    return min(a + b, 99)\n"
    alone = judged(builtin, {p.task_id: (p.task_id, t) for p, t in zip(problems, texts, strict=True)})
    samples = [{"task_id": p.task_id, "solution": t} for p, t in zip(problems, texts, strict=True)]
    files = {
        "/in/problems.jsonl": "".join(problem.line for problem in problems).encode(),
        "/in/samples.jsonl": "".join(json.dumps(sample) + "\n" for sample in samples).encode(),
    }
    room = builtin.environment.room(files)
    official = {"HUMANEVAL_OVERRIDE_PATH": "/in/problems.jsonl", "EVALPLUS_MAX_MEMORY_BYTES": "-1"}
    finished = run(
        ["sh", "-c", f"cp /in/samples.jsonl /tmp && {builtin.environment.python} -m evalplus.evaluate "
         "--dataset humaneval --samples /tmp/samples.jsonl --parallel 2 --min_time_limit 4 >/dev/null "
         "&& cat /tmp/samples_eval_results.json"],
        replace(room, environment={**room.environment, **official}),
        replace(LIMITS, wall=120),
    )  # fmt: skip
    entries = json.loads(finished.stdout)["eval"]
    together = {task: (entry["base_status"], entry["plus_status"]) for task, (entry,) in entries.items()}
    assert together == {task: (verdict.base, verdict.plus) for task, verdict in alone.items()}
    assert Counter(together.values()) == {("pass", "fail"): 1, ("pass", "pass"): 2, ("fail", "fail"): 5}


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize(("name", "passed", "tasks"), [("humaneval", 163, 164), ("mbpp", 378, 378)])
def test_reference_solutions(name: str, passed: int, tasks: int, runner: Environment, tmp_path: Path) -> None:
    """The preflight, uncached: the official counts, and no reference is taken for a cheat."""
    finding = preflight(Judge(runner, load(name, DATA)), tmp_path)
    assert (finding["passed"], finding["tasks"]) == (passed, tasks)


@pytest.mark.slow
@needs_data
def test_mixed_solutions_of_humaneval(runner: Environment) -> None:
    """In turn the reference, a wrong, an empty, a broken and an endless program."""
    benchmark = load("humaneval", DATA)
    programs = {}
    for number, problem in enumerate(benchmark.problems.values()):
        head = problem.row["prompt"]
        kind = ("reference", "wrong", "empty", "broken", "endless")[number % 5]
        text = {
            "reference": problem.reference,
            "wrong": f"{head}\n    return 'no answer'\n",
            "empty": "",
            "broken": f"{head}\n    return (\n",
            "endless": f"{head}\n    while True: pass\n",
        }[kind]
        programs[kind, problem.task_id] = (problem.task_id, text)
    verdicts = judged(Judge(runner, benchmark), programs)
    counts = Counter((kind, verdict.passed) for (kind, _), verdict in verdicts.items())
    # 33 of each kind but the last, which has 32; HumanEval/32 is a wrong one here.
    assert counts == {
        ("reference", True): 33,
        ("wrong", False): 33,
        ("empty", False): 33,
        ("broken", False): 33,
        ("endless", False): 32,
    }
