"""Prompts, stops, settings, pass@k, and an evaluation of a made-up model by a made-up judge."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import pytest

from eval import code_data
from eval.code_data import fetch, load
from eval.code_judge import Judge, Solution, Verdict
from eval.code_prompts import chat_renderer, prompt, solution, stops
from eval.code_score import CodeSettings, chosen_tasks, score_code
from eval.pass_at_k import estimate, pass_at_k, wilson

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "evalplus"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark data is not there: {DATA}")
PROBLEM = '\ndef f(x):\n    """Double x."""\n\n'


def test_base_prompt_is_the_stripped_problem_and_a_newline() -> None:
    assert prompt(PROBLEM, "base") == 'def f(x):\n    """Double x."""\n'


def test_chat_prompt_opens_the_answer() -> None:
    render = chat_renderer((ROOT / "data_mixtures" / "chat_template.jinja").read_text())
    assert prompt(PROBLEM, "chat", render) == (
        "<|user|>\n"
        "Please provide a self-contained Python script that solves the following problem in a markdown code "
        'block:\n```\ndef f(x):\n    """Double x."""\n```\n'
        "<|assistant|>\n"
        "Below is a Python script with a self-contained function that solves the problem and passes "
        "corresponding tests:\n```python\n"
    )


def test_chat_without_a_usable_template_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the model's chat template"):
        prompt(PROBLEM, "chat")
    with pytest.raises(ValueError, match="leaves out the assistant's message"):
        prompt(PROBLEM, "chat", chat_renderer("{{ messages[0]['content'] }}"))
    with pytest.raises(ValueError, match="refuses the conversation: no system"):
        prompt(PROBLEM, "chat", chat_renderer("{{ raise_exception('no system') }}"))


@pytest.mark.parametrize(
    ("style", "dataset", "continuation", "expected"),
    [
        ("base", "humaneval", "    return 2 * x\n\ndef g():\n", "    return 2 * x\n"),
        ("base", "humaneval", "\treturn 2 * x", "    return 2 * x"),
        ("base", "humaneval", "    return 2 * x\nprint(f(1))\n", "    return 2 * x"),
        ("base", "humaneval", "    return 2 * x</s>\nclass A", "    return 2 * x"),
        ("base", "humaneval", '    return 2 * x\n"""more', '    return 2 * x\n"""more'),
        ("base", "mbpp", 'def f(x):\n    return 2 * x\n"""more', "def f(x):\n    return 2 * x"),
        ("base", "mbpp", "def g(): pass\ndef f(x): return 1\nassert f", "def g(): pass\ndef f(x): return 1"),
    ],
)
def test_base_solution(style: str, dataset: str, continuation: str, expected: str) -> None:
    assert solution(PROBLEM, continuation, "base", dataset) == prompt(PROBLEM, "base") + expected


def test_chat_solution_is_the_answer_alone_up_to_the_fence() -> None:
    answer = "import math\n\ndef f(x):\n\treturn 2 * x\n```\nThis doubles x."
    expected = "import math\n\ndef f(x):\n    return 2 * x"
    assert solution(PROBLEM, answer, "chat", "humaneval") == expected
    assert solution(PROBLEM, answer, "chat", "mbpp") == expected


def test_stops_of_the_styles() -> None:
    common = ["<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint("]
    assert stops("base", "humaneval") == [*common, "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert "]
    assert stops("base", "mbpp") == [*common, '\n"""', "\nassert"]
    assert stops("chat", "humaneval") == stops("chat", "mbpp") == [*common, "\n```\n"]


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@2 needs at least 2 samples"):
        pass_at_k(1, 1, 2)
    with pytest.raises(ValueError, match="got 5 of 4"):
        pass_at_k(4, 5, 2)


def test_interval_of_one_sample_is_wilsons() -> None:
    found = estimate(1, [1] * 74 + [0] * 90, 1)
    assert found["value"] == pytest.approx(74 / 164)
    assert (found["low"], found["high"]) == wilson(74, 164)
    assert wilson(1, 10) == pytest.approx((0.0179, 0.4042), abs=5e-5)  # from the literature
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)
    assert wilson(0, 10)[0] == 0
    assert 0.2 < wilson(0, 10)[1] < 0.3


def test_interval_of_several_samples_is_the_bootstraps() -> None:
    right = [0, 1, 2, 3, 4] * 40
    found = estimate(4, right, 2)
    values = [pass_at_k(4, count, 2) for count in right]
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / len(values) / len(values)) ** 0.5
    assert found["value"] == pytest.approx(mean)
    assert found["low"] == pytest.approx(mean - 1.96 * deviation, abs=0.006)
    assert found["high"] == pytest.approx(mean + 1.96 * deviation, abs=0.006)
    assert estimate(4, right, 2) == found


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"samples=4 at temperature=0.*top_p=2.*limit=0"):
        CodeSettings(samples=4, top_p=2, limit=0)
    with pytest.raises(ValueError, match="style=instruct is neither base nor chat"):
        CodeSettings(style="instruct")  # type: ignore[arg-type]


def test_a_capped_evaluation_takes_evenly_spread_tasks() -> None:
    benchmark = load("builtin")
    assert chosen_tasks(benchmark, 3) == ["Builtin/0", "Builtin/2", "Builtin/5"]
    assert chosen_tasks(benchmark, None) == chosen_tasks(benchmark, 100) == list(benchmark.problems)


