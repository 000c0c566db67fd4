"""What ranks do together, and how they wait for each other: here each is a thread, with a store in memory."""

import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroupGloo

from lowmem_grpo.config.launcher import ProcessRank
from lowmem_grpo.trainer import distributed
from lowmem_grpo.trainer.distributed import STEPS, RankError, Ranks, part_of_start
from lowmem_grpo.trainer.preflight import checks, resources


@contextmanager
def several(count: int, **pace: float) -> Iterator[list[Ranks]]:
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:  # they wait for each other
        made = list(pool.map(lambda rank: Ranks(ProcessRank(rank, count, rank), store, **pace), range(count)))
        yield made
        list(pool.map(lambda one: one.heartbeat.close(), made))


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Ranks]]:
    with several(request.param) as made:
        yield made


def each(ranks: list[Ranks], call: Callable[[Ranks], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def outcomes(ranks: list[Ranks], call: Callable[[Ranks], Any]) -> list[Any]:
    """What each rank returns, or the error that it raises, of which it tells the others."""
    def outcome(one: Ranks) -> Any:
        try:
            with one.together():
                return call(one)
        except (RankError, ArithmeticError, AttributeError, TypeError, pickle.PicklingError) as error:
            return error

    return each(ranks, outcome)


def test_one_process_alone_does_everything_itself() -> None:
    alone = Ranks()
    assert alone.gather("x", 5) == [5] and alone.first("x", lambda: 7) == 7 and alone.leads
    assert alone.mine([3, 1, 2], float) == [3, 1, 2]
    before = torch.get_rng_state()
    alone.seed(1, 2)
    assert torch.equal(before, torch.get_rng_state()), "one process goes on with its random states"


def test_all_have_what_each_had_whatever_its_size(ranks: list[Ranks]) -> None:
    for _ in range(20):
        found = each(ranks, lambda one: one.gather("things", {"rank": one.rank, "long": "é" * 1000 * one.rank}))
        assert all([thing["rank"] for thing in things] == list(range(len(ranks))) for things in found)
        assert found[0][1]["long"] == "é" * 1000


def test_what_the_first_one_makes_all_have_and_the_others_make_nothing(ranks: list[Ranks]) -> None:
    made: list[int] = []

    def make(rank: int) -> str:
        made.append(rank)
        return "made"

    assert each(ranks, lambda one: one.first("it", lambda: make(one.rank))) == ["made"] * len(ranks)
    assert made == [0]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 2**-8)])
def test_gradients_are_summed_and_one_that_a_rank_lacks_counts_as_zero(
    ranks: list[Ranks], dtype: torch.dtype, rtol: float
) -> None:
    def parameters(rank: int) -> list[nn.Parameter]:
        torch.manual_seed(rank)
        made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (7,), (2, 2))]
        made[0].grad = torch.randn(3, 5, dtype=dtype)
        if rank == 1:
            made[1].grad = torch.randn(7, dtype=dtype)
        return made  # nobody has a gradient of the last one

    held = [parameters(one.rank) for one in ranks]
    expected: list[Any] = [sum(p.grad.double() for p in ps if p.grad is not None) for ps in zip(*held, strict=True)]
    for _ in range(2):  # the buffer is used again
        for some, rank in zip(held, ranks, strict=True):
            for parameter, fresh in zip(some, parameters(rank.rank), strict=True):
                parameter.grad = fresh.grad
        each(ranks, lambda one: one.sum_gradients(held[one.rank]))
    for some in held:
        torch.testing.assert_close(some[0].grad, expected[0].to(dtype), rtol=rtol, atol=1e-6)
        assert torch.equal(some[1].grad, expected[1].to(dtype)) and some[2].grad is None
        assert torch.equal(some[0].grad, held[0][0].grad), "the same bits in every rank"


def test_ranks_with_different_adapters_are_told_so(ranks: list[Ranks]) -> None:
    told = outcomes(ranks, lambda one: one.sum_gradients([nn.Parameter(torch.zeros(3 + one.rank))]))
    assert all(isinstance(error, RankError) and "different numbers of parameters" in str(error) for error in told)


