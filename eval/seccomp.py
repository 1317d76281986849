"""The system calls that code in the sandbox may not make, as a filter program for `bwrap --seccomp`.

Namespaces and limits do most of the work; the filter closes what they leave open:

* user namespaces and mounts: inside its own user namespace a program could mount file systems of any size;
* memory that no limit counts: memfd_create, System V segments and queues, io_uring;
* other processes' memory and handles, the kernel's keyrings, bpf, perf and file handles;
* sockets of families that a network namespace does not contain (vsock, netlink, alg, …).

A denied call fails with EPERM (clone3 with ENOSYS, so that the C library falls back to clone, whose flags a
filter can see). A call in another machine's convention ends the process.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (x86_64, aarch64); the numbers above 423 are the same everywhere.
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: all within the network namespace
# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit number
X32_BIT = 0x40000000  # marks x86_64's second call convention

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; low word of the argument
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str | None = None) -> bytes:
    """The filter for this machine (or the one named), as an array of struct sock_filter.

    Raises ValueError for a machine whose call numbers are not in the table.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"no system call table for {machine}; there is one for {', '.join(MACHINES)}")
    column, audit = MACHINES[machine]
    program = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for numbers in DENIED.values():
        program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, FAIL | errno.EPERM)]
    program += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, CLONE_NEW),
        (RETURN, 0, 0, FAIL | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    program += [(EQUAL, 1, 0, SOCKET[column]), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
    for family in FAMILIES:
        program += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
