"""Closed forms of goodput against the simulation, and what `plan` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.capacity import Failures, expected_time, goodput, simulate, simulated_goodput, young_daly
from launch.cli import main

DAY = 86400.0
REFERENCE = Failures(mtbf=7 * DAY, recovery=600, save=10, interval=1800)


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(7 * DAY, 58), (3 * DAY, 38), (DAY, 22)], ids=["7 days", "3 days", "1 day"]
)
def test_best_interval(mtbf: float, minutes: int) -> None:
    """Against sqrt(2 x save x MTBF), worked out by hand."""
    assert young_daly(10, mtbf) / 60 == pytest.approx(minutes, abs=1)


@pytest.mark.parametrize("save", [5.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf", [0.2 * DAY, 2 * DAY, 20 * DAY])
def test_no_other_interval_is_better(save: float, mtbf: float) -> None:
    best = young_daly(save, mtbf)
    failures = Failures(mtbf, 600, save, best)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(failures) >= goodput(replace(failures, interval=factor * best)) * (1 - 1e-4)


@pytest.mark.parametrize(
    "failures",
    [REFERENCE, replace(REFERENCE, mtbf=0.1 * DAY), replace(REFERENCE, mtbf=3600.0, interval=900, save=60)],
    ids=["a 192-GPU cluster", "a large one", "a failure an hour"],
)
def test_the_simulation_agrees_with_the_closed_form(failures: Failures) -> None:
    work = 20 * DAY
    mean, error, _ = simulated_goodput(work, failures, runs=200, seed=1)
    assert mean == pytest.approx(goodput(failures), abs=4 * error + 1e-3)


def test_interruptions_come_at_their_rate() -> None:
    _, _, count = simulated_goodput(20 * DAY, replace(REFERENCE, mtbf=DAY), runs=300, seed=2)
    assert count == pytest.approx(20 * 1.02, rel=0.05)


def test_without_failures_only_saves_are_lost() -> None:
    calm = replace(REFERENCE, mtbf=1e15)
    seconds, interruptions = simulate(10 * 1800, calm, np.random.default_rng(0))
    assert (seconds, interruptions) == (10 * 1810, 0)
    assert expected_time(18000, calm) == pytest.approx(18100, rel=1e-6)


def test_slow_recovery_costs_what_it_takes() -> None:
    """One failure a week and eight hours a failure: 8/168 of the time."""
    quick, slow = goodput(replace(REFERENCE, recovery=600)), goodput(replace(REFERENCE, recovery=8 * 3600))
    assert quick - slow == pytest.approx((8 * 3600 - 600) / (7 * DAY), rel=0.1)


def test_the_real_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6T tokens at 17,000 tokens/s a rank on 192 ranks are the 21 days that the public run reports."""
    picture = tmp_path / "goodput.png"
    total = 0.0
    for words in (["experiment=phase1", f"plot={picture}"], ["experiment=phase2"]):
        assert main(["plan", *words]) == 0
        out = capsys.readouterr().out
        total += float(out.split("time without interruptions")[1].split()[0])
        assert "27.8 GB, 1.16 GB a node" in out
    assert total == pytest.approx(21.3, abs=0.1)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=smoke_phase1"], "give seconds_per_step= as measured, or tokens_per_second_per_rank="),
        (["experiment=phase2", "save_seconds=soon"], "save_seconds: could not convert"),
        (
            ["experiment=phase2", "recovery_minutes=-1"],
            "recovery_minutes=-1.0 must be a finite number greater than 0",
        ),
        (["experiment=phase2", "seconds_per_step=nan"], "seconds_per_step=nan must be a finite number"),
        (["experiment=phase2", "seconds_per_step=inf"], "seconds_per_step=inf must be a finite number"),
        (["experiment=phase2", "optim.lrr=1"], "optim.lrr is not a key"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
