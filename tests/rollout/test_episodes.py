"""Episodes from the first prompt to their ends: what environments may do wrong, and how they may begin anew; nothing is
lost or left open."""

import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from scripted import FREE, TEMPLATE, Hang, ScriptedEngine, played
from tables import every_row
from template_tokenizers import tokenizer_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.environments import Anew
from lowmem_grpo.environments.env_spec import EnvSpecs, Factories
from lowmem_grpo.environments.episode import EpisodeBounds
from lowmem_grpo.environments.protocol import EnvironmentFailedError
from lowmem_grpo.environments.tools.results import FinalResult
from lowmem_grpo.environments.workers import WorkerJob, Workers
from lowmem_grpo.models.packing import sequences_of
from lowmem_grpo.rollout import episodes
from lowmem_grpo.types import RolloutGroup

ROW = {"prompt": [{"role": "user", "content": ""}], "size": 3}
open_now: Counter[str] = Counter()
counting = threading.Lock()


class Game:
    """Pays each turn by its number; over after three."""

    turns = 3

    def __init__(self) -> None:
        with counting:
            open_now[type(self).__name__] += 1

    def reset(self, size: int = 3) -> str:
        self.number = 0
        return f"Of {size}."

    def step(self, reply: str) -> Any:
        self.number += 1
        return f"after {self.number}: {reply.split()[-1]}", 1.0 * self.number, self.number >= self.turns

    def state_key(self) -> str:
        return f"s{self.number}"

    def close(self) -> None:
        with counting:
            open_now[type(self).__name__] -= 1


@pytest.fixture(autouse=True)
def closed() -> Any:
    open_now.clear()
    yield
    assert not any(open_now.values()), f"left open: {open_now}"


def numbered() -> Any:
    """A policy that says a1, a2, ... however often it is asked."""
    lock, asked = threading.Lock(), iter(range(1, 10_000))

    def says(prompt: str) -> str:
        with lock:
            return f"a{next(asked)}"

    return says


def test_turns_bridges_masks_pay_and_states_of_a_game() -> None:
    [[one]] = played(lambda prompt: f"say {prompt.count('after')}", [ROW], Game, n=1)
    tokenizer = tokenizer_of(TEMPLATE)
    assert [turn.text for turn in one.turns] == ["say 0", "say 1", "say 2"] and one.ending == "done"
    assert [turn.reward for turn in one.turns] == [1.0, 2.0, 3.0]
    assert [turn.state for turn in one.turns] == ["s0", "s1", "s2"]
    assert one.opening == [{"role": "user", "content": "Of 3."}] and one.text == "say 2"
    assert one.trained is not None and len(one.trained) == len(one.completion_ids) == len(one.rollout_logprobs)
    assert one.num_trained == sum(len(turn.completion_ids) for turn in one.turns)
    drawn = [token for token, ours in zip(one.completion_ids, one.trained, strict=True) if ours]
    assert drawn == [token for turn in one.turns for token in turn.completion_ids]
    assert all((value == -0.5) == ours for value, ours in zip(one.rollout_logprobs, one.trained, strict=True))
    whole = [*one.turns[0].prompt_ids, *one.completion_ids]
    assert whole == [*one.turns[-1].prompt_ids, *one.turns[-1].completion_ids]
    messages = [*one.opening, *({"role": r, "content": c} for turn in one.turns for r, c in (
        ("assistant", turn.text), *(("user", reply["content"]) for reply in turn.replies)))]
    rendered: Any = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
    assert tokenizer.decode(whole) == rendered.rstrip("\n")


class Unlike(Game):
    """Begins differently each time."""

    made = iter(range(1000))

    def reset(self, size: int = 3) -> str:
        return f"{super().reset(size)} Number {next(self.made)}."