def test_what_cannot_be_sent_is_an_error_of_the_rank_that_has_it() -> None:
    with several(2) as pair:
        one, other = outcomes(pair, lambda rank: rank.gather("it", (lambda: 1) if rank.rank else 2))
    assert isinstance(one, RankError) and isinstance(other, Exception) and not isinstance(other, RankError)


def test_random_states_follow_from_seed_step_and_rank_only() -> None:
    drawn = {}
    one = Ranks()
    one.count = 2
    for one.rank, step in ((0, 0), (1, 0), (0, 1), (1, 0)):
        rank = one.rank
        one.seed(11, step)
        value = torch.rand(1).item()
        assert drawn.setdefault((rank, step), value) == value
    assert len(set(drawn.values())) == 3


def test_ranks_know_how_many_of_them_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = ["a", "b", "a"]
    monkeypatch.setattr("platform.node", machines.pop)
    with several(3) as ranks:
        assert sorted(one.here for one in ranks) == [1, 2, 2] and Ranks().here == 1


def test_each_rank_has_metrics_of_its_own(ranks: list[Ranks]) -> None:
    told = each(ranks, lambda one: one.metrics(10.0 + one.rank, {"train_s": 1.0 * one.rank}))
    assert all(metrics == told[0] for metrics in told)
    for rank in range(len(ranks)):
        assert told[0][f"ranks/{rank}/train_s"] == rank
        assert told[0][f"ranks/{rank}/busy_s"] + told[0][f"ranks/{rank}/waiting_s"] == pytest.approx(10.0 + rank)
    assert Ranks().metrics(1.0, {"train_s": 1.0}) == {}


def test_a_rank_that_is_slow_step_after_step_is_said_once_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    alone = Ranks()
    with caplog.at_level(logging.WARNING, "lowmem_grpo.trainer.distributed"):
        for _ in range(STEPS - 1):
            alone.warn_of_slow([1.0, 2.1, 1.0])
        alone.warn_of_slow([1.0, 1.1, 1.0])  # not in a row
        for _ in range(3):
            alone.warn_of_slow([0.0, 1.0, 0.0])  # ranks that only waited tell nothing
        assert caplog.messages == []
        for _ in range(3 * STEPS):
            alone.warn_of_slow([1.0, 2.1, 1.0])
    (said,) = caplog.messages
    assert said.startswith("rank 1 takes 2.1 times as long as the others")


def test_gradients_are_summed_over_cards_where_each_rank_has_one_of_its_own(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OverCards(ProcessGroupGloo):
        """In place of NCCL's group, which is made of the same."""

        Options = object

        def __init__(self, store: Any, rank: int, count: int, options: Any) -> None:
            super().__init__(store, rank, count, timedelta(seconds=60))

    cards = iter(range(len(ranks)))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", OverCards, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "card_of", lambda device: f"GPU-{next(cards)}")

    def summed(one: Ranks) -> Tensor:
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), 1.0 + one.rank)
        one.sum_gradients([parameter])
        assert type(one.card_group) is OverCards
        return parameter.grad

    expected = torch.full((3,), float(sum(range(1, len(ranks) + 1))))
    assert all(torch.equal(found, expected) for found in each(ranks, summed))


