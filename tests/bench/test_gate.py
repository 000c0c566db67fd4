"""The GPU gate: what it runs and skips on which machine, that a failure hides nothing, that it goes on where it
stopped, and what its last page says."""

import json
import os
import re
import select
import subprocess
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.common.rows import append_row, read_rows
from bench.gate import bench, last_page, runner
from bench.gate.bench import CALLS, DEFAULT, ENGINE, SECONDS_OF_A_CALL, Gate, earlier, ordered, times
from bench.gate.runner import Outcome, attempt, environment, pytest_verdict, why_not
from bench.gate.stages import CARD, CPU, PRETEND, STAGES, Piece, Setup

ROOT = Path(__file__).parents[2]
FORMS = (CARD, PRETEND, CPU)
WORKS = dict.fromkeys(("triton", "bitsandbytes", "datasets", "vllm", "vllm_bnb", "trl", "unsloth"), "works")
FACTS = {"gpu": "NVIDIA H200", "cpu": "a CPU", "cores": 16, "capability": [9, 0], "bf16": True, "card_gib": 139.8,
         "host_gib": 120.0, "disk_gib": 60.0, "works": WORKS, "versions": {"torch": "2.11.0"}, "commit": "abc",
         "date": "2026-01-01", "driver": "580"}


def setup(out: Path = Path("out"), form: str = CARD, **changes: Any) -> Setup:
    """A gate on a machine with everything, but for `changes` of its facts."""
    return Setup(form, out, out / "results", out / "weights", "run", FACTS | changes)


def pieces(form: str = CARD) -> list[Piece]:
    return [piece for stage in STAGES.values() for piece in stage(setup(form=form))]


def names(asked: Any, form: str = CARD) -> list[str]:
    return [piece.name for piece in ordered(pieces(form), asked)]


def called(*options: str) -> Result:
    """The command, in this process: its pieces run in others."""
    return CliRunner().invoke(bench.main, list(options))


@pytest.mark.parametrize("form", FORMS)
def test_every_stage_has_pieces_of_ten_minutes_at_most_on_every_kind_of_machine(form: str) -> None:
    for stage, make in STAGES.items():
        made = make(setup(form=form))
        assert made, f"nothing to do in {stage}"
        for piece in made:
            assert piece.name.split("/")[0] == stage
            assert 0 < piece.seconds <= 600
            module = ROOT / f"{piece.command[1].replace('.', '/')}.py"
            assert piece.command[0] == "-m" and (piece.junit or module.is_file()), f"{module} does not exist"
    assert len({piece.name for piece in pieces(form)}) == len(pieces(form)), "a name twice: one is taken for the other"


@pytest.mark.parametrize(("changes", "skipped", "why"), [
    ({"bf16": False, "capability": [7, 5]}, ["rollout/lowmem_grpo", "memory/step-16", "loop/lowmem_grpo"], "sm_75"),
    ({"works": WORKS | {"bitsandbytes": "broken"}}, ["tests/package on_card.trainer", "kernels/nf4_linear"], "broken"),
    ({"works": WORKS | {"vllm": "not installed"}}, ["tests/vllm on_card.vllm", "rollout/lowmem_grpo"], "not installed"),
    ({"works": {k: v for k, v in WORKS.items() if k != "unsloth"}}, ["peers/unsloth"], "unsloth: not installed"),
    ({"works": WORKS | {"vllm_bnb": "LookupError: too new"}}, ["rivals/trl_nf4", "rollout/vllm_bnb_lora"], "too new"),
    ({"card_gib": 14.6}, ["memory/step-16", "memory/step-24", "rollout/lowmem_grpo"], "the card has 14.6 GiB"),
    ({"host_gib": 4.0}, ["memory/step-16"], "4.0 GiB of host memory are free, 14 are needed"),
    ({"disk_gib": 3.0}, ["rollout/vllm_bf16_lora", "loop/lowmem_grpo"], "3.0 GiB of disk are free"),
])
def test_what_a_machine_lacks_is_skipped_with_the_reason_and_the_rest_runs(
    changes: dict[str, Any], skipped: list[str], why: str
) -> None:
    found = {piece.name: why_not(piece.needs, FACTS | changes) for piece in pieces()}
    for name in skipped:
        assert found[name] is not None, f"{name} would run"
    assert any(why in reason for reason in found.values() if reason)
    assert found["kernels/rms_norm"] is found["tests/kernels nf4"] is None, "what needs nothing of this is skipped too"
    assert {why_not(piece.needs, facts) for piece in pieces() for facts in (FACTS, {})} == {None}


