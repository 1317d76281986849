"""Run a program that may do anything, so that nothing happens outside and it always ends.

bubblewrap builds the room: its own process, network, IPC and host-name spaces, a read-only system (/usr and
what the caller names), no other file of the host, a private /tmp of limited size, no capabilities. Then

* `prlimit` limits each process (address space, CPU time, file size, open files) and the number of processes;
* a system call filter (eval/seccomp.py) closes the ways around these limits;
* this module limits the wall-clock time, the output and the memory of all processes together, and ends the
  room's first process, with which the kernel ends every other one before `run` returns.

The kernel does not count processes of the superuser against a limit, so as root bubblewrap sets up the room with
root's rights and `setpriv` then takes a user id of no one for the program. Unprivileged, the room lies in a user
namespace.

Where this cannot be had `SandboxUnavailable` says why and what to do. Nothing is ever run without it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from eval.seccomp import filter_program

MIB = 2**20
NEWEST_NEEDED = (0, 8)  # bubblewrap's --size, which limits /tmp
TOOLS = ("bwrap", "setpriv", "prlimit", "choom")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
FIRST_UID, UIDS = 20000, 40000  # user ids for root's sandboxes: each its own, so that they count apart
LOOK_EVERY = 0.05  # seconds between two looks at the memory in use
LOOK_SHARE = 0.05  # at most this share of the time is spent on looking
CHUNK = 2**16

WAYS_OUT = """Ways out:
  * install the tools: apt-get install bubblewrap util-linux (bubblewrap 0.8 or newer)
  * allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian),
    kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04), user.max_user_namespaces=15000 (RHEL)
  * in a container: run it with --privileged, or with --cap-add SYS_ADMIN --security-opt seccomp=unconfined
    --security-opt apparmor=unconfined
  * evaluate on another host: the checkpoint directory is all that is needed
Untrusted code is not run without the sandbox."""


class SandboxUnavailable(RuntimeError):
    """This host cannot run the sandbox; the message gives the reason and the ways out."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the sandbox cannot run here: {reason}\n{WAYS_OUT}")


class SandboxError(RuntimeError):
    """One room could not be built (a path to bind is missing, say): nothing was run in it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use. Times in seconds, sizes in bytes."""

    wall: float = 30.0
    cpu: int = 30
    """For each process."""
    memory: int = 2048 * MIB
    """Resident, all processes together; twice this is the address space of each."""
    processes: int = 64
    file_size: int = 64 * MIB
    tmp_size: int = 256 * MIB
    """Of /tmp; /dev/shm has a quarter of it."""
    open_files: int = 256
    output: int = MIB
    """Of stdout and stderr each."""


@dataclass(frozen=True)
class Finished:
    """How a program ended: by itself, or over a limit of the room. `code` is -1 where a limit ended it."""

    ended: Literal["exit", "wall", "memory", "output"]
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float


@dataclass(frozen=True)
class Room:
    """What a program finds besides the system."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute path inside → contents, read-only."""
    bind: Mapping[Path, str] = field(default_factory=dict)
    """Path of the host → absolute path inside, read-only."""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


def run(command: Sequence[str], room: Room | None = None, limits: Limits | None = None) -> Finished:
    """Run `command` in a fresh room; its working directory is the private /tmp.

    When this returns every process of the room has ended. Safe to call from several threads.
    Raises SandboxUnavailable, or SandboxError when this room cannot be built.
    """
    probe()
    return _run(command, room or Room(), limits or Limits())


