"""Attacks on the sandbox for model-written code: `python -m tests.attacks.sandbox`.

Each attack runs in every isolation that works on this machine. After it, all that lies outside is looked at. Attacks of
one kind share a process, until one ends it.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator

import click

from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.plain import decode
from lowmem_grpo.rewards.sandbox.rights import MACHINES
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, Sandbox, Trial, why_not
from lowmem_grpo.rewards.sandbox.worker import WorkerEnded, children_of
from tests.attacks.attack import Verdict, attack_and_exit
from tests.attacks.doors import DOORS
from tests.attacks.escapes import ANSWER, ESCAPES, KERNEL, Escape
from tests.attacks.floods import floods
from tests.attacks.forgeries import forgeries
from tests.attacks.outside import Outside, outside

LIMITS = Limits(seconds=5, total_seconds=30, memory_bytes=192 * MIB, scratch_bytes=MIB, files=40, output_bytes=200_000)
MODULES = (
    "_thread array asyncio concurrent.futures configparser ctypes fcntl fileinput ftplib gc glob http.client importlib "
    "importlib.machinery linecache logging logging.handlers mmap multiprocessing multiprocessing.connection os pty "
    "resource runpy shelve shutil signal smtplib socket sqlite3 struct subprocess sys tempfile termios threading time "
    "urllib.request xmlrpc.client zipfile"
)
PRELUDE = """
import {modules}
NUMBERS = {numbers}
{names}

def checked(result, name):
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result

def call(name, *args):
    return checked(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(NUMBERS[name]), *map(word, args)), name)

def word(value):
    return ctypes.c_long(value) if isinstance(value, int) else value

def libc(name, *args):
    return checked(getattr(ctypes.CDLL(None, use_errno=True), name)(*args), name)

def write(place, text):
    with open(place, "w") as file:
        file.write(text)

def attempt(number):
    try:
        return ["reached", repr(globals()[f"attack_{{number}}"]()), 0]
    except BaseException as error:
        return ["refused", repr(error)[:500], getattr(error, "errno", None) or 0]
"""
Answer = tuple[str, str, int]  # "reached", "refused" or "ended"; what it returned or raised; the number of the error


def program(escapes: list[Escape], world: Outside) -> str:
    """The attacks as functions of one program."""
    column = MACHINES[os.uname().machine][0]
    numbers = {name: both[column] for name, both in DOORS.items() if both[column] is not None}
    numbers |= {"timer_create": (222, 107)[column]}
    names = "\n".join(f"{name} = {value!r}" for name, value in world.names.items())
    bodies = ["".join(f"    {line}\n" for line in escape.code.splitlines()) for escape in escapes]
    functions = "\n".join(f"def attack_{number}():\n{body}" for number, body in enumerate(bodies))
    head = PRELUDE.format(modules=", ".join(MODULES.split()), numbers=numbers, names=names)
    return f"{head}\n{functions}"


def escapes(sandbox: Sandbox, world: Outside) -> Iterator[Verdict]:
    """A verdict for each escape."""
    for kind in dict.fromkeys(escape.kind for escape in ESCAPES):
        tried = [escape for escape in ESCAPES if escape.kind == kind]
        code = program(tried, world)
        trial = Trial(code, sandbox)
        for number, escape in enumerate(tried):
            try:
                reply = trial.ask({"call": "attempt", "args": {"tuple": [number]}, "kwargs": {"dict": []}}, None)
                answer = tuple(decode(reply["value"])) if "value" in reply else ("ended", str(reply), 0)
            except WorkerEnded as end:
                answer = ("ended", str(end), 0)
                trial.close()
                trial = Trial(code, sandbox)
            yield Verdict(f"{sandbox.isolation}: {kind}", repr(escape.code),
                          world.damage() or reached(escape, answer, world.secret))
        trial.close()


def reached(escape: Escape, answer: Answer, secret: str) -> str:
    """What an attack reached, by its own answer; empty if nothing."""
    state, said, number = answer
    if secret in said:
        return "it has the secret"
    if escape.seen == KERNEL:
        return "" if number in (errno.EPERM, errno.ENOSYS) else f"the kernel looked at it: {said[:200]}"
    return f"it returned {said[:200]}" if escape.seen == ANSWER and state == "reached" else ""


PARTS: dict[str, Callable[[Sandbox, Outside], Iterator[Verdict]]] = {
    "escapes": escapes, "floods": lambda sandbox, _: floods(sandbox),
    "forgeries": lambda sandbox, _: forgeries(sandbox),
}


def attack(isolation: str, parts: Iterable[str] = PARTS) -> Iterator[Verdict]:
    """Some parts of the attacks, or all, on an isolation."""
    sandbox = Sandbox(isolation, LIMITS)
    with outside() as world:
        before = set(children_of(os.getpid()))
        for part in parts:
            for verdict in PARTS[part](sandbox, world):
                yield Verdict(verdict.kind, verdict.name, verdict.damage or world.damage())
            left = set(children_of(os.getpid())) - before
            yield Verdict(f"{isolation}: processes that are left", part, f"{left}" if left else "")


@click.command()
@click.option("--isolation", "chosen", multiple=True, type=click.Choice(ISOLATIONS), help="Default: all that work.")
def main(chosen: tuple[str, ...]) -> None:
    """Attack the sandbox. The exit status is 1 if an attack succeeds, or if no isolation works here."""
    for isolation in chosen or ISOLATIONS:
        if fault := why_not(isolation):
            click.echo(f"{isolation} is not attacked, because it does not work here: {fault}")
    here = [isolation for isolation in chosen or ISOLATIONS if why_not(isolation) is None]
    attack_and_exit(lambda _: (verdict for isolation in here for verdict in attack(isolation)), ", ".join(here))


if __name__ == "__main__":
    main()
