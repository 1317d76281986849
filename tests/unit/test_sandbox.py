"""The sandbox against tests/unit/hostile.py: nothing happens outside, and every program ends."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from eval import sandbox
from eval.sandbox import MIB, Limits, Room, SandboxError, SandboxUnavailable, probe, run
from eval.seccomp import filter_program
from tests.unit.hostile import PROGRAMS, Program

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(wall=2, cpu=10, memory=256 * MIB, tmp_size=48 * MIB, file_size=24 * MIB, output=256 * 1024)
INTERPRETER = Path(sys.executable).resolve()
BIND = {} if INTERPRETER.is_relative_to("/usr") else {INTERPRETER.parents[1]: str(INTERPRETER.parents[1])}
MARK = "laneformer-hostile-program"


def why_not() -> str | None:
    """Why no room can be built here. A room that is built and does not hold is a failure, and no reason."""
    try:
        probe()
    except SandboxUnavailable as error:
        return None if "the trial ended" in str(error) else str(error)
    return None


needs_sandbox = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")


def python(code: str, limits: Limits = LIMITS) -> sandbox.Finished:
    return run([str(INTERPRETER), "-c", code, MARK], Room(bind=BIND), limits)


@dataclass
class Host:
    """What a program could reach outside, and whether it has."""

    file: Path
    server: socket.socket
    bystander: subprocess.Popen[bytes]

    def check(self) -> None:
        assert self.file.read_text() == "untouched"
        assert [entry.name for entry in self.file.parent.iterdir()] == [self.file.name]
        assert self.bystander.poll() is None
        with pytest.raises(BlockingIOError):
            self.server.accept()
        assert marked_processes() == []


def marked_processes() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if MARK.encode() in line and b"pytest" not in line:
                found.append(line.decode(errors="replace")[:100])
    return found


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    file = tmp_path / "host" / "file"
    file.parent.mkdir()
    file.write_text("untouched")
    for folder in (file, *file.parents):  # readable for all, so that it is the sandbox that hides it
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        with subprocess.Popen(["sleep", "600"]) as bystander:
            yield Host(file, server, bystander)
            bystander.kill()


@needs_sandbox
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_hostile_program(program: Program, host: Host) -> None:
    code = program.code
    for word, value in {
        "HOST_FILE": repr(str(host.file)),
        "HOST_PORT": str(host.server.getsockname()[1]),
        "HOST_PID": str(host.bystander.pid),
    }.items():
        code = code.replace(word, value)
    start = time.monotonic()
    finished = python(code)
    assert time.monotonic() - start < LIMITS.wall + 2
    assert finished.ended in program.ends, finished.stderr[-500:]
    assert b"ESCAPED" not in finished.stdout, finished.stdout
    assert b"SyntaxError" not in finished.stderr
    assert b"NameError" not in finished.stderr
    assert len(finished.stdout) <= LIMITS.output
    host.check()


@needs_sandbox
def test_the_suite_can_fail(host: Host) -> None:
    """Outside the sandbox the same programs do escape."""
    program = next(program for program in PROGRAMS if program.name == "host file read")
    code = program.code.replace("HOST_FILE", repr(str(host.file)))
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert b"ESCAPED" in outside.stdout


@needs_sandbox
def test_an_ordinary_program(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text("from the host")
    room = Room(
        files={"/in/a": b"contents"}, bind={given: "/elsewhere/given", **BIND}, environment={"WORD": "value"}
    )
    code = (
        "import os, sys\nprint(open('/in/a').read(), open('/elsewhere/given').read(), os.environ['WORD'])\n"
        "print(os.getcwd(), os.getuid() == 0, file=sys.stderr)\nopen('own', 'w').write('x')\nsys.exit(7)"
    )
    finished = run([str(INTERPRETER), "-c", code], room, LIMITS)
    assert (finished.ended, finished.code) == ("exit", 7)
    assert finished.stdout == b"contents from the host value\n"
    assert finished.stderr == b"/tmp False\n"


@needs_sandbox
def test_a_room_that_cannot_be_built_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="missing"):
        run(["true"], Room(bind={tmp_path / "missing": "/missing"}))


@needs_sandbox
def test_rooms_at_the_same_time_do_not_count_together() -> None:
    """Each forks nearly as many processes as one may have."""
    from concurrent.futures import ThreadPoolExecutor

    code = "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(1); os._exit(0)\nprint('all')"
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda _: python(code, replace(LIMITS, wall=20, memory=2048 * MIB)), range(4))
        )
    assert [result.stdout for result in results] == [b"all\n"] * 4


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="already unprivileged: every other test shows it")
def test_unprivileged() -> None:
    """A user without rights runs the same suite, with the system's Python, which that user can read."""
    system = shutil.which("python3", path="/usr/bin")
    version = system and subprocess.run([system, "-c", "import sys; print(sys.version_info >= (3, 11))"],
                                        capture_output=True, check=False).stdout  # fmt: skip
    if version != b"True\n":
        pytest.skip("there is no /usr/bin/python3 of at least 3.11")
    names = ("fork loop", "memory fill by many", "host file write", "network", "disk fill elsewhere",
             "namespaces and mounts of its own", "becoming root again", "raising its limits",
             "background child", "other processes' memory")  # fmt: skip
    chosen = {p.name: (p.code, p.ends) for p in PROGRAMS if p.name in names}
    assert len(chosen) == len(names)
    script = (
        "import os\nfrom eval.sandbox import *\nassert os.geteuid() == 65534\n"
        f"limits = {LIMITS!r}\nfor name, (code, ends) in {chosen!r}.items():\n"
        "    code = code.replace('HOST_FILE', repr('/etc/hostname')).replace('HOST_PORT', '1')\n"
        "    finished = run(['/usr/bin/python3', '-c', code], limits=limits)\n"
        "    assert finished.ended in ends, (name, finished)\n"
        "    assert b'ESCAPED' not in finished.stdout, (name, finished)\nprint('held')"
    )
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", system or "", "-c", script]
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )
    assert finished.stdout == "held\n", finished.stderr[-3000:]


def probe_afresh() -> None:
    probe.__wrapped__()


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "probe", probe_afresh)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bwrap is not installed[\s\S]*apt-get install bubblewrap"):
        run(["true"])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo bubblewrap 0.6.1", "0.8 or newer is needed"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit\necho "bwrap: No permissions" >&2; exit 1',
            "No permissions",
        ),
    ],
)
def test_a_bubblewrap_that_does_not_work(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for tool in ("bwrap", "setpriv", "prlimit", "choom"):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable, match=rf"{reason}[\s\S]*Ways out"):
        probe_afresh()


def test_a_room_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bubblewrap that runs the program without any room."""
    (tmp_path / "bwrap").write_text(
        '#!/bin/bash\n[ "$1" = --version ] && echo bubblewrap 0.9.0 && exit\n'
        'while [ "$1" != --json-status-fd ]; do shift; done\n'
        'echo \'{ "child-pid": \'$$\' }\' >&"$2"\necho \'{ "exit-code": 0 }\' >&"$2"\n'
        'while [ "$1" != sh ]; do shift; done\nexec "$@"\n'
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable, match="there is no system call filter"):
        probe_afresh()


def test_filter_of_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="no system call table for riscv64"):
        filter_program("riscv64")
    assert len(filter_program("aarch64")) % 8 == 0
    if platform.machine() == "x86_64":
        assert filter_program() == filter_program("x86_64") != filter_program("aarch64")