@pytest.mark.parametrize(("cards", "said", "refused"), [
    ([("GPU-a", 0, 8), ("GPU-a", 1, 8)], "", r"the ranks 0 and 1 are on one card \(GPU-a\)"),
    ([("GPU-a", 0, 8), ("GPU-a", 0, 8)], "", ""),
    ([("a", 0, 16 << 30), ("b", 1, 24 << 30)], "(16.00 GiB, 24.00 GiB): each plans its own memory", ""),
    ([("a", 0, 24 << 30), ("b", 1, 24 << 30)], "", ""),
], ids=["one card for both", "one place for both", "other sizes", "alike"])
def test_two_ranks_on_one_card_are_refused_and_cards_of_other_sizes_are_said_once(
    cards: list[tuple[str, int, int]], said: str, refused: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`cards` are the id, the local rank and the bytes of each rank's card."""
    told = [({}, *card) for card in cards]
    monkeypatch.setattr(checks, "described", lambda trainer, machine: {})
    monkeypatch.setattr(resources, "describe_machine", lambda model, device: {"card_bytes": None})
    for rank in range(2):
        with pytest.raises(ValueError, match=refused) if refused else nullcontext():
            checks.check_ranks_agree(SimpleNamespace(
                model=None, policy=SimpleNamespace(device=torch.device("cpu")), ranks=SimpleNamespace(
                    count=2, leads=not rank, process=ProcessRank(rank, 2, rank), gather=lambda what, own: told)))
    assert [said in record.getMessage() for record in caplog.records] == [True] * bool(said)


# Waiting for each other


def test_a_slow_rank_is_waited_for_as_long_as_it_gives_signs_of_life() -> None:
    with several(2, beat=0.02) as (fast, slow):
        rounds, exchange, enough = [0], slow.heartbeat.exchange, threading.Event()

        def counted() -> None:
            exchange()
            rounds[0] += 1
            if rounds[0] > 50:
                enough.set()

        slow.heartbeat.exchange = counted  # type: ignore[method-assign]

        assert outcomes([fast, slow], lambda one: (one is fast or enough.wait(60)) and one.meet("a step", 1)) == [
            [1, 1]] * 2


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_gives_no_sign_of_life_is_named_by_all_others(silent: int) -> None:
    with several(3, beat=0.02, patience=0.5) as ranks:
        dead = ranks.pop(silent)
        dead.heartbeat.close()
        found = outcomes(ranks, lambda one: one.meet("the step"))
        assert all(f"rank {silent} is lost: no sign of life for 0 s while rank" in str(error) for error in found)
        with pytest.raises(RankError, match=f"rank {silent} is lost"):
            ranks[0].meet("the next one")


def test_a_store_that_no_longer_answers_is_the_loss_of_the_first_rank() -> None:
    asked, answer = threading.Event(), threading.Event()
    with several(2, beat=0.02, patience=0.5) as (_, other):
        def silence() -> None:
            asked.set()
            answer.wait()

        other.heartbeat.exchange = silence  # type: ignore[method-assign]
        assert asked.wait(60)
        with pytest.raises(RankError, match="rank 0 is lost: no sign of life"):
            other.meet("the step")
        answer.set()


@pytest.mark.parametrize("reason", ["a reward divided by zero", "x" * 10_000, "é\n" * 5_000, "😀" * 5_000, "\ud800"])
def test_a_failure_reaches_the_others_with_its_reason(reason: str) -> None:
    def meet(one: Ranks) -> Any:
        if one.rank == 1:
            raise ZeroDivisionError(reason)
        return one.gather("it", 1) if one.rank else one.meet("it")

    with several(3, beat=0.02) as ranks:
        first, own, third = outcomes(ranks, meet)
        assert isinstance(own, ZeroDivisionError)
        assert all(f"rank 1 has failed: ZeroDivisionError: {reason[:400]}" in str(error) for error in (first, third))
        with pytest.raises(RankError):
            ranks[1].meet("the step")


@pytest.mark.parametrize("names", [("the evaluation", "the gradients"), ("😀" * 300, "x" * 300)])
def test_ranks_that_do_different_things_are_told_which(names: tuple[str, str]) -> None:
    with several(2, beat=0.02) as pair:
        found = outcomes(pair, lambda one: one.meet(names[one.rank]))
        assert all("has come to" in str(error) and all(name[:50] in str(error) for name in names) for error in found)


def test_an_error_that_came_from_another_rank_is_not_told_again() -> None:
    with several(2) as (one, other):
        other.heartbeat.fail(RankError("rank 0 is lost"))
        assert outcomes([one, other], lambda one: one.meet("a step", one.rank)) == [[0, 1]] * 2


# A start over a store in which a former start has left its things


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_are_in_one_part_of_the_store_and_each_start_has_its_own(count: int) -> None:
    store = HashStore()
    for _ in range(3):
        with ThreadPoolExecutor(count) as pool:
            parts = list(pool.map(lambda rank: part_of_start(store, rank, count, timedelta(seconds=60)), range(count)))
        assert not parts[0].check(["said"]), "nothing of a former start is there"
        parts[0].set("said", "by the first one")
        assert all(part.check(["said"]) for part in parts)


def test_what_a_former_process_wrote_is_not_taken_for_a_rank_that_has_come() -> None:
    store = HashStore()
    store.set("name/1", "former")
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not come within 0 s"):
        part_of_start(store, 0, 3, timedelta(seconds=0.05))
