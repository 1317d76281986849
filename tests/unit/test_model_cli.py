"""`python -m model …`: sizes, logits, and mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.cli import main
from model.hf import read_weights

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
        (["sizes", "contxt=3"], "contxt= is not a key; keys: context"),
        (["sizes", "context"], "'context' is not key=value; keys: context"),
        (["generate", "checkpoint=nowhere", "stop="], "stop= must be a text that is not empty"),
        (["sizes", "context=many"], "context=many must be an integer of at least 1"),
        (["sizes", "context=0"], "context=0 must be an integer of at least 1"),
        (["generate"], "checkpoint= is needed"),
        (["generate", "checkpoint=nowhere"], "nowhere is not a complete checkpoint: it has no manifest.json"),
        (["generate", "checkpoint=nowhere", "top_p=2"], "top_p=2.0 must lie in (0, 1]"),
        (["generate", "checkpoint=nowhere", "temperature=hot"], "temperature=hot must be a number"),
        (["generate", "checkpoint=nowhere", "seed=1.5"], "seed=1.5 must be an integer"),
        (
            ["generate", "checkpoint=nowhere", "weights=int4"],
            "weights=int4 must be one of float32, float64, bfloat16, float16, int8",
        ),
        (["chat", "checkpoint=nowhere", "lanes=0"], "lanes=0 must be an integer of at least 1"),
        (["serve", "checkpoint=nowhere", "port=x"], "port=x must be an integer of 0 to 65535"),
        (["generate", "checkpoint=nowhere", "device=tpu"], "device=tpu must be one of cpu, cuda"),
        (
            ["generate", "top_p=x", "--fast"],
            "--fast is not a switch; switches: --json; checkpoint= is needed",
        ),
        (["logits", "config=no.json", "weights=w.npz", "ids=i.npy", "out=o.npy"], "no.json"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("config", b"{", "config.json: Expecting property name"),
        ("config", b"{}", "config.json: invalid model configuration:\n- missing key 'vocab_size'"),
        ("ids", b"1 2 3", "ids.npy is not an npy file"),
        ("ids", np.zeros((1, 3)), "ids.npy must hold integers (B, S), not float64 (1, 3)"),
        ("ids", np.zeros(3, dtype=int), "ids.npy must hold integers (B, S), not int64 (3,)"),
        ("ids", np.array([[5, 96]]), "ids 5..96 leave 0..95"),
        ("ids", np.array([[-1, 5]]), "ids -1..5 leave 0..95"),
        ("ids", np.zeros((1, 65), dtype=int), "65 tokens exceed max_position_embeddings 64"),
        ("positions", np.zeros((2, 3), dtype=int), "positions.npy has shape (2, 3), the ids have (1, 4)"),
        ("positions", np.array([[1, 2, 3, 4]]), "positions must start at 0"),
        ("positions", np.array([[0, 1, 3, 4]]), "each be 0 or one more than the one before"),
        ("weights", b"PK", "weights.npz cannot be read"),
        ("weights", {"model.norm.weight": np.ones(31)}, "missing: lm_head.weight"),
    ],
)
def test_wrong_files_are_named(
    key: str, content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = {"config": "json", "weights": "npz"}
    given = {
        name: tmp_path / f"{name}.{suffix.get(name, 'npy')}" for name in ("config", "weights", "ids", key)
    }
    shutil.copy(GOLDEN / "base.json", given["config"])
    shutil.copy(GOLDEN / "base.npz", given["weights"])
    np.save(given["ids"], np.zeros((1, 4), dtype=int))
    if isinstance(content, bytes):
        given[key].write_bytes(content)
    elif isinstance(content, dict):
        np.savez(given[key], **content)
    else:
        np.save(given[key], content)
    out = tmp_path / "out.npy"
    assert main(["logits", *[f"{name}={file}" for name, file in given.items()], f"out={out}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not out.exists()


def test_a_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"1234567890")
    with pytest.raises(ValueError, match=r"w\.safetensors cannot be read"):
        read_weights(file)
    with pytest.raises(ValueError, match=r"w\.bin: weights must be a \.npz or \.safetensors file"):
        read_weights(tmp_path / "w.bin")


def test_sizes_need_no_torch() -> None:
    code = (
        "import sys; from model.cli import main; main(['sizes', '--json']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint=(needed)" in text
    assert "max_new_tokens=128" in text
    assert main(["--help"]) == 0
    assert "logits" in capsys.readouterr().out
