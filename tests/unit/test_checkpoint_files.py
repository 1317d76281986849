"""`damage` finds every way in which a checkpoint's files can differ from its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from train.checkpoint import damage


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-5"
    folder.mkdir()
    files = {}
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "model.json"):
        content = name.encode() * 100
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": 5, "files": files}))
    return folder


def flip_a_bit(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[200] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: missing"),
    "cut off": (lambda f: (f / ".metadata").write_bytes(b"x"), ".metadata: 1 bytes instead of 900"),
    "one bit": (flip_a_bit, "__1_0.distcp: SHA-256 differs"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: unreadable"),
    "manifest cut off": (
        lambda f: (f / "manifest.json").write_text('{"files": '),
        "manifest.json: unreadable",
    ),
    "manifest of another kind": (
        lambda f: (f / "manifest.json").write_text("[1]"),
        "manifest.json: unreadable",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_named(kind: str, checkpoint: Path) -> None:
    assert damage(checkpoint) == []
    do, message = DAMAGES[kind]
    do(checkpoint)
    (problem,) = damage(checkpoint)
    assert message in problem
    assert str(checkpoint) in problem


def test_ranks_share_the_files_without_leaving_one_out(checkpoint: Path) -> None:
    for file in json.loads((checkpoint / "manifest.json").read_text())["files"]:
        (checkpoint / file).unlink()
    found = [problem for rank in range(3) for problem in damage(checkpoint, rank, 3)]
    assert sorted(found) == sorted(damage(checkpoint))
    assert len(found) == 4
