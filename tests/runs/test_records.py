"""Records on disk: whole lines, of the steps that count, and never another run's."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lowmem_grpo.runs import records as module
from lowmem_grpo.runs.records import RecordError, RunRecords, completion_lines, json_object, read_lines, to_line
from lowmem_grpo.types import Rollout, RolloutGroup

NAN = float("nan")


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    """A run directory that has just begun."""
    made = RunRecords(tmp_path / "run")
    made.start_run()
    return made


def group(*texts: str, prompt: Any = "2 + 2?") -> RolloutGroup:
    rollouts = [Rollout([5, 6], [-0.1, -0.2], "stop", text=text, rewards={"right": 1.0, "form": None}, reward=1.0,
                        advantage=0.5) for text in texts]
    return RolloutGroup({"prompt": prompt}, [1, 2, 3], rollouts)


def steps(records: RunRecords, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (records.run_dir / name).read_text().splitlines()]


def test_every_completion_of_a_step_has_a_line_with_its_rewards(records: RunRecords) -> None:
    records.completions(7, [group("4", "5"), group("six", prompt=[{"role": "user", "content": "3 + 3?"}])])
    lines = read_lines(records.run_dir / "completions.jsonl")
    assert [line["completion"] for line in lines] == ["4", "5", "six"]
    assert lines[0] == {
        "step": 7, "prompt": "2 + 2?", "completion": "4", "rewards": {"right": 1.0, "form": None}, "reward": 1.0,
        "advantage": 0.5, "tokens": 2, "finish_reason": "stop",
    }
    assert lines[2]["prompt"] == "3 + 3?"


@pytest.mark.parametrize(
    "text", ["two\nlines", "\u2028\u2029\x85\x0b\x0c\r\x1e", "漢字 é", '"quoted" \\', "\x00\x1b[31m"]
)
def test_any_text_stays_on_one_line_and_comes_back_as_it_was(records: RunRecords, text: str) -> None:
    records.completions(1, [group(text)])
    records.completions(2, [group("after")])
    assert [line["completion"] for line in read_lines(records.run_dir / "completions.jsonl")] == [text, "after"]
    records.rewind(1)
    assert [line["completion"] for line in read_lines(records.run_dir / "completions.jsonl")] == [text]


def test_nan_and_infinity_are_null_so_that_any_json_reader_can_read_the_line() -> None:
    line = to_line({"a": NAN, "b": [float("inf"), 1.0], "c": {"d": -float("inf")}, "e": None, "f": Path("x")})
    assert json.loads(line, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.0], "c": {"d": None}, "e": None,
                                                            "f": "x"}


def test_rewinding_drops_later_steps_and_a_half_written_line(records: RunRecords) -> None:
    for step in (1, 2, 3, 4):
        records.metrics({"step": step})
        assert (records.run_dir / "metrics.jsonl").read_text().endswith("\n")
        records.completions(step, [group("4", "5")])
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (records.run_dir / name).open("a") as file:
            file.write('{"step": 2, "text": "é')
    records.rewind(2)
    assert steps(records) == [1, 2]
    assert steps(records, "completions.jsonl") == [1, 1, 2, 2]
    records.metrics({"step": 3})
    assert steps(records) == [1, 2, 3]
    records.append("nonfinite.jsonl", [{"step": 3}])  # it is not rewound, and so nothing of it is lost
    resumed = RunRecords(records.run_dir)
    resumed.rewind(3)
    assert resumed.missing(dict(records.lines)) == []
    resumed.rewind(0)
    assert steps(resumed) == []
    assert len(resumed.missing(dict(records.lines))) == 2


def test_a_line_cut_inside_a_character_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xe2\x82')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_rewinding_without_files_makes_none(records: RunRecords) -> None:
    records.rewind(0)
    assert list(records.run_dir.iterdir()) == []


@pytest.mark.parametrize("held", ["metrics.jsonl", "completions.jsonl", "summary.json", "checkpoint-5"])
def test_another_run_is_never_overwritten_unasked(tmp_path: Path, held: str) -> None:
    if held.startswith("checkpoint"):
        (tmp_path / held).mkdir()
    else:
        (tmp_path / held).write_text("{}\n")
    with pytest.raises(RecordError, match=rf"already holds a run \({held}\).*resume=true.*overwrite_output_dir=true"):
        RunRecords(tmp_path).refuse_another_run()


def test_a_new_run_moves_the_earlier_ones_aside_whole_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunRecords(tmp_path).refuse_another_run()
    assert RunRecords(tmp_path).start_run() is None
    names = {"metrics.jsonl", "completions.jsonl", "summary.json", "report.html", "nonfinite.jsonl", "checkpoint-5",
             "adapter"}
    for number in ("1", "2"):
        for name in names:
            (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).write_text(number)
        if number == "2":  # a process was killed while it moved them
            (tmp_path / "earlier" / ".moving").mkdir()
            (tmp_path / "summary.json").rename(tmp_path / "earlier" / ".moving" / "summary.json")
        assert RunRecords(tmp_path).start_run() == tmp_path / "earlier" / number
        assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "earlier"}
        assert {path.name for path in (tmp_path / "earlier" / number).iterdir()} == names
    for number in ("1", "2"):
        assert (tmp_path / "earlier" / number / "summary.json").read_text() == number


def test_the_summary_is_merged_and_leaves_no_draft_behind(records: RunRecords) -> None:
    records.summary({"status": "running", "seed": 1, "loss": NAN})
    records.summary({"status": "finished", "steps": 5})
    summary = json.loads((records.run_dir / "summary.json").read_text())
    assert summary == {"status": "finished", "seed": 1, "loss": None, "steps": 5}
    assert [path.name for path in records.run_dir.iterdir()] == ["summary.json"]


def test_a_full_disk_leaves_whole_lines_and_says_what_to_do(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.FileIO):
        """A file that takes ten bytes, then no more."""

        room = 10

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written, self.room = super().write(data[: self.room]) or 0, 0
            return written

    records.metrics({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *_, **__: FullDisk(path, "ab"))
        with pytest.raises(RecordError, match=r"metrics\.jsonl was not written: No space left .*df -i.*resume_from_ch"):
            records.metrics({"step": 2, "reward": 0.5})
    assert steps(records) == [1]


def test_prompts_and_rewards_of_no_value_are_recorded_as_null() -> None:
    (line,) = completion_lines(1, [RolloutGroup({}, [1], [Rollout([2], [0.0], "length")])])
    assert (line["reward"], line["rewards"], line["finish_reason"]) == (None, {}, "length")


def cut(run: Path) -> None:
    os.truncate(run / "metrics.jsonl", 3)


LOSSES: dict[str, Any] = {  # what happens to a run's folder while the run goes on
    "deleted": shutil.rmtree, "moved": lambda run: run.rename(run.with_name("elsewhere")), "cut": cut,
    "a file deleted": lambda run: (run / "completions.jsonl").unlink(),
    "deleted and made anew": lambda run: (shutil.rmtree(run), (run / "checkpoint-2").mkdir(parents=True)),
    "replaced by a file": lambda run: (shutil.rmtree(run), run.write_text("")),
    "another run's": lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'),
}


@pytest.mark.parametrize("write", ["metrics", "completions", "summary"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lines_that_are_lost_while_the_run_goes_on_end_it(loss: str, write: str, records: RunRecords) -> None:
    for step in (1, 2):
        records.metrics({"step": step, "reward": 0.25})
        records.completions(step, [group("4")])
    LOSSES[loss](records.run_dir)
    with pytest.raises(RecordError, match=r"lost lines that this run wrote|summary.json was not written"):
        {"metrics": lambda: records.metrics({"step": 3}), "summary": lambda: records.summary({"status": "finished"}),
         "completions": lambda: records.completions(3, [group("5")])}[write]()


def test_a_resumed_run_may_be_shorter_than_the_one_before(records: RunRecords) -> None:
    for step in (1, 2, 3):
        records.metrics({"step": step, "reward": 0.25})
    records.rewind(1)
    records.metrics({"step": 2})
    assert steps(records) == [1, 2]
    records.start_run()
    records.metrics({"step": 1})
    assert steps(records) == [1]


STEPS = ["null", '"1"', "true", "[1]", "{}", "-1", "0.5", "9007199254740993", "1e308", "-1e308", "1" + "0" * 400,
         "1e999", "NaN"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[:20])
def test_a_step_that_is_no_whole_number_is_named_with_its_line(step: str, records: RunRecords) -> None:
    path = records.run_dir / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 has the step .*; a step is a whole number from 0 to"):
        read_lines(path)
    with pytest.raises(RecordError, match=r"line 2 has the step .*mend the line, or delete it, then resume"):
        records.rewind(3)
    assert [line["step"] for line in records.rewind(1)] == [1], "what is damaged after the step does not matter"


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "-1e999", "NaN", "-Infinity"],
                         ids=lambda number: number[:9])
def test_numbers_that_no_float_holds_are_missing(number: str) -> None:
    assert json_object(f'{{"step": 1, "held": [{number}, 5, 0.5, 1e308]}}'.encode()) == {
        "step": 1, "held": [None, 5, 0.5, 1e308]}


@pytest.mark.parametrize("deep", ['{"a": ' * 250 + "1" + "}" * 250, "[" * 900 + "]" * 900, "[" * 10**5],
                         ids=["objects", "lists", "open"])
def test_a_record_too_deep_for_what_reads_it_is_refused(deep: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "extra": {deep}}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is not JSON: it is nested too deeply"):
        read_lines(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_pipe_is_refused_before_it_is_opened(name: str, records: RunRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(records.run_dir / name)
    with monkeypatch.context() as instead:
        instead.setattr(Path, "open", Mock(side_effect=AssertionError("it is opened")))
        instead.setattr(Path, "read_bytes", Mock(side_effect=AssertionError("it is opened")))
        for use in (lambda: records.rewind(1), lambda: records.append(name, [{"step": 1}])):
            with pytest.raises(RecordError, match=rf"{name} is a folder, a pipe or a device; a file is needed"):
                use()


def test_a_summary_that_is_a_pipe_or_has_gigabytes_is_put_aside_unread(records: RunRecords) -> None:
    path = records.run_dir / "summary.json"
    for make in (lambda: os.mkfifo(path), lambda: path.write_text("{}") and os.truncate(path, 3 << 30)):
        make()
        with patch.object(Path, "read_bytes", side_effect=AssertionError("it is read")):
            assert records.known() == {}
        assert not path.exists() and len([*records.run_dir.glob("summary.json.broken-*")]) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_line_longer_than_any_record_is_refused_and_no_more_of_it_is_held(
    name: str, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST", 1000)
    path = records.run_dir / name
    path.write_text('{"step": 1}\n')
    os.truncate(path, 10**6)  # zeros, as a power cut leaves them
    with pytest.raises(ValueError, match=rf"{name}, line 2 has 0\.0 MiB or more, which no record has"):
        read_lines(path)
    with pytest.raises(RecordError, match=r"line 2 has .* or more, which no record has; mend the line, or delete it"):
        records.rewind(1)
    assert path.stat().st_size == 10**6