def test_kernels_are_measured_in_float16_where_the_card_has_no_bfloat16() -> None:
    assert all("float16" not in piece.command for piece in STAGES["kernels"](setup()))
    assert all(piece.command[-2:] == ("--dtype", "float16") for piece in STAGES["kernels"](setup(bf16=False)))


def code(text: str, *arguments: str, name: str = "a/piece", **options: Any) -> Piece:
    """A piece that runs a few lines of Python."""
    return Piece(name, ("-c", text, *arguments), **options)


@pytest.mark.parametrize(("piece", "left", "status", "reasons"), [
    (code("print('fine')"), 100, "passed", [""]),
    (code("print('so'); raise SystemExit('because')"), 100, "failed", ["because", "exit code 1"]),
    (code("import threading; threading.Event().wait(600)", seconds=1), 100, "failed", ["stopped after 1 s"]),
    (code("print(1)", needs=("unsloth", "flying")), 100, "skipped", ["flying: not installed"]),
    (code("print(1)"), 5, "not run", ["5 s were left, it takes about 60"]),
    (code("print(1)", least=300), 100, "not run", ["100 s were left, it takes about 300"]),
    (code("print(1)", least=20), 100, "passed", [""]),
    (code("import threading; threading.Event().wait(600)", seconds=50, least=0), 1, "cut off", ["stopped after 1 s"]),
])
@pytest.mark.every(2)
def test_a_piece_passes_fails_is_stopped_or_is_not_begun_and_says_why(
    tmp_path: Path, piece: Piece, left: float, status: str, reasons: list[str]
) -> None:
    found = attempt(piece, setup(tmp_path), left, "abc")
    assert found.status == status
    assert all(reason in found.reason for reason in reasons)
    if status == "passed":
        assert (tmp_path / "logs" / "a-piece.log").exists()


def test_a_piece_that_is_stopped_leaves_no_child_behind_and_its_last_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over as soon as its child lives."""
    os.mkfifo(tmp_path / "pipe")
    pipe, wait, allowed = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), subprocess.Popen.wait, 77

    def heard() -> bytes:
        assert select.select([pipe], [], [], 60)[0], "the child lives, and says nothing"
        return os.read(pipe, 100)

    def hurried(process: Any, timeout: float | None = None) -> int:
        if timeout != allowed:
            return wait(process, timeout)
        assert heard() == b"lives\n"
        raise subprocess.TimeoutExpired(process.args, allowed)

    monkeypatch.setattr(subprocess.Popen, "wait", hurried)
    text = "import subprocess, sys; print('began', flush=True); subprocess.run(" \
           "['sh', '-c', 'echo lives; exec sleep 600'], stdout=open(sys.argv[1], 'w'))"
    found = attempt(code(text, str(tmp_path / "pipe"), seconds=allowed), setup(tmp_path), 100, "abc")
    assert (found.status, found.reason) == ("failed", f"stopped after {allowed} s; began")
    assert heard() == b"", "the child has ended"
    os.close(pipe)


def test_on_a_pretend_card_a_piece_gets_half_an_hour_and_its_loop_ends_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other programs, TRL's step and ours were stopped there after ten minutes, before they had begun."""
    allowed = list[float]()
    monkeypatch.setattr(runner, "run", lambda command, log, seconds, settings: allowed.append(seconds))
    for form in (PRETEND, CARD):
        (piece,) = [piece for piece in STAGES["rivals"](setup(tmp_path, form)) if piece.name == "rivals/trl"]
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "rivals-trl.log").touch()
        attempt(piece, setup(tmp_path, form), 9999, "abc")
        assert float(piece.command[piece.command.index("--time-limit") + 1]) < allowed[-1]
    assert allowed == [1800, 380]


