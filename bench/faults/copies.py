"""A copy of the tree whose tests run in forks of a process that has loaded libraries, but nothing of the package."""

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.faults.places import Fault

HERE = str(Path(__file__).resolve().parents[2])
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "trl", "pytest", "hypothesis")
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # as tests/conftest.py sets them without a card
OPTIONS = ("-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--tb=short")
NO_TEST = "tests/conftest.py"  # what has failed where nothing was collected
MEMORY = 8 * 2**30  # bytes of a process at most: a fault may make it grow without end
WAITING = 20  # seconds of the clock for each of a processor
NOTHING_RAN = 5  # pytest's exit status
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


@dataclass(frozen=True)
class Ended:
    """What came of running some tests until the first one failed."""

    test: str = ""  # it
    slow: bool = False
    how: str = ""
    whole: bool = True  # they were not cut off


def load() -> None:
    """Load the libraries into this process, which starts no thread for that, so that it can be forked."""
    os.environ.update(SETTINGS)
    for name in LIBRARIES:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    from hypothesis import Phase, settings

    settings.register_profile("faults", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("faults")
    gc.freeze()


def adopt() -> None:
    """Make processes below this one its children when their parents end."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


class Copy:
    """A copy of the tree, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, folder.with_suffix(".json")
        self.sound: dict[str, bool] = {}  # whether a test passes without a fault
        self.changes, self.left = 0, 0.0  # processor seconds for the fault in work

    def fails(self, fault: Fault, tests: list[str]) -> Ended:
        """The first of these tests, or options for pytest, to fail with the fault alone; it takes from `left`."""
        while True:
            with self.changed(fault):
                left_out = [f"--deselect={test}" for test, sound in self.sound.items() if not sound]
                found = self.run([*tests, *left_out])
            if found.test and found.test not in self.sound:
                alone = [found.test] if "::" in found.test else [found.test, "--collect-only"]
                left, self.left = self.left, 200
                self.sound[found.test] = not self.run(alone).test
                self.left = left
            if self.sound.get(found.test, True):
                return found

    @contextmanager
    def changed(self, fault: Fault) -> Iterator[None]:
        """Inside, the copy has the fault."""
        path = self.folder / fault.path
        text, was = path.read_text(), path.stat()
        self.changes += 1
        try:
            path.write_text(fault.put_into(text))
            os.utime(path, (self.changes, self.changes))  # bytecode is of one size and one second of its source
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def run(self, arguments: list[str]) -> Ended:
        """Run pytest in a fork, until no time is left, and end all processes that it leaves."""
        self.said.write_text("{}")
        if not (child := os.fork()):
            self.test(arguments)
        end = os.pidfd_open(child)
        if not select.select([end], [], [], WAITING * self.left)[0]:
            os.kill(child, signal.SIGXCPU)
        os.close(end)
        _, status, used = os.wait4(child, 0)
        self.left -= used.ru_utime + used.ru_stime
        end_children()
        said, code = json.loads(self.said.read_text()), os.waitstatus_to_exitcode(status)
        if "how" not in said and code in (0, NOTHING_RAN, -signal.SIGXCPU):
            return Ended(whole=code != -signal.SIGXCPU)
        return Ended(**{"test": NO_TEST, "how": f"ended with {code}"} | said)

    def test(self, arguments: list[str]) -> None:
        """What the fork does; it never returns."""
        status = 70
        try:
            os.setsid()
            os.chdir(self.folder)
            log = os.open(self.folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (max(int(self.left), 1), resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in ("", HERE))]
            for name in [name for name in sys.modules if name.split(".")[0] == "bench"]:
                del sys.modules[name]  # the copy has its own
            sys.modules["__main__"] = ModuleType("__main__")  # multiprocessing imports what is there
            status = int(sys.modules["pytest"].main([*OPTIONS, *arguments], plugins=[Witness(self.said)]))
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - nothing may get out of the fork
            traceback.print_exc()
        finally:
            os._exit(status)


class Witness:
    """A plugin of pytest that writes down which test runs, and the first to fail."""

    def __init__(self, said: Path) -> None:
        self.said, self.failed = said, False

    def say(self, **what: Any) -> None:
        if not self.failed:
            self.said.write_text(json.dumps(what))
        self.failed |= "how" in what

    def pytest_runtest_setup(self, item: Any) -> None:
        self.say(test=item.nodeid, slow=item.get_closest_marker("slow") is not None)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            how = "timed out" if "Timeout (>" in str(report.longrepr) else "failed"
            self.say(test=report.nodeid, slow="slow" in report.keywords, how=how)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say(test=report.nodeid, slow=False, how="not loaded")


def end_children() -> None:
    """Kill all processes below this one."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while found := children.read_text().split():
        for child in map(int, found):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
