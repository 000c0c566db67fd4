"""`retry` and `limit_concurrency`, on plain and async functions."""

import asyncio
import math
from typing import Any

import pytest
from tables import not_refused

from lowmem_grpo import agents as art


def made(failures: int, waits: bool, **options: Any) -> tuple[Any, list[int]]:
    """A function that fails so many times, under `retry`, and the list of its calls."""
    calls: list[int] = []

    def work(value: int) -> int:
        calls.append(value)
        if len(calls) <= failures:
            raise ValueError(f"call {len(calls)}")
        return value

    async def later(value: int) -> int:
        return work(value)

    return art.retry(delay=0, **options)(later if waits else work), calls


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_is_made_again_until_it_succeeds_or_has_had_its_attempts(waits: bool) -> None:
    def run(function: Any) -> Any:
        return asyncio.run(function(5)) if waits else function(5)

    function, calls = made(2, waits)
    assert run(function) == 5 and calls == [5, 5, 5]
    told: list[tuple[str, int]] = []
    function, calls = made(9, waits, max_attempts=2, on_retry=lambda error, attempt: told.append((str(error), attempt)))
    with pytest.raises(ValueError, match="call 2"):
        run(function)
    assert len(calls) == 2 and told == [("call 1", 1)]
    function, calls = made(9, waits, exceptions=(KeyError,))
    with pytest.raises(ValueError, match="call 1"):
        run(function)
    assert not_refused(art.retry, [(wrong, ("max_attempts is", "write @retry()")) for wrong in (print, 0, 1.5)]) == []
    assert art.retry(delay=math.inf, backoff_factor=math.inf)(lambda: 3)() == 3


@pytest.mark.parametrize(("derive_key", "most"), [(None, 2), (lambda number: str(number % 2), 4)])
def test_no_more_calls_run_at_a_time_than_there_are_places(derive_key: Any, most: int) -> None:
    running: list[int] = []
    peak = 0

    @art.limit_concurrency(2, derive_key)
    async def call(number: int) -> None:
        nonlocal peak
        running.append(number)
        peak = max(peak, len(running))
        await asyncio.sleep(0)
        running.remove(number)

    async def main() -> None:
        await asyncio.gather(*map(call, range(9)))

    asyncio.run(main())
    asyncio.run(main())  # in another loop
    assert peak == most
