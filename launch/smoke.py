"""The smoke run: each stage is the command a user would type, run one after another and timed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.report import write_report
from train.run_dir import RunDir, append_line, read_lines

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "smoke"
PHASES = ("phase1", "phase2", "sft")


@dataclass(frozen=True)
class Stage:
    name: str
    module: str
    words: tuple[str, ...]

    def command(self) -> list[str]:
        return [sys.executable, "-m", self.module, *self.words]


STAGES = (
    Stage("data", "data_mixtures", ("smoke", "root=data/smoke")),
    *(Stage(phase, "train", (f"experiment=smoke_{phase}",)) for phase in PHASES),
)
# CORE's task files, where `python -m eval fetch core` or the tests' data has put them; else the built-in tasks serve.
CORE_FOLDERS = (ROOT / "data" / "core", ROOT.parent / "shared" / "data" / "core")
NO_SANDBOX = "code evaluation was not run: bubblewrap is missing (Debian: apt-get install bubblewrap)"
# What to ask of which phase's last checkpoint. The chat turns are written as the chat template writes them.
PROMPTS = (
    ("phase2", "Code after phase 2", "def read(self, size=-1):\n"),
    ("phase2", "Reasoning after phase 2", "Question: "),
    ("sft", "Chat after SFT", "<|user|>\nWho are you?\n<|assistant|>\n"),
    ("sft", "Chat after SFT", "<|user|>\nWhat is 7 + 5?\n<|assistant|>\n"),
)


def smoke(resume: bool) -> int:
    """Run every stage, sample, and write the report. Returns the exit status."""
    if FOLDER.exists() and not resume:
        shutil.rmtree(FOLDER)
    stages_file = FOLDER / "stages.jsonl"
    for make in (lambda: STAGES, evaluations):  # evaluations name checkpoints that training has yet to write
        for stage in make():
            status = run_stage(stage, stages_file)
            if status:
                print(f"error: stage {stage.name} exited with status {status}", file=sys.stderr)
                return status
    begin = time.perf_counter()
    samples = [sample(*prompt) for prompt in PROMPTS]
    append_line(stages_file, {"name": "samples", "seconds": time.perf_counter() - begin})
    for item in samples:
        print(f"\n--- {item['title']} ({item['end_reason']})\n{item['prompt']}▸{item['text']}")
    runs = [(phase, FOLDER / phase) for phase in PHASES]
    notes = [] if shutil.which("bwrap") else [NO_SANDBOX]
    report = write_report(FOLDER, runs, samples, list(read_lines(stages_file)), notes)
    for note in notes:
        print(f"note: {note}")
    print(f"\nReport: {report.relative_to(ROOT)} (and .md beside it)")
    return 0


def run_stage(stage: Stage, stages_file: Path) -> int:
    print(f"\n=== {stage.name}: python -m {stage.module} {' '.join(stage.words)}", flush=True)
    begin = time.perf_counter()
    status = subprocess.run(stage.command(), cwd=ROOT, check=False).returncode
    append_line(stages_file, {"name": stage.name, "seconds": time.perf_counter() - begin})
    return status


def evaluations() -> list[Stage]:
    """Score the last checkpoints after the shift and after SFT: CORE capped, or the built-in tasks, and code."""
    core = next((folder for folder in CORE_FOLDERS if folder.is_dir()), None)
    stages = []
    for phase, style in (("phase2", "base"), ("sft", "chat")):
        checkpoint = RunDir(FOLDER / phase).complete_checkpoints()[-1][1].relative_to(ROOT)
        words = [f"checkpoint={checkpoint}"]
        if core and phase == "sft":
            suites, words = ["core"], [*words, f"data={core}", "limit=11"]
        else:
            suites = ["builtin"]
        if shutil.which("bwrap"):
            suites.append("code")
            words += ["code_benchmarks=builtin", f"code_style={style}", "code_tokens=64"]
        stages.append(Stage(f"evaluation of {phase}", "eval", ("score", *words, f"suite={','.join(suites)}")))
    runs = [str((FOLDER / phase).relative_to(ROOT)) for phase in PHASES]
    return [*stages, Stage("evaluation report", "eval", ("report", *runs))]


def sample(phase: str, title: str, prompt: str) -> dict[str, Any]:
    """Greedy text from the last checkpoint of a phase."""
    checkpoint = RunDir(FOLDER / phase).complete_checkpoints()[-1][1]
    options = [f"checkpoint={checkpoint}", f"prompt={prompt}", "max_new_tokens=80", "temperature=0", "--json"]
    command = [sys.executable, "-m", "model", "generate", *options]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"title": title, **json.loads(output)}
