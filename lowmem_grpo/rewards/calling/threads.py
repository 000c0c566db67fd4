"""Work shared by a few daemon threads. The threads of an executor would keep a program from ending before the work."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_side_by_side(run: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """`run` of each of N items, in the order of the items, with `workers` at a time.

    After an error or an interrupt no further item begins; the first error is raised when those that have begun end.
    """
    waiting = list(enumerate(items))[::-1]
    found: dict[int, Result] = {}
    faults: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                at, item = waiting.pop()
            try:
                found[at] = run(item)
            except BaseException as error:  # noqa: BLE001, raised again below
                faults.append(error)
                waiting.clear()

    threads = [threading.Thread(target=work, name=f"side by side {number}", daemon=True)
               for number in range(min(workers, len(items)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()
    if faults:
        raise faults[0]
    return [found[at] for at in range(len(items))]
