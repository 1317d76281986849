"""Runs inside the sandbox, with the Python of evalplus' own environment: one call of the official runner.

    python judge.py <nonce>, with the task as JSON on stdin; one JSON line on stdout

The judged code shares this process tree (evalplus forks a child for each solution), so nothing that a child
could have written is believed where the runner also holds it in memory: the pass rates are read from what the
runner prints, in this process, and the results file must agree with them. For the same reason a control run,
with altered expected outputs, must look like any other run from within.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import pickle
import re
import signal
import sys
import traceback
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

PROBLEMS = Path("/tmp/problems.jsonl")
SAMPLES = Path("/tmp/samples.jsonl")
RESULTS = Path("/tmp/samples_eval_results.json")
CACHE = Path("/tmp/cache")
SANITIZER_SECONDS = 60
PR_SET_DUMPABLE = 4


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")  # not inherited over exec, and the runner's own stdout goes elsewhere
    task = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    # Processes of one user may write each other's memory through /proc, unless they are not dumpable.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    os.environ["HUMANEVAL_OVERRIDE_PATH"] = os.environ["MBPP_OVERRIDE_PATH"] = str(PROBLEMS)
    os.environ["EVALPLUS_MAX_MEMORY_BYTES"] = "-1"  # the sandbox limits memory; see eval/evalplus_env.py
    # evalplus imports this library for another benchmark; it costs two of the two and a half seconds.
    sys.modules["datasets"] = types.ModuleType("datasets")
    vars(sys.modules["datasets"])["load_dataset"] = None
    PROBLEMS.write_text(task["problem"])
    try:
        found = judge(**task)
        print(json.dumps({"nonce": sys.argv[1], **found}), file=answer, flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a watchdog thread of the runner would sleep on: for 20 s, or for ever after an error


def judge(
    problem: str, dataset: str, solution: str, sanitize: bool, control: bool, min_time_limit: float
) -> dict[str, Any]:
    """The verdict on `solution`, or why there is none. With `control`, every expected output is altered."""
    row = json.loads(problem)
    if sanitize:
        try:
            solution = sanitized(solution, row["entry_point"])
        except Exception as error:
            return {"refused": f"evalplus' sanitizer failed: {error!r}"[:500]}
    SAMPLES.write_text(json.dumps({"task_id": row["task_id"], "solution": solution}) + "\n")
    runner = importlib.import_module("evalplus.evaluate")
    if control:
        alter_expected_outputs(runner, dataset)
    del control
    printed = io.StringIO()
    with redirect_stdout(printed):
        runner.evaluate(dataset, str(SAMPLES), parallel=1, min_time_limit=min_time_limit)
    (entry,) = json.loads(RESULTS.read_text())["eval"][row["task_id"]]
    base, plus = entry["base_status"], entry["plus_status"]
    rates = re.findall(r"^(?:\x1b\[\d+m)?pass@1:\s+([\d.]+)", printed.getvalue(), re.M)
    held = [f"{float(passed):.3f}" for passed in (base == "pass", base == plus == "pass")]
    if rates != held or entry["solution"] != solution:
        return {"refused": f"the results file was tampered with: it gives {held}, the runner {rates}"}
    return {"base": base, "plus": plus, "judged": solution}


def sanitized(solution: str, entry_point: str) -> str:
    signal.alarm(
        SANITIZER_SECONDS
    )  # its time grows with the square of the lines; the signal ends this process
    try:
        return importlib.import_module("evalplus.sanitize").sanitize(solution, entry_point)
    finally:
        signal.alarm(0)


def alter_expected_outputs(runner: Any, dataset: str) -> None:
    """Have the runner compute the expected outputs, and alter those that it will find in its cache."""
    if dataset == "humaneval":
        problems, digest, not_none = runner.get_human_eval_plus(), runner.get_human_eval_plus_hash(), []
    else:
        problems, digest = runner.get_mbpp_plus(), runner.get_mbpp_plus_hash()
        not_none = runner.MBPP_OUTPUT_NOT_NONE_TASKS
    with redirect_stdout(io.StringIO()):
        answers = runner.get_groundtruth(problems, digest, not_none)
    for answer in answers.values():
        for part in ("base", "plus"):
            answer[part] = [altered(output) for output in answer[part]]
    (CACHE / "evalplus" / f"{digest}.pkl").write_bytes(pickle.dumps(answers))


def altered(output: Any) -> Any:
    """Another value of the same kind, as far from `output` as no tolerance allows."""
    if isinstance(output, bool):
        return not output
    if isinstance(output, int):
        return -output - 1
    if isinstance(output, float):
        return output + 2 if abs(output) < 2 else -output
    if isinstance(output, complex):
        return -output - 1
    if isinstance(output, str):
        return output + "s"
    if isinstance(output, list | tuple) and type(output) in (list, tuple):
        first = [altered(output[0])] if output else [0]
        return type(output)([*first, *output[1:]])
    if isinstance(output, dict) and output:
        first = next(iter(output))
        return {**output, first: altered(output[first])}
    if isinstance(output, set | frozenset):
        return output ^ {0}
    return 0 if output is None else None


if __name__ == "__main__":
    main()
