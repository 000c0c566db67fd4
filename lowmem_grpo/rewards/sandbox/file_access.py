"""Landlock limits what a process may still open and reach, if the kernel has it (from Linux 5.13, often enabled).

What each version adds, of which we use all that the kernel has:

    1  (5.13)  which files can be opened or made; no look into other processes (/proc/PID/environ, /proc/PID/mem)
    2  (5.19)  no file moves into another folder       4  (6.7)   no TCP
    3  (6.2)   no file is emptied (O_TRUNC)            5  (6.10)  no orders to devices (ioctl)
    6  (6.12)  no signal and no abstract socket reaches a process outside

Networks, signals and most orders to devices are also refused by the filter of system calls, on every kernel. Nothing
hides that a file exists, nor its size and times: no version restricts `stat`. Landlock needs no privilege.
Source: Documentation/userspace-api/landlock.rst. Its three calls have the same numbers on every machine.
"""

import ctypes
import os
import struct

from lowmem_grpo.rewards.sandbox.system_calls import check

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # rights that a version knows first
TCP = {4: 0b11}  # bind, connect
SCOPES = {6: 0b11}  # abstract sockets, signals
COMPLETE = 3  # the first version that sees every way to empty a file (O_TRUNC): Linux 6.2
LOOK = EXECUTE | READ_FILE | READ_DIR


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it is missing or off."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(VERSION_FLAG))
    return max(int(number), 0)


def attributes(known: int) -> bytes:
    """Return all that a version can restrict, as a struct landlock_ruleset_attr. Older kernels know a shorter one."""
    files, tcp, scopes = (max((rights for first, rights in table.items() if first <= known), default=0)
                          for table in (FILES, TCP, SCOPES))
    return struct.pack("QQQ", files, tcp, scopes)[: 24 if scopes else 16 if tcp else 8]


def restrict(readable: list[str], writable: list[str]) -> bool:
    """Allow only reading below `readable` and all to files below `writable`. Returns False if there is no Landlock.
    no_new_privs must be set. Paths that do not exist are skipped. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    known = version()
    if known < 1:
        return False
    wanted = attributes(known)
    (everything,) = struct.unpack_from("Q", wanted)
    rules = libc.syscall(ctypes.c_long(CREATE_RULESET), wanted, ctypes.c_size_t(len(wanted)), ctypes.c_uint(0))
    try:
        check(rules, "landlock_create_ruleset")
        for paths, rights in ((readable, LOOK), (writable, everything)):
            for path in filter(os.path.exists, paths):
                allow(libc, rules, path, rights if os.path.isdir(path) else rights & (EXECUTE | READ_FILE | WRITE_FILE))
        check(libc.syscall(ctypes.c_long(RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint(0)), "landlock")
    finally:
        if rules >= 0:
            os.close(rules)
    return True


def allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, place)
        check(libc.syscall(ctypes.c_long(ADD_RULE), ctypes.c_int(rules), ctypes.c_int(PATH_BENEATH), rule,
                           ctypes.c_uint(0)), f"landlock_add_rule for {path}")
    finally:
        os.close(place)
