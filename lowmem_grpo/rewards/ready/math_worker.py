"""The process in which math-verify compares answers: `python math_worker.py SECONDS`. Each line is a pair or a verdict.

Its first line is "ready".

A model's answer can make sympy compute for longer than any run lasts (9^{9^9}), in C code that no signal handler and
no thread can interrupt. So the system ends this process when a comparison has used its seconds of processor time, or
needs more memory than the limit. The caller then starts another process.
"""

import json
import logging
import os
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_BYTES = 4 * 2**30  # of address space


def verdict(label: str, answer: str) -> bool | None:
    """Whether the answer equals the label as mathematics; None if the label cannot be read."""
    gold, found = read(label), read(answer)
    if not gold:
        return None
    return bool(verify(gold, found, timeout_seconds=None))


def read(answer: str) -> list[object]:
    r"""math-verify's reading of one expression."""
    return list(parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None))


def serve(seconds: float) -> None:
    """Answer each line [label, answer] with true, false or null until standard input ends."""
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # then SIGPROF comes, which nothing handles, and ends the process
        try:
            found = verdict(*json.loads(line))
        except Exception:  # noqa: BLE001, a parser of foreign text may raise anything: this text is no answer
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    logging.disable()  # math-verify warns at each call that it has no time limit of its own
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until now the caller read it, to learn why there is no start
    print("ready", flush=True)
    serve(float(sys.argv[1]))
