"""Programs that try to get out of the sandbox, to use it up, or not to end.

A program prints ESCAPED when it has reached something that it must not reach. HOST_FILE, HOST_PORT and HOST_PID
stand for a file, a listening port and a process of the host. `ends` is how the room has to end (several where
the order of events decides).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    name: str
    code: str
    ends: tuple[str, ...] = ("exit",)


TRY_WRITE = """
import os
def attempt(write):
    try:
        write()
        print("ESCAPED", write)
    except (OSError, ValueError, AttributeError) as error:
        print(type(error).__name__)
"""

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, result, os.strerror(ctypes.get_errno()))
    return result
"""

PROGRAMS = [
    Program(
        "fork loop",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("wall", "memory"),
    ),
    Program(
        "fork loop in new sessions",
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
        ("wall", "memory"),
    ),
    Program(
        "thread loop",
        "import threading, time\nstarted = 0\ntry:\n"
        "    while True:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        started += 1\nexcept RuntimeError:\n    print('ESCAPED' if started > 64 else started)\n"
        "    import os; os._exit(1)",
    ),
    Program("memory fill", "kept = []\nwhile True: kept.append(b'x' * 10**7)", ("memory", "exit")),
    Program(
        "memory fill by many",
        "import os\nfor _ in range(4): os.fork()\nkept = []\n"
        "while True:\n    try: kept.append(b'x' * 10**6)\n    except MemoryError: pass",
        ("memory",),
    ),
    Program(
        "memory fill in one allocation",
        "import mmap\ntry:\n    mmap.mmap(-1, 1 << 40)\n    print('ESCAPED')\nexcept (OSError, MemoryError): pass",
    ),
    Program(
        "memory that no process holds",
        CALL
        + "kept = []\nif call('memfd_create', b'x', 0) >= 0 or call('shmget', 0, 1 << 20, 0o1777) >= 0:\n"
        "    print('ESCAPED')",
    ),
    Program(
        "disk fill, one file",
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwith open('/tmp/big', 'wb') as f:\n"
        "    try:\n        while True: f.write(b'x' * 10**6)\n    except OSError: pass\n"
        "print('ESCAPED' if os.path.getsize('/tmp/big') > 100 << 20 else 'full')",
    ),
    Program(
        "disk fill, many files",
        "import os\ntry:\n    for n in range(10**6):\n"
        "        with open(f'/tmp/{n}', 'wb') as f: f.write(b'x' * 10**6)\n"
        "except OSError: pass\nfree = os.statvfs('/tmp')\n"
        "print('ESCAPED' if free.f_blocks * free.f_frsize > 100 << 20 else 'full')",
    ),
    Program(
        "disk fill elsewhere",
        TRY_WRITE
        + "for folder in ('/', '/dev', '/in', '/proc', '/usr', '/usr/local', '/usr/lib', '/var', '/etc', '/root'):\n"
        "    attempt(lambda: open(folder + '/ESCAPED', 'w').write('x'))\n"
        "shm = os.statvfs('/dev/shm')\nprint('ESCAPED' if shm.f_blocks * shm.f_frsize > 100 << 20 else 'small')",
    ),
    Program(
        "host file write",
        TRY_WRITE + "import io, pathlib, shutil\nattempt(lambda: open(HOST_FILE, 'w').write('x'))\n"
        "attempt(lambda: io.open(HOST_FILE, 'a').write('x'))\n"
        "attempt(lambda: os.write(os.open(HOST_FILE, os.O_WRONLY), b'x'))\n"
        "attempt(lambda: pathlib.Path(HOST_FILE).write_text('x'))\nattempt(lambda: os.unlink(HOST_FILE))\n"
        "attempt(lambda: os.rename(HOST_FILE, HOST_FILE + 'x'))\nattempt(lambda: os.truncate(HOST_FILE, 0))\n"
        "attempt(lambda: shutil.rmtree(os.path.dirname(HOST_FILE)))",
    ),
    Program(
        "host file write through /proc",
        TRY_WRITE + "for pid in ['self', *filter(str.isdigit, os.listdir('/proc'))]:\n"
        "    for way in ('root', 'cwd'):\n"
        "        attempt(lambda: open(f'/proc/{pid}/{way}' + HOST_FILE, 'w').write('x'))",
    ),
    Program(
        "host file write by a shell",
        "import subprocess\nsubprocess.run(['sh', '-c', 'echo x > ' + HOST_FILE + '; rm -rf / 2>/dev/null'])",
    ),
    Program(
        "host file read",
        TRY_WRITE
        + "for path in (HOST_FILE, '/etc/passwd', '/etc/shadow', '/etc/hostname', '/root/.bashrc', '/proc/kcore',\n"
        "             '/proc/1/environ', '/proc/1/root' + HOST_FILE, '/dev/mem', '/dev/sda', '/dev/vda'):\n"
        "    attempt(lambda: open(path, 'rb').read(1) or print('empty'))",
    ),
    Program(
        "breaking out of the working folder",
        TRY_WRITE + "os.symlink('/', '/tmp/link')\n"
        "for path in ('/tmp/link' + HOST_FILE, '../' * 20 + HOST_FILE[1:], '/proc/self/cwd/../' + HOST_FILE):\n"
        "    attempt(lambda: open(path).read())\nattempt(lambda: os.chroot('/tmp'))",
    ),
    Program(
        "inherited file descriptors",
        TRY_WRITE + "for fd in range(3, 256):\n    attempt(lambda: os.fchdir(fd))\n"
        "    attempt(lambda: os.write(fd, b'x'))\n    attempt(lambda: os.read(fd, 1))",
    ),
    Program(
        "network",
        TRY_WRITE + "import socket\n"
        "for address in (('127.0.0.1', HOST_PORT), ('1.1.1.1', 53), ('10.0.0.1', 80), ('169.254.169.254', 80)):\n"
        "    attempt(lambda: socket.create_connection(address, timeout=1))\n"
        "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)))\n"
        "attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))\n"
        "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))\n"
        "attempt(lambda: socket.getaddrinfo('example.org', 80))\n"
        "attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0sandbox-test-HOST_PORT'))",
    ),
    Program(
        "signals to every process",
        "import os, signal\nfor pid in [HOST_PID, *range(2, 70000)]:\n    if pid == os.getpid(): continue\n"
        "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
        "try: os.kill(1, signal.SIGKILL)\nexcept OSError: pass\nos.kill(-1, signal.SIGKILL)",
    ),
    Program(
        "other processes' memory",
        TRY_WRITE + CALL + "attempt(lambda: open('/proc/1/mem', 'r+b', 0))\n"
        "attempt(lambda: open('/proc/1/mem', 'rb', 0))\nif call('ptrace', 16, 1, 0, 0) == 0: print('ESCAPED')",
    ),
    Program(
        "namespaces and mounts of its own",
        CALL + "if call('unshare', 0x10000000) == 0: print('ESCAPED')\n"
        "if call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')\n"
        "if call('umount2', b'/dev/shm', 2) == 0: print('ESCAPED')\n"
        "if call('syscall', 56, 0x10000000 | 17, 0, 0, 0, 0) >= 0: print('ESCAPED')\n"
        "if call('setns', 0, 0) == 0: print('ESCAPED')",
    ),
    Program(
        "becoming root again",
        CALL + "for name in ('setuid', 'setgid', 'seteuid'):\n"
        "    if call(name, 0) == 0 and os.getuid() == 0: print('ESCAPED')\n"
        "import subprocess\nfor tool in ('su', 'sudo', 'mount', 'newuidmap'):\n"
        "    try: print('ESCAPED' * (subprocess.run([tool, '-c', 'id'], capture_output=True).returncode == 0))\n"
        "    except OSError: pass",
    ),
    Program(
        "raising its limits",
        "import resource\nfor name in ('NPROC', 'AS', 'FSIZE', 'NOFILE', 'CPU'):\n"
        "    try:\n        resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1))\n"
        "        print('ESCAPED', name)\n    except (ValueError, OSError): pass",
    ),
    Program(
        "device nodes",
        TRY_WRITE
        + "import stat\nattempt(lambda: os.mknod('/tmp/disk', stat.S_IFBLK | 0o666, os.makedev(8, 0)))\n"
        "attempt(lambda: os.mknod('/tmp/mem', stat.S_IFCHR | 0o666, os.makedev(1, 1)))",
    ),
    Program(
        "kernel settings",
        TRY_WRITE
        + "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper',\n"
        "             '/proc/self/oom_score_adj'):\n"
        "    attempt(lambda: os.write(os.open(path, os.O_WRONLY), b'-1000'))",
    ),
    Program("output flood", "while True: print('x' * 4096)", ("output",)),
    Program("error flood", "import os\nwhile True: os.write(2, b'x' * 4096)", ("output",)),
    Program("endless loop", "while True: pass", ("wall",)),
    Program(
        "endless sleep, deaf to signals",
        "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
        ("wall",),
    ),
    Program(
        "deep recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ("exit", "memory")
    ),
    Program("early exit", "import os\nos._exit(0)"),
    Program(
        "background child",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for fd in range(3): os.close(fd)\n        time.sleep(600)\n    os._exit(0)\nprint('gone')",
    ),
    Program(
        "background child that holds the output open",
        "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('gone')",
    ),
]
