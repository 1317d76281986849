"""Held-out losses of saved checkpoints are those that the trainer logged when it saved them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_mixtures.cli import main as pack
from eval.cli import main
from eval.report import write_report
from eval.results import RunFiles, read_result
from eval.tracking import best
from tests.runs import train
from tests.tiny import tiny_config
from train.run_dir import RunDir, read_lines

WORDS = ["validation.every_steps=10", "validation.sequences_per_source=7", "metrics.tensorboard=true"]


@pytest.fixture(scope="module", params=["concat", "best_fit"])
def run(request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    data, words = tiny_data, [*WORDS, f"data.packing={request.param}"]
    if request.param == "best_fit":
        data = tmp_path_factory.mktemp("packed") / "data"
        shutil.copytree(tiny_data, data)
        for source in ("prose", "code"):
            assert pack(["pack", f"root={data}", f"source={source}", "seq_len=32"]) == 0
    return train(tiny_config(data, tmp_path_factory.mktemp("validated"), *words, ranks=2))


def test_the_trainers_numbers(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--follow", f"run={run.path}", "suite=validation", "batch_tokens=96"]) == 0
    logged = {row["step"]: row for row in run.metric_rows("validation")}
    for step in (10, 20):
        entry = read_result(run.evals / f"step-{step}.json")["suites"][0]
        expected = {key: value for key, value in logged[step].items() if key.startswith("validation/")}
        assert entry["scores"] == pytest.approx(expected, rel=1e-6)
        assert entry["tasks"]["prose"]["n"] == 7
    rows = [row for row in read_lines(run.metrics) if row["kind"] == "eval"]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]  # also where the trainer did not validate
    losses = [row["eval/validation/prose/loss"] for row in rows]
    assert best(RunFiles(run.path).results())["validation/prose/loss"] == min(losses) < max(losses)
    assert set(rows[0]) >= {"eval/validation/prose/loss", "eval/validation/code/bits_per_byte"}
    assert main(["--follow", f"run={run.path}", "suite=validation"]) == 0
    assert capsys.readouterr().out.endswith("0 results added\n")
    page = write_report([run.path])
    assert "<h2>Held-out text</h2>" in page.read_text()
    assert "| prose | 7 |" in page.with_suffix(".md").read_text()


def test_a_killed_evaluation_goes_on_and_a_cap_is_another_setting(run: RunDir) -> None:
    checkpoint = run.checkpoints / "step-20"
    words = [f"checkpoint={checkpoint}", "suite=validation", "limit=3"]
    assert main(words) == 0
    result = run.evals / "step-20.json"
    first = read_result(result)["suites"][-1]
    assert first["tasks"]["code"]["n"] == 3
    (folder,) = (run.evals / "step-20").glob(f"validation-{first['settings_hash']}")
    lines = (folder / "code.jsonl").read_text().splitlines(keepends=True)
    (folder / "code.jsonl").write_text(lines[0] + lines[1][:9])  # as a kill would leave it
    result.write_text(result.read_text().replace(first["settings_hash"], "00000000"))
    assert main(words) == 0
    again = read_result(result)["suites"][-1]
    assert again["scores"] == pytest.approx(first["scores"], rel=1e-6)
    assert [line["item"] for line in read_lines(folder / "code.jsonl")] == [0, 1, 2]


def test_mistakes(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run.checkpoints / "step-20"
    assert main([f"checkpoint={checkpoint}", "suite=validation", f"held_out={tmp_path}"]) == 2
    assert str(tmp_path / "prose" / "validation") in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main([f"checkpoint={tmp_path}", "suite=validation", f"out={tmp_path}/out"]) == 2
    assert "give a checkpoint in a run directory" in capsys.readouterr().err
