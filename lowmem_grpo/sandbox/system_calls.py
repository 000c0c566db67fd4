"""The filter of system calls (seccomp) of a sandboxed process: no second process or thread, no signal, no socket.

A filter is a small program for the kernel (classic BPF, `struct sock_filter`) that sees a call's number and arguments.
Refused calls fail with EPERM. Calls by another machine's convention (32-bit on x86-64, x32) kill the process. A filter
cannot be removed, also binds root, and needs no privilege after PR_SET_NO_NEW_PRIVS. The numbers (x86-64, arm64) are
from Linux 6.1's unistd.h and never change. Source: Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import os
import platform
import struct

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # another process or thread, or another program in this one
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "execve": (59, 221),
    "execveat": (322, 281), "unshare": (272, 97), "setns": (308, 268),
    # signals to, and the memory of, other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    # network
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # limits, and memory that they do not count
    "setrlimit": (160, 164), "prlimit64": (302, 261), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # would undo the order to die with the parent, and make the process's memory readable
    "prctl": (157, 167),
    # what Landlock 1 and 2 do not see
    "truncate": (76, 45),
    # what Landlock does not see: owners and modes of files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    # ways around a filter, and doors into the kernel that a computation does not need
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
}
SOCKETPAIR = (53, 199)  # allowed for streams: asyncio needs one; a datagram pair could reach named sockets
CAPSET = (126, 91)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
X32 = 0x40000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|..|K, ...
NUMBER, ARCH, TYPE_OF_SOCKET = 0, 4, 24  # offsets in struct seccomp_data; the low half of args[1]
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
CAPABILITY_VERSION_3 = 0x20080522


def filter_program(machine: str) -> bytes:
    """The filter for "x86_64" or "aarch64": instructions of code u16, jump if true u8, if false u8, value u32.

    Raises OSError for another machine.
    """
    if machine not in MACHINES:
        raise OSError(f"no filter of system calls for {machine}; there is one for {', '.join(MACHINES)}")
    column, arch = MACHINES[machine]
    refused = [number for numbers in REFUSED.values() if (number := numbers[column]) is not None]
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    program = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    program += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for number in refused:
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    program += [(JUMP_EQUAL, 0, 4, SOCKETPAIR[column]), (LOAD, 0, 0, TYPE_OF_SOCKET), (AND, 0, 0, 0xF)]
    program += [(JUMP_EQUAL, 1, 0, 1), refuse, (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def give_up_rights() -> None:
    """Drop every capability, die with the parent, and install the filter. Raises OSError if the kernel refuses.

    After this other processes of the same user cannot read the process's memory: it is not dumpable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
    machine = platform.machine()
    program = filter_program(machine)
    check(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "PR_SET_PDEATHSIG")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    header, nothing = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    check(libc.syscall(ctypes.c_long(CAPSET[MACHINES[machine][0]]), header, nothing), "capset")
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    holder = ctypes.create_string_buffer(fprog, len(fprog))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(holder), 0, 0), "seccomp")


def check(result: int, what: str) -> None:
    """Raise OSError if a call failed: the C library then returns -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
