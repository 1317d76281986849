"""`python -m model …`: sizes, logits, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


def run_logits(tmp_path: Path, case: str, dtype: str, *words: str) -> np.ndarray:
    arrays = np.load(GOLDEN / f"{case}.npz")
    np.save(tmp_path / "ids.npy", arrays["input_ids"])
    weights = f"weights={GOLDEN / case}.npz"
    files = [
        f"config={GOLDEN / case}.json",
        weights,
        f"ids={tmp_path / 'ids.npy'}",
        f"out={tmp_path / 'o.npy'}",
    ]
    assert main(["logits", *files, f"dtype={dtype}", *words]) == 0
    return np.load(tmp_path / "o.npy")


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-9)])
def test_logits_of_a_golden_case(tmp_path: Path, dtype: str, bound: float) -> None:
    expected = np.load(GOLDEN / "vocab_parallel.npz")["logits"]
    assert np.abs(run_logits(tmp_path, "vocab_parallel", dtype) - expected).max() < bound


def test_logits_with_positions_of_packed_documents(tmp_path: Path) -> None:
    arrays = np.load(GOLDEN / "packed.npz")
    np.save(tmp_path / "p.npy", arrays["positions"])
    got = run_logits(tmp_path, "packed", "float64", f"positions={tmp_path / 'p.npy'}")
    assert np.abs(got - arrays["logits"]).max() < 1e-9
    assert np.abs(run_logits(tmp_path, "packed", "float64") - arrays["logits"]).max() > 1e-3


def test_logits_from_safetensors(tmp_path: Path) -> None:
    arrays = np.load(GOLDEN / "base.npz")
    names = [name for name in arrays.files if name.startswith("weights/")]
    file = tmp_path / "w.safetensors"
    save_file({name.removeprefix("weights/"): torch.from_numpy(arrays[name]) for name in names}, file)
    got = run_logits(tmp_path, "base", "float64", f"weights={file}")
    assert np.abs(got - arrays["logits"]).max() < 1e-9


def test_sizes_as_json_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "--json"]) == 0
    rows = {row["size"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["2b"]["parameters"] == 2_320_069_632
    assert set(rows) >= {"smoke", "125m", "350m", "2b", "2b_dense"}
    assert main(["sizes"]) == 0
    table = capsys.readouterr().out
    assert "2,320,069,632" in table
    assert f"{rows['2b']['decode_bytes'] / 1e6:,.1f}" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grow"], "there is no verb 'grow'; there are: sizes"),
        (["sizes", "--yaml"], "--yaml is not a switch"),
        (["sizes", "contxt=3"], "'contxt=3' is not key=value; keys: context"),
        (["sizes", "context=many"], "context=many must be of type int"),
        (["generate"], "checkpoint= is needed"),
        (["generate", "checkpoint=nowhere"], "nowhere is not a complete checkpoint: it has no manifest.json"),
        (["generate", "checkpoint=nowhere", "top_p=2"], "top_p=2.0 must lie in (0, 1]"),
        (["generate", "checkpoint=nowhere", "dtype=int4"], "dtype=int4 must be one of"),
        (["logits", "config=no.json", "weights=w.npz", "ids=i.npy", "out=o.npy"], "no.json"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_help_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint=(needed)" in text
    assert "max_new_tokens=128" in text
    assert main(["--help"]) == 0
    assert "logits" in capsys.readouterr().out
