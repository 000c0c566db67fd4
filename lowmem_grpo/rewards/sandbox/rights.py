"""The kernel's rules for a sandboxed process: the system calls that it may make, and the files that it may open.

The filter of system calls (seccomp, in classic BPF) sees a call's number and arguments, not file names: Landlock sees
those. Calls that are not listed fail with EPERM. Calls that are newer than the list fail with ENOSYS, so that the C
library uses older ones. Calls in another ABI (32-bit on x86-64, x32) kill the process. A filter cannot be removed,
binds root too, and needs no privilege after PR_SET_NO_NEW_PRIVS. The numbers (x86-64, arm64) are from Linux 6.1's
unistd.h and never change. Sources: Documentation/userspace-api/seccomp_filter.rst and landlock.rst.
"""

import ctypes
import errno
import os
import struct

ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files; Landlock or the namespace decides which ones can be opened
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None), "close": (3, 57),
    "close_range": (436, 436), "lseek": (8, 62), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    # names and metadata of files
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "newfstatat": (262, None), "fstatat": (None, 79), "statx": (332, 291), "statfs": (137, 43),
    "fstatfs": (138, 44), "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "umask": (95, 166), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "readlink": (89, None),
    "readlinkat": (267, 78),
    # memory
    "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "msync": (26, 227),
    # time and waiting
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "select": (23, None),
    "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "pause": (34, None),
    "sched_yield": (24, 124),
    # receiving signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "signalfd": (282, None),
    "signalfd4": (289, 74), "restart_syscall": (219, 128),
    # internals of the C library, and exit
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293),
    "arch_prctl": (158, None), "membarrier": (324, 283), "getcpu": (309, 168), "getrandom": (318, 278),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    # the socket for answers, and socket pairs
    "sendto": (44, 206), "sendmsg": (46, 211), "recvfrom": (45, 207), "recvmsg": (47, 212), "getsockopt": (55, 209),
    "getsockname": (51, 204), "getpeername": (52, 205), "shutdown": (48, 210),
    # information about the process and the system
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getrusage": (98, 165), "uname": (63, 160), "sysinfo": (99, 179), "getrlimit": (97, 163),
    "getpriority": (140, 141), "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120),
    "sched_getparam": (143, 121), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "capget": (125, 90),
}
NEWEST = 450  # the last number in Linux 6.1, the same on every machine
Test = tuple[int, int, int]  # (index of the argument, mask, required value after the mask)
WHOLE, O_ASYNC = 0xFFFFFFFF, 0x2000
F_SETFL, LOOKS, LOCKS = 4, (0, 1, 2, 3, 1030, 1032), (5, 6, 7, 36, 37, 38)  # duplicates, flags, size of a pipe; locks
TERMINAL, READY = (0x5401, 0x802C542A, 0x5413), (0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS*, TIOCGWINSZ; FION*, FIO*CLEX
CHECKED: dict[str, tuple[tuple[int, int], list[tuple[Test, ...]]]] = {  # allowed if all tests of any row hold
    # not allowed: F_SETOWN, F_SETSIG, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
    "fcntl": ((72, 25), [((1, WHOLE, F_SETFL), (2, O_ASYNC, 0)), *(((1, WHOLE, what),) for what in (*LOOKS, *LOCKS))]),
    "ioctl": ((16, 29), [((1, WHOLE, what),) for what in (*TERMINAL, *READY)]),
    "socketpair": ((53, 199), [((1, 0xF, 1),)]),  # asyncio needs a stream; a datagram pair could reach named sockets
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
X32 = 0x40000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF_LD|W|ABS, BPF_JMP|..|K, ...
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; the low half of an argument comes first
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
OURS = {  # the calls that we make here; the last three have the same numbers on every machine
    "prctl": (157, 167), "capset": (126, 91), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 4, 22, 38, 2
CAPABILITY_VERSION_3 = 0x20080522
Instruction = tuple[int, int, int, int]
REFUSE: Instruction = (RETURN, 0, 0, ERRNO | errno.EPERM)


def filter_program(machine: str) -> bytes:
    """Return the filter for "x86_64" or "aarch64": instructions of code u16, jump if true u8, if false u8, value u32.
    OSError for any other machine."""
    if machine not in MACHINES:
        raise OSError(f"no filter of system calls for {machine}; there is one for {', '.join(MACHINES)}")
    column, arch = MACHINES[machine]
    program = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    program += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    program += [(JUMP_AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for numbers, rows in CHECKED.values():
        tested = [instruction for tests in rows for instruction in row_of(tests)] + [REFUSE]
        program += [(JUMP_EQUAL, 0, len(tested), numbers[column]), *tested]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, REFUSE])


def row_of(tests: tuple[Test, ...]) -> list[Instruction]:
    """Return filter instructions that allow a system call if its arguments pass all tests, and else do nothing."""
    row: list[Instruction] = []
    for left, (argument, mask, value) in zip(reversed(range(len(tests))), tests, strict=True):
        row += [(LOAD, 0, 0, ARGUMENTS + 8 * argument), (AND, 0, 0, mask), (JUMP_EQUAL, 0, 3 * left + 1, value)]
    return [*row, (RETURN, 0, 0, ALLOW)]


def give_up_rights() -> None:
    """Drop every capability for good, let the kernel kill this process when the parent dies, and keep other processes
    of the same user from reading its memory. OSError if the kernel refuses."""
    for option, value in ((PR_SET_PDEATHSIG, 9), (PR_SET_DUMPABLE, 0), (PR_SET_NO_NEW_PRIVS, 1)):
        call("prctl", option, value, 0, 0, 0)
    call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def install_filter() -> None:
    """Refuse all system calls outside ALLOWED and CHECKED; call `give_up_rights` before. OSError on failure."""
    program = ctypes.create_string_buffer(filter_program(os.uname().machine))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))  # struct sock_fprog
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0)


