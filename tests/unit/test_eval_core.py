"""Scoring a suite: what counts as right, resuming, shares, caps, and what a mean may be called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval import core
from eval.adapter import Score
from eval.core import CoreSuite, core_suite, headline, items_file, score_prompts, score_share
from eval.core_prompts import Prompt, Span
from eval.core_tasks import CORE
from eval.results import read_lines
from eval.suite import Job
from tests.unit.eval_fixtures import HashScorer, Killed, SpaceEncoder, make_task, write_core_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_core_data(tmp_path / "data", copies=5)
    return tmp_path / "data"


def use(monkeypatch: pytest.MonkeyPatch, scorer: HashScorer) -> HashScorer:
    monkeypatch.setattr(core, "load_scorer", lambda *args, **kwargs: scorer)
    return scorer


def job(folder: Path, processes: int = 1) -> Job:
    return Job(Path("checkpoint"), 1, folder, processes=processes)


def lines(folder: Path, task: str) -> list[dict[str, Any]]:
    """Item lines without what differs between runs."""
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in read_lines(items_file(folder, task))
    ]


class Fixed:
    """A scorer with given scores."""

    encoder = SpaceEncoder()

    def __init__(self, scores: list[Score]):
        self.scores = scores

    def score(self, spans: Sequence[Span]) -> list[Score]:
        assert len(spans) == len(self.scores)
        return self.scores


def test_options_are_compared_per_token() -> None:
    items = [{"query": "q", "choices": ["long answer", "short"], "gold": 0}]
    prompt = Prompt(0, (Span((1, 2, 3, 4, 5), 1), Span((1, 2), 1)), 0)
    scores = [Score(4.0, 4, False), Score(2.0, 1, True)]  # 1.0 a token against 2.0; the sum says otherwise
    (line,) = score_prompts(make_task("multiple_choice", items), [prompt], Fixed(scores))
    assert (line["scores"], line["prediction"], line["correct"]) == ([1.0, 2.0], 0, True)


def test_ties_go_to_the_first_option() -> None:
    items = [{"query": "q", "choices": ["a", "b"], "gold": 1}]
    prompt = Prompt(0, (Span((1, 2), 1), Span((1, 3), 1)), 1)
    (line,) = score_prompts(make_task("multiple_choice", items), [prompt], Fixed([Score(1, 1, True)] * 2))
    assert (line["prediction"], line["correct"]) == (0, False)


@pytest.mark.parametrize("greedy", [True, False])
def test_language_modelling_asks_for_the_greedy_tokens(greedy: bool) -> None:
    items = [{"context": "q", "continuation": "a"}]
    prompt = Prompt(0, (Span((1, 2), 1),), None)
    score = Score(0.01 if not greedy else 9.0, 1, greedy)
    (line,) = score_prompts(make_task("language_modeling", items), [prompt], Fixed([score]))
    assert line["correct"] is greedy


def test_a_run_over_four_tasks(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, HashScorer())
    suite = core_suite("core", data)
    result = suite.run(job(tmp_path / "out"))
    assert set(result.tasks) == {"copa", "winograd", "lambada_openai", "jeopardy"}
    copa = result.tasks["copa"]
    found = lines(tmp_path / "out", "copa")
    assert [line["item"] for line in found] == list(range(100))
    assert copa["accuracy"] == sum(line["correct"] for line in found) / 100
    assert copa["centred_v2"] == pytest.approx((copa["accuracy"] - 0.5) / 0.5)
    # Jeopardy is the mean over categories: 25 items of b against 75 of a.
    shares = result.tasks["jeopardy"]["categories"]
    assert result.tasks["jeopardy"]["accuracy"] == pytest.approx((shares["a"] + shares["b"]) / 2)
    assert result.tasks["jeopardy"]["accuracy"] != result.tasks["jeopardy"]["correct"] / 100
    mean = sum(entry["centred_v1"] for entry in result.tasks.values()) / 4
    assert result.scores["core_part/v1"] == pytest.approx(mean)


@pytest.mark.parametrize("die_after", [0, 1, 3, 7])
def test_a_killed_run_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_after: int
) -> None:
    suite = core_suite("core", data)
    whole = use(monkeypatch, HashScorer())
    expected = suite.run(job(tmp_path / "whole"))
    killed = use(monkeypatch, HashScorer(die_after))
    with pytest.raises(Killed):
        suite.run(job(tmp_path / "killed"))
    parts = list((tmp_path / "killed").glob(".*.part.jsonl"))
    if parts:  # and the last line was being written
        parts[-1].write_text(parts[-1].read_text() + '{"item": 99, "sco')
    resumed = use(monkeypatch, HashScorer())
    found = suite.run(job(tmp_path / "killed"))
    assert killed.scored + resumed.scored == whole.scored, "items were scored twice or not at all"
    assert found.scores == expected.scores
    for task in expected.tasks:
        assert lines(tmp_path / "killed", task) == lines(tmp_path / "whole", task)
    assert not list((tmp_path / "killed").glob(".*.part.jsonl"))
    again = use(monkeypatch, HashScorer())
    assert suite.run(job(tmp_path / "killed")).scores == expected.scores
    assert again.scored == 0


def test_shares_of_several_processes_make_the_same_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = core_suite("core", data)
    use(monkeypatch, HashScorer())
    expected = suite.run(job(tmp_path / "one"))
    counts = []
    for rank in range(3):
        scorer = use(monkeypatch, HashScorer())
        score_share(suite, job(tmp_path / "three", processes=3), rank)
        counts.append(scorer.scored)
    assert max(counts) - min(counts) <= 6
    found = suite.run(job(tmp_path / "three"))
    assert found.scores == expected.scores
    for task in expected.tasks:
        assert lines(tmp_path / "three", task) == lines(tmp_path / "one", task)


def test_a_cap_scores_the_same_prompts(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, HashScorer())
    core_suite("core", data).run(job(tmp_path / "whole"))
    result = core_suite("core", data, limit=12).run(job(tmp_path / "capped"))
    assert {entry["n"] for entry in result.tasks.values()} == {12}
    for task in result.tasks:
        whole = lines(tmp_path / "whole", task)
        assert all(line in whole for line in lines(tmp_path / "capped", task))
    assert "core_part_max12/v2" in result.scores


def test_a_cap_not_above_the_shots_is_refused(data: Path) -> None:
    with pytest.raises(
        ValueError, match=r"limit=10 is not above the shots of .*jeopardy \(10\).* take limit=11"
    ):
        core_suite("core", data, limit=10)
    assert core_suite("core", data, limit=1, only=("copa",)).limit == 1


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tasks mmlu"):
        core_suite("core", tmp_path, only=("mmlu",))
    with pytest.raises(ValueError, match="no file of copa"):
        core_suite("core", tmp_path, only=("copa",)).settings()
    with pytest.raises(ValueError, match="eval fetch core"):
        core_suite("core", tmp_path / "absent").settings()


def entries(missing: tuple[str, ...] = (), part: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "accuracy": 0.5,
            "centred_v2": 0.0,
            "items_in_full": task.items,
            "items_in_file": task.items - (name in part),
        }
        for name, task in CORE.items()
        if name not in missing
    }


@pytest.mark.parametrize(
    ("tasks", "options", "label"),
    [
        (entries(), {}, "core"),
        (entries(), {"limit": 500}, "core_max500"),
        (entries(), {"rules": "nanochat"}, "core_nanochat"),
        (entries(missing=("squad",)), {}, "core_21"),
        (entries(part=("squad",)), {}, "core_21"),
        (entries(part=("squad",)), {"limit": 50}, "core_21_max50"),
        (entries(part=("coqa",)), {}, "core_part"),
        (entries(missing=("squad", "coqa")), {}, "core_part"),
    ],
)
def test_what_a_mean_may_be_called(tasks: dict[str, Any], options: dict[str, Any], label: str) -> None:
    scores = headline(CoreSuite("core", CORE, Path(), **options), tasks)
    assert {key for key in scores if not key.startswith("core_task/")} == {f"{label}/v1", f"{label}/v2"}


def test_core_21_leaves_squad_out() -> None:
    tasks = entries(part=("squad",))
    tasks["squad"]["accuracy"] = 1.0
    high = headline(CoreSuite("core", CORE, Path()), tasks)
    tasks["squad"]["accuracy"] = 0.0
    assert headline(CoreSuite("core", CORE, Path()), tasks) == high


def test_settings_follow_the_data(data: Path) -> None:
    before = core_suite("core", data).settings()
    with (data / "copa.jsonl").open("a") as stream:
        stream.write(json.dumps({"query": "new", "choices": ["a", "b"], "gold": 0}) + "\n")
    after = core_suite("core", data).settings()
    assert {name for name in before["tasks"] if before["tasks"][name] != after["tasks"][name]} == {"copa"}


def test_builtin_needs_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, HashScorer())
    result = core_suite("builtin", Path("nowhere"), limit=2, only=("copa",)).run(
        job(tmp_path)
    )  # meant for core
    assert {name: entry["n"] for name, entry in result.tasks.items()} == {
        "builtin_choice": 24,
        "builtin_schema": 12,
        "builtin_recall": 24,
    }
    assert not [key for key in result.scores if key.startswith("core")]
    assert result.notes == []
