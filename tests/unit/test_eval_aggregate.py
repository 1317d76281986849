"""Core from accuracies: by hand, and the published results of DCLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.aggregate import aggregate, aggregate_file
from eval.cli import main
from eval.core_tasks import CORE
from tests.unit.eval_fixtures import CORE_DATA, NO_CORE_DATA

PERFECT = dict.fromkeys(CORE, 1.0)
GUESSED = {
    "hellaswag_zeroshot": 0.25,
    "hellaswag": 0.25,
    "arc_easy": 0.25,
    "arc_challenge": 0.25,
    "copa": 0.5,
    "commonsense_qa": 0.2,
    "piqa": 0.5,
    "openbook_qa": 0.25,
    "winograd": 0.5,
    "winogrande": 0.5,
    "agi_eval_lsat_ar": 0.2,
    "boolq": 0.62,
    "bigbench_language_identification": 0.091,
}


def test_perfect_is_one() -> None:
    assert aggregate(PERFECT) == {"core_v1": pytest.approx(1), "core_v2": pytest.approx(1)}


def test_guessing_is_zero_in_v1_and_below_in_v2() -> None:
    guessed = dict.fromkeys(CORE, 0.0) | GUESSED
    core = aggregate(guessed)
    assert core["core_v1"] == pytest.approx(0, abs=1e-15)
    # Three baselines rose: 0.2 → 0.403, 0.2 → 0.25, 0.091 → 0.25.
    by_hand = (-0.203 / 0.597 - 0.05 / 0.75 - 0.159 / 0.75) / 22
    assert core["core_v2"] == pytest.approx(by_hand, abs=1e-15)


def test_core_needs_all_22() -> None:
    without = {name: 1.0 for name in CORE if name != "arc_easy"}
    assert aggregate(without) == {"missing": ["arc_easy"]}
    assert set(aggregate({})) == {"missing"}


def test_without_squad_it_is_core_21() -> None:
    without = {name: 0.5 if name == "coqa" else 1.0 for name in CORE if name != "squad"}
    found = aggregate(without)
    assert set(found) == {"missing", "core_21_v1", "core_21_v2"}
    assert found["core_21_v1"] == pytest.approx(20.5 / 21)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tasks mmlu"):
        aggregate(PERFECT | {"mmlu": 0.5})
    with pytest.raises(ValueError, match=r"fractions .*squad = 31\.4"):
        aggregate(PERFECT | {"squad": 31.4})
    file = tmp_path / "scores.json"
    file.write_text(
        json.dumps([{"name": "a", "accuracy": PERFECT}, {"name": "b", "accuracy": {"squad": -1}}])
    )
    with pytest.raises(ValueError, match=r"scores\.json entry b: .*squad = -1"):
        aggregate_file(file)
    file.write_text('{"name": "a"}')
    with pytest.raises(ValueError, match="must hold a list"):
        aggregate_file(file)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scores.json"
    part = {name: 1.0 for name in CORE if name != "coqa"}
    file.write_text(json.dumps([{"name": "a", "accuracy": PERFECT}, {"name": "b", "accuracy": part}]))
    assert main(["aggregate", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {"name": "a", "core_v1": pytest.approx(1), "core_v2": pytest.approx(1)}
    assert rows[1] == {"name": "b", "missing": ["coqa"]}
    assert main(["aggregate", f"scores={file}"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "b: no CORE: coqa missing"


@pytest.mark.skipif(not CORE_DATA.is_dir(), reason=NO_CORE_DATA)
def test_published_results_are_reproduced() -> None:
    file = CORE_DATA / "dclm_published.json"
    published = json.loads(file.read_text())
    assert len(published) == 39
    for ours, theirs in zip(aggregate_file(file), published, strict=True):
        assert ours["core_v1"] == pytest.approx(theirs["core_v1"], abs=1e-9)
        assert ours["core_v2"] == pytest.approx(theirs["core_v2"], abs=1e-9)
