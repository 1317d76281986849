from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from data_mixtures.cli import main
from data_mixtures.mixture import Mixture, SourceSize
from data_mixtures.plan_record import record_plan
from data_mixtures.recipe import Phase


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that logged every tenth step of four sequences, was cut off, and repeated two of its steps."""
    shares = {"code": Fraction(2, 3), "prose": Fraction(1, 3)}
    mixture = Mixture(
        [Phase(name="p", tokens=1000, weights=shares)],
        {name: SourceSize(items=500, tokens=5000, sha256=name) for name in shares},
        seq_len=10,
        seed=0,
        packing="concat",
        max_epochs=4,
        tokenizer="t",
    )
    record_plan(mixture, tmp_path / "plan.json")
    rows = [row(mixture, step) for step in (10, 20, 15, 20, 25)]
    lines = [
        json.dumps({"step": 5, "validation/code/loss": 3.0}),
        *map(json.dumps, rows),
        '{"step": 26, "seq',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    return tmp_path


def row(mixture: Mixture, step: int) -> dict[str, Any]:
    counts = {f"data/{source}/sequences": n for source, n in mixture.consumed(4 * step).items()}
    return {"step": step, "sequences": 4 * step, "loss": 1.0, "data/code/tokens": 7, **counts}


def edit(run: Path, step: int, **changes: Any) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines[:-1]):
        logged = json.loads(line)
        if logged["step"] == step:
            lines[i] = json.dumps({**logged, **changes})
    path.write_text("\n".join(lines))


def test_a_run_that_read_its_plan_passes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run)]) == main(["audit", f"run={run}"]) == 0
    printed = capsys.readouterr().out
    assert "5 logged steps agree with the plan" in printed
    assert [line.split()[:3] for line in printed.splitlines()[1:3]] == [
        ["code", "67", "67"],
        ["prose", "33", "33"],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data/code/sequences": 68}, "step 25: code gave 68 sequences, the plan says 67"),
        ({"data/web/sequences": 1}, "step 25: web is not in the plan"),
        ({"sequences": 104}, "step 25: 104 sequences were read, the phase has 100"),
    ],
)
def test_differences_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, int], message: str
) -> None:
    edit(run, 25, **changes)
    assert main(["audit", f"run={run}"]) == 1
    assert message in capsys.readouterr().err


def test_what_cannot_be_audited_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert main(["audit", f"run={run}"]) == 2
    (run / "metrics.jsonl").unlink()
    assert main(["audit", f"run={run}"]) == 2
    (run / "plan.json").unlink()
    assert main(["audit", f"run={run}"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "nothing to audit" in errors[0]
    assert "metrics.jsonl does not exist; is" in errors[1]
    assert "plan.json does not exist" in errors[2]
