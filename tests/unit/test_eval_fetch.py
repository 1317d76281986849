"""Fetching the task files over file:// URLs: layouts, checksums, what is there already."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from eval import fetch
from eval.cli import main
from eval.core_tasks import CORE
from eval.fetch import FILES, fetch_core

TEXT = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'


@pytest.fixture
def two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only copa, whose hash is known, and squad, which is known by its number of items."""
    files = {
        "copa": {"folder": "commonsense_reasoning", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()},
        "squad": {"folder": "reading_comprehension", "sha256": None},
    }
    monkeypatch.setattr(fetch, "FILES", files)


def test_the_list_covers_core() -> None:
    assert set(FILES) == {task.file for task in CORE.values()}
    assert [name for name, entry in FILES.items() if entry["sha256"] is None] == ["squad"]


@pytest.mark.usefixtures("two_files")
def test_either_layout_and_once(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "commonsense_reasoning").mkdir(parents=True)
    (source / "commonsense_reasoning" / "copa.jsonl").write_text(TEXT)
    (source / "squad.jsonl.gz").write_bytes(gzip.compress(b'{"context": "a", "continuation": "b"}\n' * 10570))
    said: list[str] = []
    assert fetch_core(source.as_uri(), target, said.append) == 0
    assert (target / "copa.jsonl").read_text() == TEXT
    assert (target / "squad.jsonl").read_text().count("\n") == 10570
    assert fetch_core("file:///nowhere", target, said.append) == 0
    assert sum("fetched" in line for line in said) == 2


@pytest.mark.usefixtures("two_files")
def test_wrong_files_are_not_kept(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "copa.jsonl").write_text(TEXT + "\n")
    (source / "squad.jsonl").write_text("{}\n" * 1000)
    said: list[str] = []
    assert fetch_core(source.as_uri(), target, said.append) == 2
    assert any("not kept: its SHA-256 is" in line for line in said)
    assert any("not kept: it has 1000 items, not 10570" in line for line in said)
    assert not target.exists() or not list(target.iterdir())


@pytest.mark.usefixtures("two_files")
def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, text in ((source, TEXT), (target, TEXT[:10])):
        folder.mkdir()
        (folder / "copa.jsonl").write_text(text)
    fetch_core(source.as_uri(), target, print)
    assert (target / "copa.jsonl").read_text() == TEXT


@pytest.mark.usefixtures("two_files")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "core", f"data={tmp_path / 'target'}", f"source={tmp_path.as_uri()}"]) == 1
    assert "copa.jsonl: not fetched" in capsys.readouterr().out
    assert main(["fetch", "mmlu", f"data={tmp_path}"]) == 2
    assert "core or code can be fetched" in capsys.readouterr().err
