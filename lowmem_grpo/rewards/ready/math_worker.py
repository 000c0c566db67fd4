"""The process in which math-verify compares answers: `python math_worker.py SECONDS`. It prints "ready", then reads a
pair per line and prints a verdict per line.

An answer such as 9^{9^9} can keep sympy busy practically forever, in C code that no signal handler or thread can
interrupt. So the kernel kills this process when a comparison has used its seconds of CPU time. A comparison that needs
more than MEMORY_BYTES fails.
"""

import json
import logging
import os
import resource
import signal
import sys

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

DIGITS = 40
# Without math-verify's removal of units: 2 ab is a product here.
READING = LatexExtractionConfig(boxed_match_priority=0, normalization_config=NormalizationConfig(boxed="last"))
MEMORY_BYTES = 4 * 2**30  # address space


def verdict(label: str, answer: str) -> bool:
    """Return whether math-verify finds two expressions equal, and their values agree at a point."""
    gold, reading = read(label), read(answer)
    if len(gold) != 1 or len(reading) != 1:
        return False
    return bool(verify(gold, reading, timeout_seconds=None)) and agree(*gold, *reading)


def read(answer: str) -> list[sympy.Basic]:
    readings = parse(rf"\boxed{{{answer}}}", [READING], fallback_mode="no_fallback", parsing_timeout=None)
    return [reading.xreplace({symbol: sympy.I for symbol in reading.free_symbols if symbol.name == "i"})
            for reading in readings if isinstance(reading, sympy.Basic)]


def agree(label: sympy.Basic, answer: sympy.Basic) -> bool:
    """Return whether two expressions have the same value, to many digits, at one point (True if one of them has no
    value there): math-verify treats all tiny numbers as equal."""
    names = sorted(label.free_symbols | answer.free_symbols, key=str)
    point = {symbol: sympy.Rational(1000 + 37 * number, 613) for number, symbol in enumerate(names)}
    wanted, value = (side.subs(point).doit().evalf(DIGITS) for side in (label, answer))
    if not (wanted.is_number and value.is_number):
        return True
    return bool(abs(wanted - value) <= max(abs(wanted), abs(value)) * sympy.Rational(1, 10 ** (DIGITS // 2)))


def serve(seconds: float) -> None:
    """Answer each line [label, answer] with true or false until standard input ends."""
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which nothing handles, then kills the process
        try:
            right = verdict(*json.loads(line))
        except Exception:  # noqa: BLE001, parsing a model's text may raise anything: such an answer is wrong
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(right), flush=True)


if __name__ == "__main__":
    logging.disable()  # math-verify warns at each call that its own time limit is off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until here the caller reads stderr, to report a failed start
    print("ready", flush=True)
    serve(float(sys.argv[1]))
