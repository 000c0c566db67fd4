"""A start of a run's processes over a store in which a former start has left its things."""

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from lowmem_grpo.parallel import attempt
from lowmem_grpo.parallel.attempt import own_part

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.05)


def start(store: HashStore, count: int, late: int, others_wait: threading.Event) -> list[str]:
    """What each process reads in its part, where it finds what the first one has written."""
    def join(rank: int) -> str:
        assert rank != late or count == 1 or others_wait.wait(60)
        part = own_part(store, rank, count, LONG)
        if rank == 0:
            assert not part.check(["said"]), "nothing of a former start is there"
            part.set("said", uuid.uuid4().hex)
        return part.get("said").decode()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(join, range(count)))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_are_in_one_part_of_the_store_and_each_start_has_its_own(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = HashStore(), set()
    until = attempt.until
    for late in (-1, 0, count - 1):
        others_wait = threading.Event()

        def waits(done: Any, *given: Any, event: threading.Event = others_wait) -> None:
            until(lambda: done() or event.set(), *given)

        monkeypatch.setattr(attempt, "until", waits)
        told = start(store, count, late, others_wait)
        assert len(set(told)) == 1 and told[0] not in seen
        seen.add(told[0])


def test_an_invitation_of_a_former_start_is_not_followed() -> None:
    store = HashStore()
    for key, value in {"name/1": "old", "invited": json.dumps(["former", "old"]), "agreed/former/1": "",
                       "open/former": ""}.items():
        store.set(key, value)
    with pytest.raises(TimeoutError, match=r"rank 0 did not come within 0 s"):
        own_part(store, 1, 2, SHORT)


def test_the_first_one_does_not_go_on_with_what_a_former_process_wrote() -> None:
    store = HashStore()
    store.set("name/1", "former")
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not come within 0 s"):
        own_part(store, 0, 3, SHORT)
