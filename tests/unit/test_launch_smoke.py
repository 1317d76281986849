"""The smoke run with and without bubblewrap: its stages stubbed, its report real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import smoke
from tests.unit.launch_fixtures import write_run

HINT = "code evaluation was not run: bubblewrap is missing (Debian: apt-get install bubblewrap)"


@pytest.mark.parametrize("bubblewrap", [True, False])
def test_without_bubblewrap_code_is_reported_as_not_run(
    bubblewrap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "smoke"
    for phase in smoke.PHASES:
        write_run(folder, name=phase)
    programs = tmp_path / "bin"
    programs.mkdir()
    if bubblewrap:
        (programs / "bwrap").touch(0o755)
    monkeypatch.setenv("PATH", str(programs))
    ran: list[smoke.Stage] = []

    def run_stage(stage: smoke.Stage, stages_file: Path) -> int:
        ran.append(stage)
        smoke.append_line(stages_file, {"name": stage.name, "seconds": 1.0})
        return 0

    def sample(phase: str, title: str, prompt: str) -> dict[str, Any]:
        return {"title": title, "prompt": prompt, "text": "text", "end_reason": "length"}

    for name, value in {"ROOT": tmp_path, "FOLDER": folder, "run_stage": run_stage, "sample": sample}.items():
        monkeypatch.setattr(smoke, name, value)
    assert smoke.smoke(resume=True) == 0
    scored = [stage.words for stage in ran if stage.module == "eval" and stage.words[0] == "score"]
    assert len(scored) == 2
    assert all(words[-1].endswith(",code") == bubblewrap for words in scored)
    assert (f"note: {HINT}" in capsys.readouterr().out) == (not bubblewrap)
    for report in ("report.md", "report.html"):
        assert (HINT in (folder / report).read_text()) == (not bubblewrap)
