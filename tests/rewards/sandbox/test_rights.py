"""The filter of system calls, interpreted as the kernel does it."""

import errno
import fcntl
import os
import re
import socket
import struct
import termios
from pathlib import Path

import pytest
from tables import every_row

from lowmem_grpo.rewards.sandbox import rights
from lowmem_grpo.rewards.sandbox.rights import (
    ALLOW,
    ALLOWED,
    CHECKED,
    ERRNO,
    KILL,
    MACHINES,
    NEWEST,
    filter_program,
)

REFUSED, UNKNOWN = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS


def run_filter(machine: str, arch: int, number: int, *arguments: int) -> int:
    """What the filter says of a call: the kernel's instructions, interpreted."""
    data = struct.pack("IIQ3Q", number, arch, 0, *arguments, *(3 - len(arguments)) * [0])
    program = list(struct.iter_unpack("HBBI", filter_program(machine)))
    at = accumulator = 0
    while True:
        code, true, false, value = program[at]
        at += 1
        if code == rights.LOAD:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == rights.AND:
            accumulator &= value
        elif code == rights.RETURN:
            return value
        else:
            holds = accumulator == value if code == rights.JUMP_EQUAL else accumulator >= value
            at += true if holds else false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_allows_its_calls_and_no_other(machine: str) -> None:
    column, arch = MACHINES[machine]
    allowed = {numbers[column] for numbers in ALLOWED.values()}
    for number in set(range(600)) - {numbers[column] for numbers, _ in CHECKED.values()}:
        wanted = ALLOW if number in allowed else UNKNOWN if number > NEWEST else REFUSED
        assert run_filter(machine, arch, number) == wanted, number
    assert run_filter(machine, arch ^ 1, 0) == KILL
    assert run_filter(machine, arch, rights.X32 + 57) == KILL


HIGH = 1 << 40  # above the half that the kernel looks at


@every_row("machine", MACHINES)
@every_row(("name", "arguments", "allowed"), [
    *(("fcntl", (3, order, 0x2000), True) for order in (fcntl.F_GETFL, fcntl.F_SETLK, fcntl.F_DUPFD_CLOEXEC)),
    *(("fcntl", (3, order, 0), False) for order in (
        fcntl.F_SETOWN, fcntl.F_SETSIG, 15, fcntl.F_SETLEASE, fcntl.F_NOTIFY, 1031, HIGH + fcntl.F_SETOWN)),
    ("fcntl", (3, fcntl.F_SETFL, os.O_NONBLOCK), True), ("fcntl", (3, fcntl.F_SETFL, 0x2000 | os.O_NONBLOCK), False),
    *(("ioctl", (1, order), True) for order in (termios.TCGETS, termios.FIONBIO, termios.FIOCLEX)),
    *(("ioctl", (1, order), False) for order in (termios.FIOASYNC, 0x8901, 0x8902, termios.TIOCSTI, 0x40049409)),
    ("socketpair", (1, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), True), ("socketpair", (1, socket.SOCK_DGRAM), False),
])
def test_some_calls_are_allowed_by_what_they_ask_for(
    machine: str, name: str, arguments: tuple[int, ...], allowed: bool
) -> None:
    column, arch = MACHINES[machine]
    assert run_filter(machine, arch, CHECKED[name][0][column], *arguments) == (ALLOW if allowed else REFUSED)


@pytest.mark.parametrize(("machine", "header", "prefix"), [
    ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
    ("aarch64", "/usr/include/asm-generic/unistd.h", "__NR(?:3264)?_"),
])
def test_the_numbers_are_the_kernels(machine: str, header: str, prefix: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"no {header}")
    lines = re.findall(rf"#define {prefix}(\w+)\s+(\d+)", Path(header).read_text())
    known = {name: int(number) for name, number in lines}
    column, _ = MACHINES[machine]
    ours = {name: numbers[column] for name, numbers in (ALLOWED | rights.OURS).items()}
    ours |= {name: numbers[column] for name, (numbers, _) in CHECKED.items()}
    assert {name: number for name, number in ours.items() if name in known} == {
        name: number for name, number in known.items() if name in ours
    }
    assert len(set(ours) & set(known)) > 100


def test_a_machine_without_a_filter_is_named() -> None:
    with pytest.raises(OSError, match="riscv64; there is one for x86_64, aarch64"):
        filter_program("riscv64")
