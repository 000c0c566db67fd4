"""The filter of system calls, interpreted as the kernel does it."""

import re
import struct
from pathlib import Path

import pytest

from lowmem_grpo.sandbox import system_calls
from lowmem_grpo.sandbox.system_calls import ALLOW, ERRNO, KILL, MACHINES, REFUSED, filter_program


def run_filter(machine: str, arch: int, number: int, argument: int = 0) -> int:
    """What the filter says of a call: the kernel's instructions, interpreted."""
    data = struct.pack("IIQQQ", number, arch, 0, 0, argument)
    program = list(struct.iter_unpack("HBBI", filter_program(machine)))
    at = accumulator = 0
    while True:
        code, true, false, value = program[at]
        at += 1
        if code == system_calls.LOAD:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == system_calls.AND:
            accumulator &= value
        elif code == system_calls.RETURN:
            return value
        else:
            holds = accumulator == value if code == system_calls.JUMP_EQUAL else accumulator >= value
            at += true if holds else false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_its_calls_and_no_other(machine: str) -> None:
    column, arch = MACHINES[machine]
    refused = {numbers[column] for numbers in REFUSED.values()} - {None}
    pair = system_calls.SOCKETPAIR[column]
    for number in set(range(500)) - {pair}:
        assert run_filter(machine, arch, number) == (ERRNO | 1 if number in refused else ALLOW), number
    assert run_filter(machine, arch ^ 1, 0) == KILL
    assert run_filter(machine, arch, system_calls.X32 + 57) == KILL


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
    ours = {name: numbers[column] for name, numbers in REFUSED.items()}
    ours |= {"socketpair": system_calls.SOCKETPAIR[column], "capset": system_calls.CAPSET[column]}
    assert {name: number for name, number in ours.items() if name in known} == {
        name: number for name, number in known.items() if name in ours
    }
    assert len(set(ours) & set(known)) > 40


def test_a_machine_without_a_filter_is_named() -> None:
    with pytest.raises(OSError, match="riscv64; there is one for x86_64, aarch64"):
        filter_program("riscv64")
