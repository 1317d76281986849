"""A real Slurm on this machine: munged, slurmctld and one slurmd per virtual node, in a temporary directory.

Needs Debian's packages slurmctld, slurmd, slurm-client and munge (`make setup-slurm`); works as root and touches
nothing outside its directory. Every process is a child of the test session and is ended by its own id.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=5
ReturnToService=2
MinJobAge=600
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool/%n
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=128 RealMemory=64000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """What of Slurm is not installed here."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


def free_ports(count: int) -> int:
    """The first of `count` consecutive free TCP ports."""
    for first in range(21000 + os.getpid() % 5000, 60000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


class SlurmCluster:
    """Use as a context manager. `run` calls a Slurm client against it."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.nodes = folder, nodes
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        for name in [name for name in self.environment if name.startswith(("SLURM_JOB", "SBATCH_"))]:
            del self.environment[name]

    def __enter__(self) -> SlurmCluster:
        try:
            self._write_files()
            self._start_munge()
            self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for number in range(1, self.nodes + 1):
                self.start_node(f"n{number}")
            self.wait(lambda: self.idle_nodes() == self.nodes, 60, "nodes to come up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if "slurmctld" in self.processes and self.processes["slurmctld"].poll() is None:
            jobs = self.run("squeue", "-h", "-o", "%A", check=False).split()
            if jobs:
                self.run("scancel", "--signal=KILL", *jobs, check=False)
                self.run("scancel", *jobs, check=False)
                deadline = time.monotonic() + 20
                while self.run("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
                    time.sleep(0.2)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.job_processes():  # a node's that was killed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- bringing it up

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("state", "spool", "dev", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(8):
            (folder / "dev" / f"nvidia{number}").touch()
        first = free_ports(self.nodes + 1)
        text = SLURM_CONF.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            nodes=self.nodes,
            controller_port=first,
            ports=f"{first + 1}-{first + self.nodes}",
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-7]\n")
        (folder / "cgroup.conf").touch()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in names.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *files)
        self.wait((self.folder / "munge.socket").exists, 20, "munged")

    def _start(self, program: str, *words: str, name: str | None = None) -> None:
        name = name or program
        command = [shutil.which(program, path=PATH) or program, *words]
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment
            )

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), name=name)

    def kill_node(self, name: str) -> None:
        """End a node as a power failure would: its daemon, the daemon's helpers, and the tasks."""
        tasks = self.job_processes(node=name)
        helpers = {
            parent for pid in tasks if (parent := parent_of(pid)) and "slurmstepd" in command_of(parent)
        }
        for pid in [self.processes[name].pid, *helpers, *tasks]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[name].wait()

    def job_processes(self, job: str | None = None, node: str | None = None) -> list[int]:
        """Processes that this Slurm's jobs have started, by what it put into their environment."""
        wanted = {f"SLURM_CONF={self.folder}/slurm.conf"}
        wanted |= {f"SLURM_JOB_ID={job}"} if job else set()
        wanted |= {f"SLURMD_NODENAME={node}"} if node else set()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = set(file.read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                continue
            if wanted <= variables and any(v.startswith("SLURM_JOB_ID=") for v in variables):
                found.append(int(file.parent.name))
        return found

    # --- using it

    def run(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        result = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=120
        )
        if check and result.returncode:
            raise AssertionError(
                f"{' '.join(command)} -> {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result.stdout

    def idle_nodes(self) -> int:
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return sum(state == "idle" for state in states)

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows about a job: JobState, ExitCode, Restarts, NodeList, …"""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, ready: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                logs = [
                    f"--- {log.name}\n{log.read_text()[-1500:]}" for log in (self.folder / "log").iterdir()
                ]
                raise AssertionError(f"waited {seconds} s for {what}\n" + "\n".join(logs))
            time.sleep(0.1)

    def wait_state(self, job: str, states: Sequence[str], seconds: float, log: Path | None = None) -> str:
        """Wait until the job is in one of `states`; shows the job's log where it does not get there."""
        try:
            self.wait(lambda: self.job(job)["JobState"] in states, seconds, f"job {job} to be {states}")
        except AssertionError as error:
            text = log.read_text()[-6000:] if log and log.exists() else "no log"
            raise AssertionError(f"{self.job(job)}\n{text}\n{error}") from error
        return self.job(job)["JobState"]


def parent_of(pid: int) -> int | None:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return None


def command_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""
