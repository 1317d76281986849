from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.submit import ROOT
from tests.slurm.cluster import SlurmCluster, missing_programs
from tests.tiny import tiny_words
from train.run_dir import RunDir, read_lines

STEPS = 60


@dataclass
class Site:
    """The cluster, the prepared data, and how a user of it submits."""

    slurm: SlurmCluster
    data: Path
    runs: Path

    def words(self, name: str, *overrides: str) -> list[str]:
        """A run of 60 steps on two nodes, one rank each."""
        words = [word for word in tiny_words(self.data, self.runs, steps=STEPS) if word != "name=tiny"]
        return [*words, f"name={name}", "cluster.nodes=2", "train.local_batch_size=1", *overrides]

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.runs / name)

    def launch(self, *words: str) -> str:
        return self.slurm.run(str(ROOT / ".venv/bin/python"), "-m", "launch", *words, cwd=ROOT)

    def submit(self, name: str, *overrides: str, options: tuple[str, ...] = ()) -> str:
        """`python -m launch submit phase1 …`; returns the job's id."""
        return (
            self.launch("submit", "phase1", *self.words(name, *overrides), *options)
            .split("job ")[1]
            .split()[0]
        )

    def end(self, job: str, state: str, seconds: float = 150) -> dict[str, str]:
        """Wait for the job's last state, which must be `state`."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "BOOT_FAIL", "PREEMPTED")
        deadline = time.monotonic() + seconds
        while (fields := self.slurm.job(job))["JobState"] not in final:
            assert time.monotonic() < deadline, f"{fields}\n{self.logs()}"
            time.sleep(0.2)
        assert fields["JobState"] == state, f"{fields}\n{self.logs()}"
        return fields

    def logs(self) -> str:
        """The jobs' logs and the ends of the ranks' output, of every run."""
        files = [*self.runs.glob("*/logs/*.*"), *self.runs.glob("*/logs/*/output-*.log")]
        return "\n".join(f"--- {file}\n{file.read_text()[-1500:]}" for file in sorted(files))

    def wait_step(self, name: str, step: int, seconds: float = 120) -> None:
        """Wait until the run has logged a step."""
        self.wait(lambda: any(row["step"] >= step for row in read_lines(self.run_dir(name).metrics)), seconds)

    def wait(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def decisions(self, name: str) -> list[str]:
        lines = read_lines(self.run_dir(name).attempts)
        return [line["action"] for line in lines if line["event"] == "decision"]

    def outcomes(self, name: str) -> list[str]:
        return [line["outcome"] for line in read_lines(self.run_dir(name).attempts) if line["event"] == "end"]


@pytest.fixture(scope="session")
def site(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A Slurm of three nodes."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"Slurm is not installed here ({', '.join(missing)} missing): make setup-system")
    # Sockets have short paths only, and pytest's can be long.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder), 3) as slurm:
        yield Site(slurm, tiny_data, tmp_path_factory.mktemp("runs"))