@functools.cache
def probe() -> None:
    """Check once per process, by trying, that the sandbox runs here and holds. Raises SandboxUnavailable."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise SandboxUnavailable(f"{tool} is not installed")
    text = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < NEWEST_NEEDED:
        raise SandboxUnavailable(
            f"bubblewrap 0.8 or newer is needed, and this is {text.strip() or 'unknown'}"
        )
    try:
        filter_program()
    except ValueError as error:
        raise SandboxUnavailable(str(error)) from error
    seen = "cat /proc/self/status /proc/self/limits && tail -n +3 /proc/net/dev && id -u && ls /"
    try:
        finished = _run(["sh", "-c", seen], Room(), Limits(wall=20))
    except SandboxError as error:
        raise SandboxUnavailable(str(error)) from error
    text = finished.stdout.decode(errors="replace")
    holds = {
        "capabilities are not dropped": re.search(r"^CapEff:\s*0+$", text, re.M),
        "there is no system call filter": re.search(r"^Seccomp:\s*2$", text, re.M),
        "the number of processes is not limited": re.search(r"^Max processes\s+64\s+64 ", text, re.M),
        "there is a network": not re.search(r"^\s*(?!lo:)\w+:(\s+\d+){8}", text, re.M),
        "files of the host are visible": not re.search(r"^(home|root|srv|var)$", text, re.M),
        "the program runs as root": os.geteuid() != 0 or not re.search(r"^0$", text, re.M),
    }
    problems = [problem for problem, held in holds.items() if not held]
    if finished.code != 0 or problems:
        detail = finished.stderr.decode(errors="replace").strip()
        raise SandboxUnavailable("; ".join([*problems, f"the trial ended with {finished.code} {detail}"]))


_next_uid = itertools.count(os.getpid() * 64)


def _arguments(room: Room, limits: Limits, status: int, stack: ExitStack) -> tuple[list[str], list[int]]:
    """bwrap's command line up to the program, and the file descriptors it needs."""
    descriptors = [status, _memory_file("seccomp", filter_program(), stack)]
    # When the host itself runs out of memory, it shall end what is in the room and not what stands beside it.
    words = ["choom", "-n", "800", "--", "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for name in SYSTEM_FILES:
        words += ["--ro-bind-try", name, name]
    # The room's first process is bubblewrap itself, without the filter, and unprivileged of the same user:
    # what /proc offers to change it is covered.
    words += ["--proc", "/proc", "--size", "4096", "--tmpfs", "/proc/1", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(limits.tmp_size // 4), "--tmpfs", "/dev/shm"]
    words += ["--perms", "1777", "--size", str(limits.tmp_size), "--tmpfs", "/tmp"]
    # bwrap would make the folders above a file for their owner alone.
    above = {folder for inside in [*room.bind.values(), *room.files] for folder in Path(inside).parents}
    for folder in sorted(above - {Path("/"), Path("/tmp")}):
        words += ["--perms", "0755", "--dir", str(folder)]
    for outside, inside in room.bind.items():
        words += ["--ro-bind", str(outside), inside]
    for inside, contents in room.files.items():
        descriptors.append(_memory_file(inside, contents, stack))
        words += ["--perms", "0444", "--ro-bind-data", str(descriptors[-1]), inside]
    # bwrap keeps /dev and / on file systems of its own, without a size: nobody may write to them.
    words += ["--remount-ro", "/proc/1", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in (ENVIRONMENT | dict(room.environment)).items():
        words += ["--setenv", name, value]
    words += ["--json-status-fd", str(status), "--seccomp", str(descriptors[1])]
    if os.geteuid() == 0:
        uid = str(FIRST_UID + next(_next_uid) % UIDS)
        words += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            words += ["--cap-add", capability]
        words += ["--", "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
        words += ["--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    else:
        words += ["--unshare-user", "--cap-drop", "ALL", "--"]
    words += ["prlimit", f"--nproc={limits.processes}", f"--as={2 * limits.memory}", "--core=0"]
    words += [f"--fsize={limits.file_size}", f"--nofile={limits.open_files}", f"--msgqueue={CHUNK}"]
    words += [f"--cpu={limits.cpu}:{limits.cpu + 1}", "--memlock=0", "--"]
    return words, descriptors


def _memory_file(name: str, contents: bytes, stack: ExitStack) -> int:
    """A file descriptor to read `contents` from, closed by the stack."""
    descriptor = os.memfd_create(name[-200:])
    stack.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(contents)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _run(command: Sequence[str], room: Room, limits: Limits) -> Finished:
    start = time.monotonic()
    with ExitStack() as stack:
        status_read, status_write = os.pipe()
        status = stack.enter_context(os.fdopen(status_read, "rb"))
        with ExitStack() as until_started:
            until_started.callback(os.close, status_write)
            stdin = _memory_file("stdin", room.stdin, until_started)
            words, descriptors = _arguments(room, limits, status_write, until_started)
            process = subprocess.Popen(
                [*words, *command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {process.stdout: bytearray(), process.stderr: bytearray()}
        first = None
        with process, _ended(process):
            line = status.readline()
            if line:
                first = stack.enter_context(_first_process(json.loads(line)["child-pid"]))
            ended = _watch(process, streams, first, start + limits.wall, limits)
            if ended != "exit":
                _kill(process, first)
            code = process.wait()
            if first is not None:
                first.wait()
        stdout, stderr = (bytes(kept[: limits.output]) for kept in streams.values())
        # bwrap reports an exit code only of a program that it could start.
        if ended == "exit" and b"exit-code" not in status.read():
            message = stderr.decode(errors="replace").strip()
            raise SandboxError(message or f"bubblewrap ended with {code}")
    return Finished(ended, code if ended == "exit" else -1, stdout, stderr, seconds=time.monotonic() - start)


class _First:
    """The room's first process, as the host sees it: when it has ended, so has every other one."""

    def __init__(self, pid: int, handle: int | None) -> None:
        self.pid = pid
        self.handle = handle

    def kill(self) -> None:
        if self.handle is not None:
            try:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            except ProcessLookupError:
                return

    def wait(self) -> None:
        if self.handle is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.handle, selectors.EVENT_READ)
                selector.select()


@contextmanager
def _first_process(pid: int) -> Iterator[_First]:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # it has already ended
        handle = None
    try:
        yield _First(pid, handle)
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens inside (an interrupt, say), the room is gone afterwards."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()


def _kill(process: subprocess.Popen[bytes], first: _First | None) -> None:
    if first is not None:
        first.kill()
    process.kill()


def _watch(
    process: subprocess.Popen[bytes],
    streams: dict[IO[bytes], bytearray],
    first: _First | None,
    deadline: float,
    limits: Limits,
) -> Literal["exit", "wall", "memory", "output"]:
    """Collect the output until the program has ended or a limit is reached; says which."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        look = time.monotonic() + LOOK_EVERY
        while selector.get_map():
            now = time.monotonic()
            if now >= deadline:
                return "wall"
            if now >= look and first is not None:
                if resident(first.pid) > limits.memory:
                    return "memory"
                spent = time.monotonic() - now
                look = time.monotonic() + max(LOOK_EVERY, spent / LOOK_SHARE)
            for key, _ in selector.select(min(deadline, look) - now):
                stream = key.fileobj
                assert not isinstance(stream, int)
                part = os.read(key.fd, CHUNK)
                if not part:
                    selector.unregister(stream)
                streams[stream] += part  # type: ignore[index]
                if len(streams[stream]) > limits.output:  # type: ignore[index]
                    return "output"
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "wall"
    return "exit"


def resident(ancestor: int) -> int:
    """Resident bytes of a process and all its descendants, pages they share counted for each."""
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may hold anything; the fields after it are plain.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(entry.name)] = int(fields[1])
        pages[int(entry.name)] = int(fields[21])
    total = 0
    for pid in pages:
        seen = pid
        while seen and seen != ancestor:
            seen = parents.get(seen, 0)
        if seen == ancestor:
            total += pages[pid]
    return total * os.sysconf("SC_PAGE_SIZE")