def test_members_that_begin_differently_have_prompts_of_their_own() -> None:
    [group] = played(numbered(), [ROW], Unlike, n=3)
    first = group[0].turns[0].prompt_ids
    assert not group[0].splits
    assert [one.splits[0].start for one in group[1:]] == [0, 0]
    assert [one.splits[0].prompt_ids for one in group[1:]] == [one.turns[0].prompt_ids for one in group[1:]]
    assert all(one.turns[0].prompt_ids != first for one in group[1:])


@pytest.mark.parametrize(("bounds", "ending", "turns"), [
    ({"turns": 2}, "max_turns", 2), ({"completion": 20}, "context", 1), ({"turn": 2}, "done", 3),
    ({"completion": 2}, "max_tokens", 1),
])
def test_the_policys_own_ends_keep_their_pay(bounds: dict[str, Any], ending: str, turns: int) -> None:
    [[one]] = played(lambda prompt: "a b c d", [ROW], Game, n=1, **bounds)
    assert (one.ending, len(one.turns)) == (ending, turns)
    assert one.turns[-1].reward == turns, "the environment's pay for the last turn is kept"
    assert len(one.completion_ids) <= bounds.get("completion", 4096)
    assert one.trained is not None and one.trained[-1], "an episode ends with what the policy drew"


class Broken(Game):
    """Fails in the way, and as often, as it is told."""

    way, left = "", 0
    hang: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.fails = Broken.left > 0

    def trouble(self, where: str) -> Any:
        if self.fails and self.way.startswith(where):
            Broken.left -= 1
            self.fails = False
            if self.way.endswith("hangs"):
                Broken.hang()
            raise ZeroDivisionError(f"in {where}")

    def reset(self, size: int = 3) -> str:
        self.trouble("reset")
        return super().reset(size)

    def step(self, reply: str) -> Any:
        self.trouble("step")
        observation, reward, done = super().step(reply)
        wrong = {"nan": float("nan"), "text": "much"}.get(self.way) if self.fails else None
        if wrong is not None:
            self.fails = False
            Broken.left -= 1
            return observation, wrong, done
        return observation, reward, done

    def close(self) -> None:
        super().close()
        self.trouble("close")