def test_a_piece_whose_rows_all_lack_figures_measured_nothing(tmp_path: Path) -> None:
    text = "import sys; open(sys.argv[2], 'a').write(sys.argv[3] + chr(10))"
    found = []
    for row in ({"missing": "no engine"}, {"p50": 1.0}):
        piece = code(text, "--output", str(tmp_path / "rows.jsonl"), json.dumps(row))
        outcome = attempt(piece, setup(tmp_path), 1000, "abc")
        found.append((outcome.status, outcome.reason))
    assert found == [("skipped", "measured nothing: no engine"), ("passed", "")]


CASE = '<testcase classname="t" name="{}">{}</testcase>'
GOOD, SKIPPED = CASE.format("good", ""), CASE.format("skip", "<skipped/>")
WRONG = CASE.format("wrong", '<failure message="AssertionError: 1 is not 2"/>')
CHECKED = CASE.format("checked", '<failure message="ValueError: weight 1 has other code tables than weight 0"/>')
BROKEN = CASE.format("broken", '<failure message="TypeError: no such argument"/>')
ERROR = CASE.format("setup", '<error message="failed on setup: RuntimeError"/>')


@pytest.mark.parametrize(("cases", "statuses"), [
    ([GOOD, SKIPPED], ["passed", "passed", "passed"]),
    ([GOOD, WRONG, CHECKED], ["failed", "passed", "failed"]),  # a pretend card's values cannot be right
    ([GOOD, BROKEN], ["failed", "failed", "failed"]), ([GOOD, ERROR], ["failed", "failed", "failed"]),
    ([SKIPPED], ["failed", "passed", "passed"]),  # on a card, all skipped proves nothing
    (None, ["failed", "failed", "failed"]),
])
def test_pytest_is_judged_by_its_report(tmp_path: Path, cases: list[str] | None, statuses: list[str]) -> None:
    report = tmp_path / "report.xml"
    if cases is not None:
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert [pytest_verdict(report, form, "last")[0] for form in FORMS] == statuses


def test_the_last_page_names_every_piece_and_each_target_that_was_missed(tmp_path: Path) -> None:
    row = {"shape": "llama-3.1-8b", "context": 20480, "generations": 8, "device": "cuda", "stage": "+ 8-bit optimizer",
           "gpu": "NVIDIA L4"}
    for found in (row | {"gib": 16.0, "error": "out of memory: tried"},
                  row | {"gib": 24.0, "device_bytes": 9 * 2**30, "reserved_bytes": 10 * 2**30,
                         "used_bytes": 11 * 2**30, "planned_bytes": 8 * 2**30}):
        append_row(tmp_path / "results" / "memory.jsonl", found)
    outcomes = [Outcome("tests/kernels", "failed", 12.0, "1 failed: a|b"), Outcome("kernels/rope", "passed", 3.0),
                Outcome("peers/unsloth", "skipped", 0.0, "unsloth: not installed")]
    card, cpu = (last_page.document(setup(tmp_path, form), outcomes) for form in (CARD, CPU))
    assert "1 passed, 1 failed, 1 skipped" in card
    assert "| tests/kernels | failed | 12 | 1 failed: a/b |" in card
    assert "| peers/unsloth | skipped | 0 | unsloth: not installed |" in card
    assert "16 GiB of the card | fits | out of memory: tried | missed |" in card
    assert "24 GiB of the card | fits | 9.00 GiB, 10.00 reserved, 11.00 in use | met |" in card
    assert "24 GiB of the card | planned within 5% | 0.889 | missed |" in card
    assert "measures nothing" in cpu and "to reach" not in cpu


def test_without_a_card_an_unknown_stage_or_two_ways_of_asking_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for options, words in [((), "--dry-run"), (("--stages", "memory,speed"), "no stage speed; choose from environment"),
                           (("--call", "A", "--stages", "memory"), "leave out --stages, or --call")]:
        done = called(*options)
        assert done.exit_code == 2 and words in " ".join(done.output.split())