class Model:
    """Answers the first problems of a batch rightly; counts what it is asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fail_at = fail_at
        self.answers = {
            prompt(problem.row["prompt"], "base"): problem.row["canonical_solution"]
            for problem in load("builtin").problems.values()
        }

    def __call__(
        self,
        prompts: list[str],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: list[str],
    ) -> list[str]:
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append((seed, len(prompts)))
        return [
            self.answers[text] if seed % 2 or i == 0 else "    return 1\n" for i, text in enumerate(prompts)
        ]


class Reader:
    """Takes a solution for right when it holds the reference's text."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.judged: list[str] = []
        self.stop_after = stop_after

    def judge(self, solutions: Iterable[Solution], found: Callable[[Verdict], None]) -> None:
        problems = load("builtin").problems
        for one in solutions:
            if len(self.judged) == self.stop_after:
                raise KeyboardInterrupt
            self.judged.append(one.task_id)
            good = problems[one.task_id].row["canonical_solution"] in one.text
            word = "pass" if good else "fail"
            refused = "a cheat" if good and one.task_id == "Builtin/0" else ""
            found(Verdict(one.sha256, one.task_id, word, word, one.text, refused))


def score(folder: Path, model: Model, reader: Reader, settings: CodeSettings) -> dict:
    found = score_code(model, load("builtin"), settings, folder, cast("Judge", reader))
    del found["seconds"]
    return found


SAMPLED = CodeSettings(samples=4, temperature=0.8, batch=3)


def test_score(tmp_path: Path) -> None:
    model, reader = Model(), Reader()
    found = score(tmp_path, model, reader, SAMPLED)
    assert [count for _, count in model.calls] == [3, 3, 2] * 4
    assert len({seed for seed, _ in model.calls}) == 12
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    right = [sum(r["plus"] == "pass" and not r["refused"] for r in rows if r["task_id"] == f"Builtin/{n}")
             for n in range(8)]  # fmt: skip
    assert right[0] == 0, "a refused solution counts as wrong"
    assert 0 < sum(right) < 28
    assert found["right"] == sum(right)
    assert set(found["plus"]) == {"pass@1", "pass@2", "pass@4"}
    assert found["plus"]["pass@2"]["value"] == pytest.approx(sum(pass_at_k(4, c, 2) for c in right) / 8)
    assert list(found["refused"].values()) == ["a cheat"]
    assert "plus_corrected" not in found
    different = {(row["task_id"], row["program"]) for row in rows}
    assert len(reader.judged) == len(different) < 32, "equal programs are judged once"


@pytest.mark.parametrize(("generated", "judged"), [(0, None), (5, None), (None, 0), (None, 6)])
def test_a_killed_evaluation_goes_on(generated: int | None, judged: int | None, tmp_path: Path) -> None:
    whole = score(tmp_path / "whole", Model(), Reader(), SAMPLED)
    first_model, first_reader = Model(generated), Reader(judged)
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path / "killed", first_model, first_reader, SAMPLED)
    model, reader = Model(), Reader()
    assert score(tmp_path / "killed", model, reader, SAMPLED) == whole
    assert len(first_model.calls) + len(model.calls) == 12
    done = len(first_reader.judged)
    assert done == (judged or 0)
    assert not set(first_reader.judged[:done]) - set(load("builtin").problems)
    assert (tmp_path / "killed" / "items.jsonl").read_text() == (
        tmp_path / "whole" / "items.jsonl"
    ).read_text()
    everything = Reader()
    score(tmp_path / "again", Model(), everything, SAMPLED)
    assert len(first_reader.judged) + len(reader.judged) == len(everything.judged)


def test_another_evaluation_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    score(tmp_path, Model(), Reader(), CodeSettings())
    with pytest.raises(ValueError, match=r"max_new_tokens=768 and not 64; give another folder"):
        score(tmp_path, Model(), Reader(), CodeSettings(max_new_tokens=64))


def test_tasks_that_cannot_pass_are_left_out_of_a_second_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = load("builtin")
    object.__setattr__(benchmark, "cannot_pass", frozenset({"Builtin/0"}))
    found = score_code(Model(), benchmark, CodeSettings(batch=1), tmp_path, cast("Judge", Reader()))
    assert found["plus"]["pass@1"]["value"] == pytest.approx(7 / 8)
    assert found["plus_corrected"]["pass@1"]["value"] == 1
    assert found["cannot_pass"] == ["Builtin/0"]


@needs_data
def test_the_data_is_the_version_of_the_pinned_runner() -> None:
    humaneval, mbpp = load("humaneval", DATA), load("mbpp", DATA)
    assert (len(humaneval.problems), len(mbpp.problems)) == (164, 378)
    assert humaneval.cannot_pass == {"HumanEval/32"}
    assert humaneval.problems["HumanEval/0"].reference.startswith("from typing import List")


def test_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m eval fetch code"):
        load("mbpp", tmp_path)
    (tmp_path / "MbppPlus.jsonl").write_text('{"task_id": "Mbpp/2"}\n')
    with pytest.raises(ValueError, match=r"MbppPlus.jsonl is not MbppPlus.jsonl.gz v0.2.0"):
        load("mbpp", tmp_path)
    with pytest.raises(ValueError, match="there is no code benchmark 'apps'"):
        load("apps", tmp_path)


def test_fetch_keeps_only_what_it_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = tmp_path / "remote.gz"
    line = json.dumps({"task_id": "Mbpp/2"}) + "\n"
    remote.write_bytes(gzip.compress(line.encode()))
    with pytest.raises(ValueError, match="is not"):
        fetch("mbpp", tmp_path / "data", remote.as_uri())
    assert not list((tmp_path / "data").iterdir())
    import dataclasses
    import hashlib

    wanted = dataclasses.replace(code_data.SOURCES["mbpp"], sha256=hashlib.sha256(line.encode()).hexdigest())
    monkeypatch.setitem(code_data.SOURCES, "mbpp", wanted)
    path = fetch("mbpp", tmp_path / "data", remote.as_uri())
    remote.unlink()
    assert fetch("mbpp", tmp_path / "data") == path, "what is there is not fetched again"
