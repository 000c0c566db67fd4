"""The terminal view: on a terminal, in a pipe, and with hostile model text."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from episodes import episode, game, turn
from rich.console import Console
from rich.text import Text

from lowmem_grpo.runs.accuracy import Answers, accuracy_by_kind
from lowmem_grpo.runs.views import live
from lowmem_grpo.runs.views.console import print_accuracy, print_kinds, print_samples
from lowmem_grpo.runs.views.live import BLOCKS, SAMPLE_SECONDS, LiveView, sparkline
from lowmem_grpo.types import Rollout

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"
LOGS = {
    "step": 3, "reward": 0.75, "rewards/correct/mean": 0.5, "rewards/[red]format/mean": 0.25, "kl": 0.0002,
    "completions/mean_length": 231.4, "entropy": 0.412, "tokens_per_second": 811.6, "memory/peak_bytes": 3 * 2**29,
    "time/generate": 0.6, "time/reward": 0.05, "time/train": 0.3, "time/idle": 0.05, "groups/total": 8,
    "groups/with_signal": 5, "loss": float("nan"),
}


def console(terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, _environ={"TERM": "xterm"})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def state(step: int) -> Any:
    return SimpleNamespace(global_step=step, max_steps=60)


def run(view: LiveView, *logs: dict[str, Any]) -> None:
    view.on_train_begin(None, state(0), None)
    for step, entry in enumerate(logs, start=1):
        view.on_log(None, state(step), None, logs=entry)


def piped_line(logs: dict[str, Any]) -> str:
    piped = console(terminal=False)
    run(LiveView(piped), logs)
    return written(piped)


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the view, which stands still unless a test moves it."""
    found = [100.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def test_piped_output_has_one_plain_line_a_log_with_the_key_numbers_and_none_without() -> None:
    piped = console(terminal=False, width=40)
    view = LiveView(piped)
    run(view, LOGS | {"eval_reward": 0.5}, LOGS | {"memory/peak_bytes": 300 * 2**20}, {},
        {"loss": float("nan"), "note": "text"})
    view.on_train_end(None, state(2), None)
    first, second = written(piped).splitlines()
    assert second.startswith("step 2/60  reward 0.750  correct 0.500  [red]format 0.250  length 231  entropy 0.412")
    assert "kl 2.00e-04  tokens/s 812  memory 1.50 GiB" in first and "memory 300.0 MiB" in second
    assert "time: generate 60% reward 5% train 30% idle 5%  groups with signal 5/8  left 0 s" in first
    assert first.isascii() and "\x1b" not in first and "eval_reward 0.500" in first


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_cuts_nothing_off_and_shows_the_spread_and_a_sample_now_and_then(
    width: int, now: list[float]
) -> None:
    terminal = console(terminal=True, width=width)
    view = LiveView(terminal)
    run(view, LOGS | {"reward": 0.0}, LOGS | {"reward_std": 0.125})
    for expected in ("step 2/60", "▁█", "1.50 GiB", "5/8", "GRPO", "[red]format"):
        assert expected in written(terminal)
    for text, seconds in (("first\x1b[2J [red]words", 0), ("too soon", SAMPLE_SECONDS / 2)):
        now[0] += seconds
        view.on_step_end(None, state(1), None, groups=[SimpleNamespace(rollouts=[Rollout([], [], "stop", text)])])
    shown = console(terminal=False, width=width)
    shown.print(view.panel())
    text = written(shown)
    for expected in ("0.750 ± 0.125", "generate 60% reward 5% train 30% idle 5%", "first\ufffd[2J [red]words"):
        assert expected in text
    assert "…" not in text and "too soon" not in text
    now[0] += SAMPLE_SECONDS
    view.on_step_end(None, state(2), None, groups=[SimpleNamespace(rollouts=[Rollout([], [], "stop", "later" * 999)])])
    shown.print(view.panel())
    assert "later" in written(shown) and len(written(shown).splitlines()) < 60
    view.close()


TOLD = {  # of what is measured: the words on a line and on the panel; none of them where it is not measured
    "episodes": ({"turns/mean": 2.25, "episodes/answer": 0.75, "episodes/max_turns": 0.25, "episodes/context": 0.0,
                  "tools/call_frequency": 1.5, "tools/failure_frequency": 0.04, "tools/waiting_share": 0.06},
                 ["ended by", "answer 75% max_turns 25%", "1.50 calls an episode", "4% of calls", "6% of sampling"]),
    "sampling": ({"time/sampling/prefill_s": 0.25, "time/sampling/full_s": 3.5, "time/sampling/tail_s": 1.125},
                 ["prompts 0.25 s full width 3.50 s tail 1.12 s"]),
    "estimate": ({"step_time": 2.513, "time/planned_step_s": 2.3}, ["2.51 s, estimated 2.30 s"]),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_measured_is_told_on_a_line_and_on_the_panel(case: str) -> None:
    measured, said = TOLD[case]
    terminal = console(terminal=True)
    run(LiveView(terminal), LOGS | measured)
    line, before = piped_line(LOGS | measured), piped_line(LOGS | {"step_time": 2.513})
    for words in said:
        assert words in line and words in written(terminal) and words not in before
    assert line.isascii() and "context" not in line
    assert case != "episodes" or "turns 2.2  length" in line


@pytest.mark.parametrize("width", [60, 120])
def test_an_episode_on_the_panel_says_who_said_what_and_cuts_its_middle(width: int) -> None:
    view = LiveView(console(terminal=True, width=width))
    found = {"role": "tool", "name": "search", "content": "long " * 99}
    hostile = turn("one\ntwo\x1b[2J [red]three", found, reward=0.5)
    middle = [turn(f"middle {number}", {"role": "user", "content": "go on"}) for number in range(20)]
    short = ["an episode, reward 1.000, ended by done", "\u25cf 1. (reward 0) 50", "\u25cb user: Lower.",
             "\u25cf 2. (reward 1) 25"]
    long = ["one two\ufffd[2J [red]three", "\u25cb tool search: long", "\u2026", "...", "\u25cf 22. end"]
    for rollout, expected in ((game(reward=1.0), short), (episode(hostile, *middle, turn("end")), long)):
        view.sampled_at = -SAMPLE_SECONDS
        view.on_step_end(None, state(0), None, groups=[SimpleNamespace(rollouts=[rollout])])
        shown = console(terminal=False, width=width)
        shown.print(view.panel())
        for words in expected:
            assert words in written(shown)
        assert len(written(shown).splitlines()) < 24 and "middle 9" not in written(shown)


def test_a_notebook_gets_one_panel_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    display = pytest.importorskip("IPython.display")
    handle = SimpleNamespace(update=lambda page: shown.append(page.data))
    monkeypatch.setattr(display, "display", lambda page, display_id: shown.append(f"new {page.data}") or handle)
    view = LiveView(Console(file=io.StringIO(), force_jupyter=True, width=80))
    run(view, LOGS, LOGS | {"rewards/<b>/mean": 0.5})
    view.on_train_end(None, state(2), None)
    assert len(shown) == 3 and [page.startswith("new <pre") for page in shown] == [True, False, False]
    assert "step 2/60" in shown[-1] and "&lt;b&gt;" in shown[-1] and "<b>" not in shown[-1]


@pytest.mark.parametrize("ending", ["close", "on_train_end"])
def test_the_terminal_is_restored_once_however_the_view_ends(ending: str) -> None:
    terminal = console(terminal=True)
    view = LiveView(terminal)
    view.close()
    assert written(terminal) == ""  # before training there is nothing to restore
    run(view, LOGS)
    assert written(terminal).count(HIDE_CURSOR) == 1 and SHOW_CURSOR not in written(terminal)
    view.close() if ending == "close" else view.on_train_end(None, state(1), None)
    view.close()
    assert written(terminal).count(SHOW_CURSOR) == 1 and view.live is None


def test_time_left_counts_only_steps_done_since_a_resume(now: list[float]) -> None:
    view = LiveView(console(terminal=False))
    view.on_train_begin(None, state(50), None)
    assert view.time_left() == "unknown"
    now[0] += 20
    view.on_log(None, state(52), None, logs=LOGS)
    assert view.time_left() == "1 min 20 s"


@pytest.mark.parametrize(("values", "drawn"), [
    ([0, 1, 2, 3, 4, 5, 6, 7], BLOCKS), ([5, -5], "█▁"), ([0.3] * 5, "▁" * 5), ([], ""),
])
def test_a_sparkline_spans_lowest_to_highest_and_averages_a_long_history(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn
    assert sparkline([value for value in values for _ in range(2)], width=len(values)) == drawn
    assert len(sparkline(list(range(1001)), width=32)) == 32


def test_samples_stand_side_by_side_and_model_text_is_never_markup_or_terminal_control() -> None:
    terminal = console(terminal=True)
    print_samples(terminal, [
        {"prompt": "2 + 2?", "answer": "4", "before": "five", "after": "four", "right_before": False,
         "right_after": True},
        {"prompt": "[/nothing]", "before": "[red]x[/red]", "after": "\x1b[2J\x07y\ud800"}])
    text = Text.from_ansi(written(terminal)).plain
    verdicts = next(line for line in text.splitlines() if "2 + 2?" in line)
    assert verdicts.split()[-4:] == ["✗", "wrong", "✓", "right"]
    row = next(line for line in text.splitlines() if "five" in line)
    assert row.index("five") < row.index("four") and "expected: 4" in text
    assert "[/nothing]" in text and "[red]x[/red]" in text and "\ufffd[2J" in text
    assert "\x1b[2J" not in written(terminal) and "\x07" not in written(terminal)
    written(terminal).encode("utf-8")


def test_accuracy_is_printed_with_its_interval() -> None:
    piped = console(terminal=False, width=30)
    print_accuracy(piped, 0.5, 0.75, 100)
    print_accuracy(piped, 0.5, 0.75, 100, (0.13, 0.36))
    before, after, change, *_, paired = written(piped).splitlines()
    assert before == "accuracy before  50.0%  (95% interval 40.4% to 59.6%)"
    assert after == "accuracy after   75.0%  (95% interval 65.7% to 82.5%)"
    assert change == "change +25.0 points on 100 problems"
    assert paired == "change +25.0 points (95% interval +13.0 to +36.0) on 100 problems"


def test_the_accuracies_of_kinds_are_printed_with_the_kind_that_changed_most_first() -> None:
    piped = console(terminal=False, width=60)
    before, after = (Answers([["a"]] * 3, right, 0, 3, 0, {}) for right in (
        [[False], [True], [False]], [[False], [True], [True]]))
    print_kinds(piped, accuracy_by_kind([["[b]commas"], ["[b]commas"], ["[b]commas", "title"]], before, after))
    rows = [line.split() for line in written(piped).splitlines() if "%" in line]
    assert rows == [["title", "1", "0%", "100%"], ["[b]commas", "3", "33%", "67%"]]