# The order


@pytest.mark.parametrize("form", FORMS)
def test_numbers_come_before_lists_of_tests_and_the_engine_before_all(form: str) -> None:
    order = names(DEFAULT, form)
    assert sorted([*order, "environment"]) == sorted(piece.name for piece in pieces(form)), "left out, or twice"
    first = ["tests/smoke vllm", "tests/smoke 4-bit"][: 1 if form == PRETEND else 2]  # no own engine on a pretend card
    assert order[: len(first)] == first
    rest = order[len(first) :]
    first_test = next(place for place, name in enumerate(rest) if name.startswith("tests/"))
    assert all(name.startswith("tests/") for name in rest[first_test:]), "numbers behind tests"


RIVALS = {"rivals/lowmem_grpo": 80.0, "rivals/trl": 220.0, "rivals/lowmem_grpo_16bit": 270.0, "rivals/trl_nf4": 410.0}


@pytest.mark.parametrize(("call", "lacks", "ends"), [  # seconds from the call's begin, with 20 s for the environment
    ("A", (), RIVALS | {"rivals/unsloth": 540.0}),
    ("A", ("unsloth",), RIVALS | {"rivals/sampling/vllm_bf16_lora": 490.0, "rivals/sampling/lowmem_grpo": 540.0}),
    ("B", (), {"rollout/lowmem_grpo": 170.0, "rollout/vllm_bf16_lora": 290.0, "loop/lowmem_grpo": 465.0,
               "kernels/nf4_linear": 525.0}),
    ("C", (), {"peers/trl": 240.0, "rollout/vllm_bnb_lora": 360.0, "kernels/linear_logprobs": 420.0,
               "memory/step-16": 510.0}),
])
def test_a_call_measures_rivals_first_and_says_what_does_not_fit_into_it(
    call: str, lacks: tuple[str, ...], ends: dict[str, float]
) -> None:
    assert SECONDS_OF_A_CALL == 560 < 600, "ten minutes, with time to unpack and to bring results back"
    found = times(ordered(pieces(), ("environment", *CALLS[call])), SECONDS_OF_A_CALL, lacks)
    begun = {name: end for name, end in found.items() if isinstance(end, float)}
    assert list({"environment": 20.0} | ends) == list(begun)[: len(ends) + 1]
    assert ends.items() <= begun.items() and max(begun.values()) <= 560
    assert not lacks or found["rivals/unsloth"] == "unsloth: not installed"
    assert call != "A" or lacks or found["rivals/sampling/lowmem_grpo"] == "20 s are left, it takes about 50"


def test_a_step_of_a_3b_model_is_compared_with_micro_batches_of_8_that_end_before_they_are_stopped() -> None:
    for piece in STAGES["rivals"](setup()):
        words = dict(zip(piece.command[2::2], piece.command[3::2], strict=True))
        assert (words["--shape"], words["--run"]) == ("3b", "run")
        if "sampling" not in piece.name:
            assert (words["--prompts"], words["--peer-batch"], words["--steps"]) == ("8", "8", "2")
            assert piece.least < float(words["--time-limit"]) < piece.seconds


