"""Landlock limits which files a process may still open, if the kernel has it (from Linux 5.13, often enabled).

Below version 3 (Linux 6.2) files outside can still be emptied by an open with O_TRUNC; `isolation` warns of that.

Landlock needs no privilege. It also keeps a process from looking into others (/proc/PID/environ, /proc/PID/mem).
Source: Documentation/userspace-api/landlock.rst. Its three calls have the same numbers on every machine.
"""

import ctypes
import os
import struct

from lowmem_grpo.sandbox.system_calls import check

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # rights that version 1, 2, 3 and later know
COMPLETE = 3  # the first version that sees every way to empty a file (O_TRUNC): Linux 6.2
LOOK = EXECUTE | READ_FILE | READ_DIR


def version() -> int:
    """The kernel's version of Landlock; 0 if it is missing or off."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(VERSION_FLAG))
    return max(int(found), 0)


def restrict_files(readable: list[str], writable: list[str]) -> bool:
    """Allow only reading below `readable` and everything below `writable`. Returns False if there is no Landlock.

    no_new_privs must be set. Paths that do not exist are skipped. Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    known = version()
    if known < 1:
        return False
    everything = ALL[min(known, 3)]
    attributes = struct.pack("Q", everything)
    rules = libc.syscall(ctypes.c_long(CREATE_RULESET), attributes, ctypes.c_size_t(8), ctypes.c_uint(0))
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
    """Allow the rights for everything below a path."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, place)
        check(libc.syscall(ctypes.c_long(ADD_RULE), ctypes.c_int(rules), ctypes.c_int(PATH_BENEATH), rule,
                           ctypes.c_uint(0)), f"landlock_add_rule for {path}")
    finally:
        os.close(place)
