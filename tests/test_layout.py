"""The import rules of CONTRIBUTING.md, and that each package name resolves to this repository."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("model", "data_mixtures", "train", "eval", "launch")
MAY_IMPORT = {
    "model": set(),
    "data_mixtures": set(),
    "train": {"model", "data_mixtures"},
    "eval": {"model", "data_mixtures.tokenizer", "data_mixtures.loader"},
    "launch": {"train.config", "train.run_dir", "train.views", "train.wandb_mode"},
}
MAY_USE_TORCHTITAN = {
    "model/blocks.py",
    "model/laneformer.py",
    "model/parallelize.py",
    "model/titan_spec.py",
    "train/checkpoint.py",
    "train/device.py",
    "train/loader.py",
    "train/loss.py",
    "train/metrics.py",
    "train/profiling.py",
    "train/session.py",
    "train/titan.py",
    "train/trainer.py",
    "train/validate.py",
    "train/watchdog.py",
}
NO_TORCH = {
    "model/config.py",
    "data_mixtures/mixture.py",
    "data_mixtures/sources.py",
    "data_mixtures/tokenizer.py",
    "train/config.py",
    "train/run_dir.py",
    "train/views.py",
    "train/wandb_mode.py",
    "train/cli.py",
    *(str(file.relative_to(ROOT)) for file in (ROOT / "launch").glob("*.py")),
}
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def imported(file: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Files that exports ship import each other so, because transformers copies them to a package of its own.
            assert node.level == 0 or file.parent.name == "hf_files", f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden(file: Path) -> list[str]:
    """What `file` imports against the rules."""
    relative = str(file.relative_to(ROOT))
    own = relative.split("/")[0]
    bad = []
    for name in imported(file):
        package = name.split(".")[0]
        allowed = {".".join(name.split(".")[:depth]) for depth in (1, 2)} & MAY_IMPORT[own]
        if package in PACKAGES and package != own and not allowed:
            bad.append(f"{relative} imports {name}")
        if name in PACKAGES:
            bad.append(f"{relative} says `import {name}`: write `from {name}.… import …`")
        if package == "torchtitan" and relative not in MAY_USE_TORCHTITAN:
            bad.append(f"{relative} imports {name}")
    if relative in NO_TORCH:
        bad += [f"{relative} imports {n}" for n in imported(file, True) if n.split(".")[0] == "torch"]
    return bad


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_import_rules(file: Path) -> None:
    assert forbidden(file) == []


def test_rules_catch_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model" / "bad.py"
    file.parent.mkdir()
    file.write_text("import torchtitan\nfrom train.config import RunConfig\nimport eval\n")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert len(forbidden(file)) == 4


@pytest.mark.parametrize("package", [p for p in PACKAGES if (ROOT / p).exists()])
def test_packages_are_ours(package: str) -> None:
    spec = importlib.import_module(package)
    assert spec.__file__ is not None
    assert Path(spec.__file__).parent == ROOT / package


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_file_length(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 450
