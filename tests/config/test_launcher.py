"""Which of several processes this one is, the card that it takes, and its part of a whole."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tables import every_row

from lowmem_grpo.config import launcher
from lowmem_grpo.config.launcher import (
    ProcessRank,
    balanced,
    beside_others,
    leave_busy_cores,
    one_process,
    take_card,
    this_process,
    used_by_others,
)

GIVEN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*GIVEN, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_a_process_is_the_only_one_and_no_card_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_process() == ProcessRank(0, 1, 0) and this_process().leads
    launched(monkeypatch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    take_card()
    assert this_process() == ProcessRank() and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_launched_process_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **GIVEN, LOCAL_WORLD_SIZE="1")  # which a vLLM in the process sets for itself
    assert this_process() == ProcessRank(3, 4, 1) and not this_process().leads
    monkeypatch.delenv("LOCAL_RANK")
    assert this_process() == ProcessRank(3, 4, 3), "one machine"


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "-1"}, {"RANK": "x"}, {"WORLD_SIZE": "two"},
                                   {"LOCAL_RANK": "-2"}, {"LOCAL_RANK": "4"}])
def test_variables_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]) -> None:
    launched(monkeypatch, **GIVEN | wrong)
    with pytest.raises(ValueError, match=r"do not fit together: RANK=.*torchrun"):
        this_process()
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="RANK=None"):
        this_process()


@pytest.mark.parametrize(("visible", "taken"), [(None, "1"), ("4,7", "7"), ("", "")])
def test_a_process_sees_only_its_own_card(monkeypatch: pytest.MonkeyPatch, visible: str | None, taken: str) -> None:
    launched(monkeypatch, **GIVEN)
    launched(monkeypatch, **{} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    take_card()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_a_rank_without_a_card_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **GIVEN, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(ValueError, match=r"rank 3 is process 1 of its machine, and has no card.*lists 1 \(0\)"):
        take_card()


def test_what_needs_one_process_is_refused_by_name_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    one_process("the server")
    launched(monkeypatch, **GIVEN)
    with pytest.raises(ValueError, match="the server needs one process, and this is rank 3 of 4: start it without tor"):
        one_process("the server")


@every_row("count", [0, 1, 2, 5, 8, 13])
@every_row("ranks", [1, 2, 3, 4])
def test_every_prompt_belongs_to_one_rank_in_order_and_no_rank_has_two_more_than_another(
    count: int, ranks: int
) -> None:
    parts = [ProcessRank(rank, ranks).share(count) for rank in range(ranks)]
    assert [place for part in parts for place in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_groups_are_divided_by_their_tokens_keep_their_order_and_are_dealt_out_the_same_way_everywhere() -> None:
    costs = [900, 10, 20, 30, 40, 800, 50]
    parts = balanced(costs, float, 2)
    assert sorted(cost for part in parts for cost in part) == sorted(costs)
    assert max(map(sum, parts)) <= 4 / 3 * 925  # the best division: 930 and 920
    assert all([cost for cost in costs if cost in part] == part for part in parts)
    assert balanced([], float, 3) == [[], [], []]
    assert balanced([7], float, 2) == [[7], []]
    assert balanced(list(range(5)), lambda _: 1.0, 2) == [[0, 2, 4], [1, 3]]


# Of four seconds: what two cores computed, what this process did of it, variables, and the threads left of two.
@every_row(("busy", "own", "card", "variables", "left"), [
    ((4.0, 3.8), 3.9, False, {}, 1), ((4.0, 0.0), 4.0, False, {}, 2), ((4.0, 1.5), 4.0, False, {}, 2),
    ((4.0, 4.0), 0.2, False, {}, 1), ((4.0, 3.8), 3.9, True, {}, 2),
    ((4.0, 3.8), 3.9, False, {"OMP_NUM_THREADS": "2"}, 2), ((4.0, 3.8), 3.9, False, {"MKL_NUM_THREADS": "2"}, 2),
])
def test_a_run_leaves_cores_to_programs_that_keep_them_busy_unless_the_user_chose(
    busy: tuple[float, float], own: float, card: bool, variables: dict[str, str], left: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.delenv(name, raising=False)
        launched(patch, **variables)
        stat, clock, threads = Path(folder, "stat"), [0.0, 0.0], [2]

        def compute(*seconds: float) -> None:
            lines = [f"cpu{core} {int(spent * 100)} 0 0 999 99 0 0 0" for core, spent in enumerate((*seconds, 400.0))]
            stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 1"]))

        compute(100.0, 100.0)
        patch.setattr(launcher, "STAT", stat)
        patch.setattr(launcher.time, "monotonic", lambda: clock[0])
        patch.setattr(launcher.time, "process_time", lambda: clock[1])
        patch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)  # the third is not this process's
        patch.setattr(launcher, "torch", SimpleNamespace(
            cuda=SimpleNamespace(is_available=lambda: card), get_num_threads=lambda: threads[0],
            set_num_threads=lambda count: threads.__setitem__(0, count)))
        before = used_by_others()
        clock[:] = 4.0, own
        compute(*(100.0 + spent for spent in busy))
        leave_busy_cores(before)
        assert threads == [left]


def test_where_nothing_tells_of_cores_all_threads_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "STAT", tmp_path / "none")
    before = torch.get_num_threads()
    leave_busy_cores(used_by_others())
    assert torch.get_num_threads() == before


def test_a_trainer_leaves_busy_cores_while_it_trains_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, clock = [2], iter((0.0, 10.0))
    monkeypatch.setattr(launcher, "gives_way", lambda: True)
    monkeypatch.setattr(launcher, "used_by_others", lambda: (now := next(clock), now))  # one core, all the time
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(launcher, "torch", SimpleNamespace(
        get_num_threads=lambda: threads[0], set_num_threads=lambda count: threads.__setitem__(0, count)))
    with beside_others():
        assert threads == [1]
    assert threads == [2]
