"""Steps whose loss is not finite or spikes: met twice, then passed over, with a plan that still adds up."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from data_mixtures.audit import audit_run
from tests.runs import numbers, train
from tests.tiny import tiny_config
from train.bad_steps import BadSteps, passed_over
from train.config import StabilityConfig
from train.run_dir import RunDir, append_line, read_lines


def record(run: RunDir, step: int, *attempts: int) -> None:
    for attempt in attempts:
        append_line(run.bad_steps, {"step": step, "attempt": attempt, "time": 0.0, "reason": "loss is nan"})


def test_only_what_two_attempts_have_met_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, 10, 1, 2)
    record(run, 30, 3)  # once
    record(run, 40, 4, 4)  # twice in one attempt: two ranks told of it
    record(run, 50, 5, 6, 7)
    assert passed_over(StabilityConfig(), run) == frozenset()
    assert passed_over(StabilityConfig(skip_steps=3), run) == {8, 9, 10, 48, 49, 50}
    assert passed_over(StabilityConfig(skip_steps=1, max_skips=1), run) == {10}
    assert passed_over(StabilityConfig(skip_steps=20), run) == {*range(1, 11), *range(31, 51)}


def test_the_judge(tmp_path: Path) -> None:
    judge = BadSteps(StabilityConfig(spike_sigmas=6.0, spike_window=20), RunDir(tmp_path), 1)
    assert judge.judge(1e9) is None  # too little is known
    noise = np.random.default_rng(0).normal(3.0, 0.1, 200)
    assert [judge.judge(float(loss)) for loss in noise] == [None] * 200
    assert judge.judge(3.4) is None
    assert "spikes above" in (judge.judge(4.5) or "")
    assert judge.judge(2.0) is None  # a fall is no spike
    for loss in (float("nan"), float("inf")):
        assert judge.judge(loss) == f"loss is {loss}"
    assert BadSteps(StabilityConfig(), RunDir(tmp_path), 1).judge(1e9) is None


def test_steps_passed_over_count_as_read_and_nothing_else_shifts(tiny_data: Path, tmp_path: Path) -> None:
    """Steps 7 and 8 are known to be bad: no row of training for them, and the same plan, position and schedule."""
    plain = train(tiny_config(tiny_data, tmp_path, "name=plain", ranks=2))
    config = tiny_config(tiny_data, tmp_path, "name=skips", "stability.skip_steps=2", ranks=2)
    record(RunDir(tmp_path / "skips"), 8, 1, 2)
    run = train(config)
    assert run.done
    expected, got = numbers(plain), numbers(run)
    assert list(got) == [step for step in range(1, 21) if step not in (7, 8)]
    assert [got[step] for step in range(1, 7)] == [expected[step] for step in range(1, 7)]
    assert got[9][0] != expected[9][0]  # from weights that are two steps younger
    assert [value[2:] for value in got.values()] == [expected[step][2:] for step in got]  # rate and tokens
    assert audit_run(run.path).differences == []
    told = [row for row in read_lines(run.metrics) if row["kind"] == "passed_over"]
    assert [row["step"] for row in told] == [7, 8]
    assert sum(value for key, value in told[0].items() if key.startswith("passed_over/")) == 4
    last, without = run.metric_rows("train")[-1], plain.metric_rows("train")[-1]
    assert last["data/prose/sequences"] == without["data/prose/sequences"]
    assert last["data/prose/tokens"] < without["data/prose/tokens"]


def test_a_run_gets_past_spikes_by_itself(tiny_data: Path, tmp_path: Path) -> None:
    """At a learning rate of nearly nothing losses only fluctuate, and an outlier is a spike. Attempts as a launcher
    starts them, until the run is done."""
    words = [
        "stability.spike_window=6",
        "stability.skip_steps=1",
        "stability.spike_sigmas=1.5",
        "optim.lr=1e-9",
    ]
    config = tiny_config(tiny_data, tmp_path, *words, ranks=2)
    run = RunDir(tmp_path / "tiny")
    for _ in range(12):
        with contextlib.suppress(AssertionError):  # run_ranks, of exit codes
            train(config)
        if run.done:
            break
    assert run.done
    bad = [line["step"] for line in read_lines(run.bad_steps)]
    assert bad, "nothing spiked, so nothing was tested"
    assert bad == [step for step in dict.fromkeys(bad) for _ in range(2)]
    assert set(numbers(run)) == set(range(1, 21)) - set(bad)
    assert audit_run(run.path).differences == []
    reasons = [line.get("reason") or "" for line in read_lines(run.attempts) if line["event"] == "end"]
    assert f"step {bad[0]}: loss" in reasons[0]
    assert "spikes above" in reasons[0]