def call(name: str, *args: int | bytes | None) -> int:
    """Make the system call `name`, one of OURS, and return its result. OSError, with errno, if the result is -1."""
    number = OURS[name][MACHINES[os.uname().machine][0]]
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in (number, *args)]
    if (result := int(ctypes.CDLL(None, use_errno=True).syscall(*words))) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


# Landlock restricts the files and processes that a process can reach, if the kernel has it (from Linux 5.13, often
# enabled). We use all restrictions of the kernel's version:
#
#     1  (5.13)  files to open or create; no access to other processes (/proc/PID/environ, /proc/PID/mem)
#     2  (5.19)  no move of a file to another folder     4  (6.7)   no TCP
#     3  (6.2)   no truncation (O_TRUNC)                 5  (6.10)  no ioctl on devices
#     6  (6.12)  no signal and no abstract socket to a process outside
#
# The filter of system calls also refuses networks, signals and most ioctls, on every kernel. No version restricts
# `stat`, so the existence, size and times of files stay visible. Landlock needs no privilege.

VERSION_FLAG, PATH_BENEATH = 1, 1
READ_ONLY, OF_FILES = 0b1101, 0b111  # rights: execute 1, write a file 2, read a file 4, read a folder 8
RIGHTS = {  # (of files, of TCP, of scopes: abstract sockets and signals), by the first version that has them
    1: ((1 << 13) - 1, 0, 0), 2: ((1 << 14) - 1, 0, 0), 3: ((1 << 15) - 1, 0, 0), 4: ((1 << 15) - 1, 0b11, 0),
    5: ((1 << 16) - 1, 0b11, 0), 6: ((1 << 16) - 1, 0b11, 0b11),
}
COMPLETE = 3  # the first version that covers every way to truncate a file (O_TRUNC): Linux 6.2


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it is missing or off."""
    try:
        return call("landlock_create_ruleset", None, 0, VERSION_FLAG)
    except OSError:
        return 0


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Allow only reading below `readable`, and every file operation below `writable`, if there is Landlock.
    no_new_privs must be set. Missing paths are skipped. OSError if the kernel refuses."""
    if (version := landlock_version()) < 1:
        return
    everything, *others = RIGHTS[min(version, max(RIGHTS))]
    size = 8 * (1 + sum(map(bool, others)))  # struct landlock_ruleset_attr is shorter in old versions
    rules = call("landlock_create_ruleset", struct.pack("QQQ", everything, *others), size, 0)
    for paths, rights in ((readable, READ_ONLY), (writable, everything)):
        for path in filter(os.path.exists, paths):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & OF_FILES
            call("landlock_add_rule", rules, PATH_BENEATH, struct.pack("=Qi", allowed, place), 0)
            os.close(place)
    call("landlock_restrict_self", rules, 0)
    os.close(rules)