@pytest.mark.parametrize("way", ["reset", "step", "nan", "text", "reset hangs", "step hangs"])
def test_an_episode_that_fails_once_is_played_again_and_a_second_failure_leaves_it_out(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(monkeypatch)
    monkeypatch.setattr(Broken, "hang", hang)
    Broken.way, Broken.left = way, 0
    left_out = "timeout" if way.endswith("hangs") else "environment_error"
    rows = [ROW | {"environment": name} for name in ("broken", "sound")]
    for fails, expected in ((1, {"done": 4}), (40, {"done": 2, left_out: 2})):
        Broken.left = fails
        groups = played(numbered(), rows, {"broken": Broken, "sound": Game}, n=2)
        assert Counter(one.ending for group in groups for one in group) == expected
        Broken.left = 0
        hang.end()  # what hung lets go, and closes nothing twice
    assert "an environment failed: " in caplog.text and bool(hang.threads) == way.endswith("hangs")
    assert not hang.threads or f"Broken.{way.split()[0]} took more than 60 s" in caplog.text


def test_a_close_that_fails_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Broken.way, Broken.left = "close", 2  # of the sample, which is closed at once, and of the episode
    [[one]] = played(numbered(), [ROW], Broken, n=1)
    assert one.ending == "done" and "could not be closed" in caplog.text


def test_an_error_of_the_engine_or_ctrl_c_closes_every_environment() -> None:
    for error in (KeyboardInterrupt, RuntimeError("the engine broke")):
        def says(prompt: str, error: Any = error) -> str:
            if "after" in prompt:
                raise error
            return "on"

        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            played(says, [ROW], Game, n=4)


def test_ctrl_c_does_not_wait_for_an_environment_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call may take an hour by the settings; it is left behind after the seconds that closing may take."""
    monkeypatch.setattr(episodes, "CLOSING", 0.1)
    hangs, release, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(Game):
        def step(self, reply: str) -> Any:
            if next(first, False):
                hangs.set()
                release.wait(60)
                ended.set()
            return super().step(reply)

    collect, pressed, first, asked = Workers.collect, list[bool](), iter([True]), threading.Event()

    def says(prompt: str) -> str:
        asked.set()
        return "on"

    def interrupted(workers: Workers, wait: bool) -> list[WorkerJob]:
        if not pressed and hangs.wait(5.0 if asked.is_set() else 0.0):  # else it would wait for the one that hangs
            pressed.append(True)
            raise KeyboardInterrupt
        return collect(workers, wait)

    monkeypatch.setattr(Workers, "collect", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            played(says, [ROW], Slow, n=2, call_seconds=3600.0)
        assert not ended.is_set(), "it was waited for"
    finally:
        release.set()
        open_now.clear()  # the one that hung may be open


# Tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


def large(size: int) -> str:
    """Give a long text.

    Args:
        size: how long
    """
    return "begin " + "x" * size + " end"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_once(text: str) -> Any:
    """A policy that says this, and then that it is done."""
    return lambda prompt: "done" if "tool_response" in prompt.split("assistant")[-2] else text


QUESTION = {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}


@every_row(("said", "results", "failures"), [
    (call("add", a=2, b=3), ["5"], 0), (call("add", a=2, b=3) + call("add", a=4, b=4), ["5", "8"], 0),
    (call("add", a=2), ["b"], 1), (call("multiply", a=2), ["there is no tool 'multiply'"], 1),
    ("<tool_call>\n{broken</tool_call>", [""], 1),
])
def test_calls_are_answered_in_their_order_and_failures_are_counted(
    said: str, results: list[str], failures: int
) -> None:
    [[one]] = played(tools_once(said), [QUESTION], tools=[add], n=1)
    assert one.ending == "answer" and [turn.text for turn in one.turns] == [said, "done"]
    replies = one.turns[0].replies
    assert len(replies) == len(results) and all(part in reply["content"] for part, reply in zip(
        results, replies, strict=True))
    assert (one.turns[0].calls, one.turns[0].failures) == (len(results), failures)
    assert one.environment is None


def test_calls_that_cannot_be_read_three_times_end_the_episode() -> None:
    [[one]] = played(lambda prompt: "<tool_call>\n{broken</tool_call>", [QUESTION], tools=[add], n=1)
    assert one.ending == "parse_error" and len(one.turns) == 3


def hand_in(answer: str) -> str:
    """Hand in the answer.

    Args:
        answer: The answer.
    """
    return FinalResult(f"received {answer}")


def test_a_final_result_ends_the_episode_after_the_other_calls_of_its_turn() -> None:
    said = call("hand_in", answer="4") + call("add", a=2, b=3)
    [[one]] = played(lambda prompt: said, [QUESTION], tools=[add, hand_in], n=1, max_tool_tokens=30)
    assert one.ending == "done" and len(one.turns) == 1
    assert [reply["content"] for reply in one.turns[0].replies] == ["received 4", "5"]
    [[one]] = played(lambda prompt: call("hand_in", answer="long " * 99), [QUESTION], tools=[hand_in], n=1,
                     max_tool_tokens=60)
    assert one.ending == "done" and "left out" in one.turns[0].replies[0]["content"]  # it is cut like any other


def test_a_tool_result_that_does_not_fit_is_rolled_back() -> None:
    [[one]] = played(tools_once(call("large", size=4000)), [QUESTION], tools=[large], n=1, completion=120)
    assert one.ending == "context" and one.turns[0].replies == [] and one.trained == [True] * len(one.completion_ids)


def test_a_template_that_rewrites_history_splits_only_where_it_is_asked_to_render_anew() -> None:
    thinks = lambda prompt: "<think>\nhm\n</think>\n\nyes"  # noqa: E731
    [[appended]] = played(thinks, [ROW], Game, n=1, template="qwen3")
    assert not appended.splits and "hm" in tokenizer_of("qwen3").decode(appended.turns[-1].prompt_ids)
    [[anew]] = played(thinks, [ROW], Game, n=1, template="qwen3", append=False)
    assert len(anew.splits) == 2 and "hm" not in tokenizer_of("qwen3").decode(anew.turns[-1].prompt_ids)
    assert anew.num_trained == appended.num_trained
    pieces = [*[split.start for split in anew.splits], len(anew.completion_ids)]
    for number, (start, end) in enumerate(zip([0, *pieces], pieces, strict=False)):
        prompt = anew.splits[number - 1].prompt_ids if number else None
        whole = [*(prompt or anew.turns[0].prompt_ids), *anew.completion_ids[start:end]]
        assert whole == [*anew.turns[number].prompt_ids, *anew.turns[number].completion_ids]


THOUGHT, FINAL = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>"


def test_an_environment_of_gpt_oss_gets_the_answer_and_never_the_thoughts() -> None:
    """Its text without marks is "analysishmassistantfinalLook 3"; an episode that is rendered anew has no thoughts."""
    says = lambda prompt: f"{THOUGHT}{FINAL}Look 3"  # noqa: E731
    [[appended]] = played(says, [ROW], Game, n=1, template="gptoss")
    [[anew]] = played(says, [ROW], Game, n=1, template="gptoss", append=False)
    decode = tokenizer_of("gptoss").decode
    for one in (appended, anew):
        assert [turn.message for turn in one.turns] == [
            {"role": "assistant", "thinking": "hm", "content": "Look 3"}] * 3
        assert [reply["content"] for turn in one.turns[:2] for reply in turn.replies] == ["after 1: 3", "after 2: 3"]
    held = [decode(one.turns[1].prompt_ids).partition("Of 3.<|end|><|start|>assistant")[2] for one in (appended, anew)]
    after = "<|start|>user<|message|>after 1: 3<|end|><|start|>assistant"
    assert held == [f"{THOUGHT}{FINAL}Look 3<|return|>{after}", f"{FINAL}Look 3<|end|>{after}"]
    assert not appended.splits and len(anew.splits) == 2


@every_row("append", [True, False])
def test_a_call_of_gpt_oss_is_answered_and_its_thought_stays_with_it(append: bool) -> None:
    call = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 2, \"b\": 3}<|call|>"
    says = lambda prompt: f"{FINAL}It is 5." if "functions.add to=" in prompt else THOUGHT + call  # noqa: E731
    [[one]] = played(says, [QUESTION], tools=[add], n=1, template="gptoss", append=append)
    first, last = one.turns
    assert [reply["content"] for reply in first.replies] == ["5"] and first.message["thinking"] == "hm"
    assert (one.ending, last.message["content"]) == ("answer", "It is 5.")
    after = tokenizer_of("gptoss").decode(last.prompt_ids).rpartition("2 + 3?<|end|><|start|>assistant")[2]
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|><|start|>assistant'
    template = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>'
    assert after == THOUGHT + (call if append else template) + result


# What runs beside what


def test_environments_of_many_episodes_work_side_by_side() -> None:
    all_of_them = threading.Barrier(32, timeout=200)

    class Meeting(Game):
        def step(self, reply: str) -> Any:
            all_of_them.wait()
            return super().step(reply)

    groups = played(numbered(), [ROW] * 4, Meeting, n=8)
    assert [one.ending for group in groups for one in group] == ["done"] * 32
    assert all(turn.seconds > 0 for group in groups for one in group for turn in one.turns)


def test_no_more_episodes_than_one_and_a_half_for_each_slot_are_open_and_groups_end_in_their_order() -> None:
    most: list[int] = []

    class Counted(Game):
        def step(self, reply: str) -> Any:
            most.append(open_now["Counted"])
            return super().step(reply)

    groups = played(numbered(), [ROW] * 4, Counted, n=4, slots=4)
    assert max(most) <= 6 and [[one.ending for one in group] for group in groups] == [["done"] * 4] * 4


def test_runs_are_the_same_however_long_the_environments_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def sequence(factory: Any) -> tuple[list[list[int]], list[str]]:
        asked: list[str] = []

        def says(prompt: str) -> str:
            asked.append(prompt)
            return f"n{len(asked)}"

        groups = played(says, [ROW | {"size": size} for size in range(4)], factory, n=2)
        return [one.completion_ids for group in groups for one in group], asked

    begun, collected, more, collect = itertools.count(), list[WorkerJob](), threading.Condition(), Workers.collect

    class Uneven(Game):
        """The first one to begin does each of its steps when what the others did is collected."""

        def reset(self, size: int = 3) -> str:
            self.is_slow = next(begun) == 0
            return super().reset(size)

        def step(self, reply: str) -> Any:
            with more:
                assert not self.is_slow or more.wait_for(lambda: len(collected) >= 8 * self.number + 15, 30)
            return super().step(reply)

    def noted(workers: Workers, wait: bool) -> list[WorkerJob]:
        found = collect(workers, wait)
        with more:
            collected.extend(found)
            more.notify_all()
        return found

    expected = sequence(Game)
    monkeypatch.setattr(Workers, "collect", noted)
    assert sequence(Uneven) == expected


# An environment that lets the conversation begin anew

BOARD = {"prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": ""}]}


class Board:
    """Shows the last board only; over after three moves."""

    def reset(self, **row: Any) -> Any:
        self.moves = 0
        return "board 0"

    def step(self, reply: str) -> Any:
        self.moves += 1
        return Anew(f"board {self.moves}"), 1.0, self.moves == 3


@pytest.mark.parametrize("append", [True, False])
def test_each_turn_sees_the_rows_prompt_and_the_last_observation_and_is_a_sequence_of_its_own(append: bool) -> None:
    [[one]] = played(lambda prompt: "up", [BOARD], Board, n=1, append=append)
    tokenizer = tokenizer_of(TEMPLATE)
    system: Any = BOARD["prompt"][0]
    expected = [tokenizer.apply_chat_template([system, {"role": "user", "content": f"board {number}"}], tokenize=False,
                                              add_generation_prompt=True) for number in range(3)]
    assert [tokenizer.decode(turn.prompt_ids) for turn in one.turns] == expected
    assert one.ending == "done" and [turn.reward for turn in one.turns] == [1.0] * 3
    assert [split.prompt_ids for split in one.splits] == [turn.prompt_ids for turn in one.turns[1:]]
    assert one.trained == [True] * len(one.completion_ids), "nothing comes between two boards"
    group = RolloutGroup(BOARD, one.turns[0].prompt_ids, [one])
    [sequences] = sequences_of(group, [one])
    assert [([*each.prompt, *each.ids], each.mask.tolist()) for each in sequences] == [
        ([*turn.prompt_ids, *turn.completion_ids], [True] * len(turn.completion_ids)) for turn in one.turns]


def test_the_budget_of_tokens_is_that_of_one_sequence_and_max_turns_bounds_the_episode() -> None:
    [[one]] = played(lambda prompt: "up", [BOARD], Board, n=1, completion=8)
    assert (one.ending, len(one.turns)) == ("done", 3)
    [[one]] = played(lambda prompt: "up", [BOARD], Board, n=1, turns=2)
    assert (one.ending, len(one.turns)) == ("max_turns", 2)


class OnlyOnce(Board):
    """Begins anew after the first move, and goes on as usual after the second."""

    def step(self, reply: str) -> Any:
        observation, reward, done = super().step(reply)
        return (observation if self.moves == 1 else "and on"), reward, done


def test_after_a_new_beginning_the_history_grows_again() -> None:
    [[one]] = played(lambda prompt: "up", [BOARD], OnlyOnce, n=1)
    assert len(one.splits) == 1 and one.splits[0].prompt_ids == one.turns[1].prompt_ids
    before = [*one.turns[1].prompt_ids, *one.turns[1].completion_ids]
    assert one.turns[2].prompt_ids[: len(before)] == before


class Same(Board):
    """Shows the same board again."""

    def step(self, reply: str) -> Any:
        return Anew("board 0"), *super().step(reply)[1:]


def test_a_board_that_is_shown_again_has_the_prompt_of_the_group() -> None:
    [[one]] = played(lambda prompt: "up", [BOARD], Same, n=1)
    drawn = len(one.turns[0].completion_ids)
    assert [(split.start, split.prompt_ids) for split in one.splits] == [(drawn, None), (2 * drawn, None)]
    assert len({tuple(turn.prompt_ids) for turn in one.turns}) == 1


def test_anew_may_be_the_first_observation_too() -> None:
    class Begins(Board):
        def reset(self, **row: Any) -> Any:
            return Anew(super().reset())

    [[one]] = played(lambda prompt: "up", [BOARD], Begins, n=1)
    assert one.opening[-1]["content"] == "board 0" and len(one.splits) == 2


# A broken environment ends a run at once and shows its own lines; one that is out for a while ends it in time


class Outage:
    """Fails as long as it is told to."""

    left = 0

    def reset(self) -> None:
        """The prompt is all there is."""

    def step(self, reply: str) -> tuple[str, float, bool]:
        Outage.left -= 1
        return ("", 1.0, True) if Outage.left < 0 else {}["missing"]


def batches(stopping: Callable[[], bool] = lambda: False) -> Callable[[], list[str]]:
    """A function that plays two episodes more, and returns how they ended."""
    specs = EnvSpecs(tokenizer_of(TEMPLATE), [], Factories(Outage), 1024, {})
    player, engine = episodes.Episodes(specs, EpisodeBounds(**FREE), stopping), ScriptedEngine(lambda prompt: "a")

    def play() -> list[str]:
        prompts, params = [Prompt(dict(QUESTION), [], "")], SamplingParams(n=2, max_tokens=64)
        (group,) = player.play(engine, prompts, params)  # type: ignore[arg-type]
        return sorted(one.ending for one in group)

    return play


@pytest.mark.parametrize(("way", "told"), [
    ("reset", "raised KeyError: 'missing'"), ("step", "raised KeyError: 'missing'"), ("exit", r"sys.exit\(3\)"),
    ("nothing", "reset returned nothing and the row has no prompt"),
])
def test_a_broken_environment_ends_the_run_at_once_and_shows_its_own_lines(
    way: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Mistaken:
        def reset(self) -> Any:
            return {}["missing"] if way == "reset" else None

        def step(self, reply: str) -> Any:
            return {}["missing"] if way == "step" else sys.exit(3)

    row = {"prompt": [{"role": "user", "content": ""}]} if way == "nothing" else QUESTION
    with pytest.raises(EnvironmentFailedError, match=f"all 2 episodes failed, so there is nothing.*{told}"):
        played(lambda prompt: "a", [row], Mistaken)
    if way in ("reset", "step"):
        assert caplog.text.count("in " + way) == 1 and "lowmem_grpo/environments" not in caplog.text


def test_an_outage_ends_the_run_after_three_batches() -> None:
    play = batches()
    Outage.left = 0
    assert play() == ["done", "done"]
    Outage.left = 1000
    assert play() == play() == ["environment_error"] * 2
    with pytest.raises(EnvironmentFailedError, match="all 2 episodes failed in 3 batches in a row"):
        play()


def test_no_failed_episode_is_played_again_once_the_run_is_to_end() -> None:
    Outage.left = 1
    assert batches(lambda: True)() == ["done", "environment_error"]


def test_a_first_prompt_that_does_not_fit_is_told_with_its_length(caplog: pytest.LogCaptureFixture) -> None:
    class Long:
        def reset(self) -> str:
            return "word " * 500

        def step(self, reply: str) -> tuple[str, float, bool]:
            raise AssertionError

    ((one, _),) = played(lambda prompt: "a", [QUESTION], Long, context=100)
    assert one.ending == "context" and "what reset returned did not fit in 2 episodes" in caplog.text