def test_one_archive_takes_rows_logs_and_state_and_neither_weights_nor_what_is_large(tmp_path: Path) -> None:
    for name, size in (("gate.jsonl", 9), ("logs/a.log", 9), ("results/loop.jsonl", 9), ("weights/full/w.bin", 9),
                       ("profile/trace.json", bench.LARGEST + 1)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    bench.pack(setup(tmp_path), tmp_path / "gate.tgz")
    bench.pack(setup(tmp_path), tmp_path / "gate.tgz")
    with tarfile.open(tmp_path / "gate.tgz") as archive:
        assert [Path(name).name for name in archive.getnames()] == ["gate.jsonl", "a.log", "loop.jsonl"]


@pytest.mark.parametrize(("asked", "meant"), [
    (["profile", "memory/step", "memory/step-16"], ["profile/decode", "profile/train", "profile/host", "memory/step-16",
                                                    "memory/step-24"]),
    (["rollout/lowmem_grpo"], ["rollout/lowmem_grpo"]), (["tests/smoke vllm"], ["tests/smoke vllm"]),
])
def test_a_name_that_is_a_pieces_own_means_this_one_and_a_beginning_means_all_in_the_order_of_asking(
    asked: list[str], meant: list[str]
) -> None:
    assert names(asked) == meant


def test_every_file_with_a_test_for_a_card_is_run() -> None:
    """A file of tests that uses the mark and that the gate does not take for one would never run on a card."""
    run = {Path(piece.command[-1]) for piece in pieces() if piece.junit}
    here = Path(__file__).parents[1]
    marks = re.compile(r"^@gpu$|marks=(pytest\.mark\.)?gpu|^from card import .*(DEVICES|on_both)", re.MULTILINE)
    marked = {path for path in here.rglob("test_*.py") if marks.search(path.read_text())}
    assert len(marked) > 12 and marked == run


def test_a_file_whose_tests_for_a_card_all_need_vllm_is_not_run_without_them() -> None:
    """pytest would find no test in it, which counts as a failure on a card."""
    assert [name for name in names(["tests/package"]) if "vllm" in name] == []


# A run of the gate


def test_the_environment_comes_first_and_each_piece_is_recorded_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretended(piece: Piece, now: Setup, left: float, commit: str) -> Outcome:
        if piece.name == "environment":
            append_row(now.results / "environment.jsonl", FACTS)
        return Outcome(piece.name, "passed" if now.facts or piece.name == "environment" else "failed")

    monkeypatch.setattr(bench, "attempt", pretended)
    gate = Gate(setup(tmp_path), 100, [], "abc")
    gate.run((ENGINE, "rollout/lowmem_grpo"))
    names = ["environment", ENGINE, "rollout/lowmem_grpo"]
    assert [row["name"] for row in read_rows(tmp_path / "gate.jsonl") if row["status"] == "passed"] == names
    assert [outcome.name for outcome in gate.outcomes] == names and "3 passed" in (tmp_path / "gate.md").read_text()


def test_on_a_pretend_card_memory_that_sleeps_is_counted_and_other_values_are_zeros() -> None:
    found = {piece.name: environment(piece, setup(form=PRETEND)) for piece in pieces(PRETEND)}
    read, cached = "NULL_CUDA_READ_ZEROS", "PYTORCH_NO_CUDA_MEMORY_CACHING"
    for name in ("tests/smoke vllm", "tests/smoke vllm wakes on a full card", "rollout/lowmem_grpo"):
        assert read in found[name] and cached not in found[name], "sleep mode's pool is part of torch's cache"
    assert cached in found["loop/lowmem_grpo"] and read not in found["loop/lowmem_grpo"]
    assert not {read, cached} & found["memory/step-16"].keys(), "the allocator's own peaks are measured there"
    assert all(variables["VLLM_USE_V2_MODEL_RUNNER"] == "0" for variables in found.values())


def test_the_machine_is_looked_at_in_every_call() -> None:
    before = [asdict(Outcome(name, "passed")) | {"vllm_runner": ""} for name in ("environment", "kernels/rope")]
    done = Gate(setup(), 100, before, "abc").done
    assert list(done) == ["kernels/rope"], "facts of another machine would be taken for this one's"


def test_what_passed_on_this_commit_is_not_run_again_unless_asked_for(tmp_path: Path) -> None:
    for name, status, commit, form in [("a", "passed", "abc", CARD), ("b", "failed", "abc", CARD),
                                       ("c", "passed", "old", CARD), ("d", "passed", "abc", CPU)]:
        append_row(tmp_path / "gate.jsonl", asdict(Outcome(name, status, run="r1", commit=commit, form=form)))
    assert list(Gate(setup(tmp_path), 100, earlier(tmp_path, CARD, "abc"), "abc").done) == ["a"]
    assert earlier(tmp_path, CARD, "abc+changes") == []
