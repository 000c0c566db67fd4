"""The GPU gate: what it runs and skips on which machine, that a failure hides nothing, that it goes on where it
stopped, and what its last page says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
HEADER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from bench.gate import facts, last_page, runner, stages
from bench.gate.runner import Outcome, attempt
from bench.gate.stages import CARD, CPU, PRETEND, STAGES, Piece, Setup
out = Path(sys.argv[1])
WORKS = {name: "works" for name in ("triton", "bitsandbytes", "datasets", "vllm", "trl", "unsloth", "plotly")}
FACTS = {"gpu": "NVIDIA H200", "cpu": "a CPU", "cores": 16, "capability": [9, 0], "bf16": True, "card_gib": 139.8,
         "host_gib": 120.0, "disk_gib": 60.0, "works": WORKS, "versions": {"torch": "2.11.0"}, "commit": "abc",
         "date": "2026-01-01", "driver": "580"}
def setup(form=CARD, **changes):
    return Setup(form, out, out / "results", out / "weights", "run", FACTS | changes)
def command(code):
    return ("-c", code)
"""


def gate(code: str, folder: Path) -> Any:
    """What a few lines within the gate's modules print, as JSON."""
    done = subprocess.run([sys.executable, "-c", HEADER + code, str(folder)], cwd=BENCH.parent, capture_output=True,
                          text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def call(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run([sys.executable, "-m", "bench.gate.bench", *options], cwd=BENCH.parent, capture_output=True,
                          text=True,
                          timeout=230, env=os.environ | {"COLUMNS": "150"} | environment, check=False)


def test_every_stage_has_pieces_of_ten_minutes_at_most_on_every_kind_of_machine(tmp_path: Path) -> None:
    found = gate("""
print(json.dumps({form: {name: [[p.name, p.seconds, p.command[0]] for p in stage(setup(form))]
                         for name, stage in STAGES.items()} for form in (CARD, PRETEND, CPU)}))""", tmp_path)
    for form, by_stage in found.items():
        names = [name for pieces in by_stage.values() for name, _, _ in pieces]
        assert len(set(names)) == len(names), f"{form}: a name twice, so that one is taken for the other"
        for stage, pieces in by_stage.items():
            assert pieces, f"{form} has nothing to do in {stage}"
            for name, seconds, what in pieces:
                assert name.split("/")[0] == stage
                assert 0 < seconds <= 600
                assert what == "-m" or Path(what).exists(), f"{what} does not exist"
    assert set(found["card"]) == {"environment", "tests", "kernels", "memory", "rollout", "loop", "learner", "peers",
                                  "profile"}


@pytest.mark.parametrize(("changes", "skipped", "why"), [
    ('bf16=False, capability=[7, 5]', ["rollout/lowmem_grpo", "memory/step-16", "loop/lowmem_grpo"], "sm_75"),
    ('works=WORKS | {"bitsandbytes": "broken"}', ["tests/package on_card.trainer", "kernels/nf4_linear"], "broken"),
    ('works=WORKS | {"vllm": "not installed"}', ["tests/vllm on_card.vllm", "rollout/lowmem_grpo"], "not installed"),
    ('works={k: v for k, v in WORKS.items() if k != "unsloth"}', ["peers/unsloth"], "unsloth: not installed"),
    ('card_gib=14.6', ["memory/step-16", "memory/step-24", "rollout/lowmem_grpo"], "the card has 14.6 GiB"),
    ('host_gib=4.0', ["memory/step-16"], "4.0 GiB of host memory are free, 14 are needed"),
    ('disk_gib=3.0', ["rollout/vllm_bf16_lora", "loop/lowmem_grpo"], "3.0 GiB of disk are free"),
])
def test_what_a_machine_lacks_is_skipped_with_the_reason_and_the_rest_runs(
    tmp_path: Path, changes: str, skipped: list[str], why: str
) -> None:
    found = gate(f"""
now = setup({changes})
print(json.dumps({{p.name: facts.why_not(p.needs, now.facts) for s in STAGES.values() for p in s(now)}}))""", tmp_path)
    for name in skipped:
        assert found[name] is not None, f"{name} would run"
    assert any(why in reason for reason in found.values() if reason)
    assert found["kernels/rms_norm"] is None, "a stage that needs nothing of this is skipped as well"
    assert found["tests/kernels nf4"] is None


def test_a_machine_with_everything_skips_nothing_and_one_that_is_unknown_tries_all(tmp_path: Path) -> None:
    found = gate("""
known, unknown = setup(), replace(setup(), facts={})
print(json.dumps([facts.why_not(p.needs, s.facts) for s in (known, unknown) for f in STAGES.values() for p in f(s)]))
""", tmp_path)
    assert set(found) == {None}


def test_kernels_are_measured_in_float16_where_the_card_has_no_bfloat16(tmp_path: Path) -> None:
    found = gate("""
both = [STAGES["kernels"](setup(bf16=has)) for has in (True, False)]
print(json.dumps([[list(p.command) for p in pieces] for pieces in both]))""", tmp_path)
    assert all("float16" not in command for command in found[0])
    assert all(command[-2:] == ["--dtype", "float16"] for command in found[1])


def test_a_piece_passes_fails_or_is_stopped_and_says_why(tmp_path: Path) -> None:
    found = gate("""
pieces = [Piece("a/good", command("print('fine')")),
          Piece("a/bad", command("print('so'); raise SystemExit('because')")),
          Piece("a/slow", command("import time; print('began', flush=True); time.sleep(60)"), seconds=3),
          Piece("a/absent", command("print(1)"), needs=("unsloth", "flying")), Piece("a/late", command("print(1)"))]
lefts = [100, 100, 100, 100, 5]
print(json.dumps([vars(attempt(p, setup(), left, "abc")) for p, left in zip(pieces, lefts)]))""", tmp_path)
    assert [row["status"] for row in found] == ["passed", "failed", "failed", "skipped", "not run"]
    assert "because" in found[1]["reason"] and "exit code 1" in found[1]["reason"]
    assert "stopped after 3 s" in found[2]["reason"] and "began" in found[2]["reason"]
    assert found[3]["reason"] == "flying: not installed"
    assert (tmp_path / "logs" / "a-good.log").read_text().endswith("fine\n")


def test_what_the_call_had_no_time_for_is_cut_off_and_not_failed(tmp_path: Path) -> None:
    found = gate("""
row = attempt(Piece("a/slow", command("import time; time.sleep(60)"), seconds=50, least=0), setup(), 2, "abc")
print(json.dumps(row.row()))""", tmp_path)
    assert found["status"] == "cut off"


def test_a_piece_that_is_stopped_leaves_no_child_behind(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; open(sys.argv[1], 'w').write(str(subprocess.Popen(['sleep', '90']).pid)); " \
           "time.sleep(90)"
    gate(f"""
piece = Piece("a/slow", ("-c", {code!r}, str(out / "child")), seconds=4)
print(json.dumps(attempt(piece, setup(), 100, "abc").row()))""", tmp_path)
    child = Path("/proc") / (tmp_path / "child").read_text()
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


def test_pytest_is_judged_by_its_report(tmp_path: Path) -> None:
    case = '<testcase classname="t" name="{}">{}</testcase>'

    def report(name: str, *cases: str) -> None:
        (tmp_path / f"{name}.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")

    good, skipped = case.format("good", ""), case.format("skip", "<skipped/>")
    wrong = case.format("wrong", '<failure message="AssertionError: 1 is not 2"/>')
    checked = case.format("checked", '<failure message="ValueError: weight 1 has other code tables than weight 0"/>')
    broken = case.format("broken", '<failure message="TypeError: no such argument"/>')
    error = case.format("setup", '<error message="failed on setup: RuntimeError"/>')
    reports = {"ok": [good, skipped], "values": [good, wrong, checked], "broken": [good, broken],
               "error": [good, error], "none": [skipped]}
    for name, cases in reports.items():
        report(name, *cases)
    found = gate("""
print(json.dumps([[runner.pytest_verdict(out / f"{name}.xml", form, "last")[0] for form in (CARD, PRETEND, CPU)]
                  for name in ("ok", "values", "broken", "error", "none", "absent")]))""", tmp_path)
    assert found == [
        ["passed", "passed", "passed"],
        ["failed", "passed", "failed"],  # a pretend card computes nothing: its values cannot be right
        ["failed", "failed", "failed"],
        ["failed", "failed", "failed"],
        ["failed", "passed", "passed"],  # on a card, all skipped proves nothing
        ["failed", "failed", "failed"],
    ]


def test_the_last_page_names_every_piece_and_each_target_that_was_missed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    row = {"shape": "llama-3.1-8b", "context": 20480, "generations": 8, "device": "cuda", "stage": "+ 8-bit optimizer"}
    rows = [row | {"gib": 16.0, "error": "out of memory: tried"},
            row | {"gib": 24.0, "device_bytes": 9 * 2**30, "reserved_bytes": 10 * 2**30, "used_bytes": 11 * 2**30,
                   "planned_bytes": 8 * 2**30}]
    (tmp_path / "results" / "memory.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = gate("""
outcomes = [Outcome("tests/kernels", "failed", 12.0, "1 failed: a|b"), Outcome("kernels/rope", "passed", 3.0),
            Outcome("peers/unsloth", "skipped", 0.0, "unsloth: not installed")]
print(json.dumps([last_page.document(setup(form), outcomes) for form in (CARD, CPU)]))""", tmp_path)
    card, cpu = page
    assert "1 passed, 1 failed, 1 skipped" in card
    assert "| tests/kernels | failed | 12 | 1 failed: a/b |" in card
    assert "| peers/unsloth | skipped | 0 | unsloth: not installed |" in card
    assert "16 GiB of the card | fits | out of memory: tried | missed |" in card
    assert "24 GiB of the card | fits | 9.00 GiB, 10.00 reserved, 11.00 in use | met |" in card
    assert "24 GiB of the card | planned within 5% | 0.889 | missed |" in card
    assert "measures nothing" in cpu and "to reach" not in cpu


def test_without_a_card_the_command_says_so_and_an_unknown_stage_is_refused_by_name() -> None:
    done = call(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--dry-run" in done.stderr
    done = call("--stages", "memory,speed")
    assert done.returncode == 2 and "no stage speed; choose from environment, kernels" in done.stderr


def test_a_piece_whose_rows_all_lack_figures_measured_nothing(tmp_path: Path) -> None:
    found = gate("""
code = "import sys; open(sys.argv[2], 'a').write(sys.argv[3] + chr(10))"
def piece(name, row):
    return Piece(name, (*command(code), "--output", str(out / "rows.jsonl"), json.dumps(row)))
pieces = [piece("a/ours", {"missing": "no engine"}), piece("a/one", {"p50": 1.0})]
print(json.dumps([attempt(p, setup(), 1000, "abc").row() for p in pieces]))""", tmp_path)
    assert [(row["status"], row["reason"]) for row in found] == [
        ("skipped", "measured nothing: no engine"), ("passed", ""),
    ]


def test_a_piece_is_not_begun_on_a_card_where_less_time_is_left_than_it_takes(tmp_path: Path) -> None:
    found = gate("""
pieces = [Piece("a/long", command("print(1)"), least=300), Piece("a/short", command("print(1)"), least=20)]
print(json.dumps([attempt(p, setup(), 100, "abc").row() for p in pieces]))""", tmp_path)
    assert [row["status"] for row in found] == ["not run", "passed"]
    assert found[0]["reason"] == "100 s were left, it takes about 300"


ORDER = """
from bench.gate.order import CALLS, DEFAULT, ENGINE, SECONDS_OF_A_CALL, ordered
def pieces(form=CARD):
    return [piece for stage in STAGES.values() for piece in stage(setup(form))]
def names(asked, form=CARD):
    return [piece.name for piece in ordered(pieces(form), asked)]
"""


def test_numbers_come_before_lists_of_tests_and_the_engine_before_all(tmp_path: Path) -> None:
    found = gate(ORDER + """
print(json.dumps({form: [names(DEFAULT, form), [p.name for p in pieces(form)]] for form in (CARD, PRETEND, CPU)}))
""", tmp_path)
    for form, (order, every) in found.items():
        assert sorted([*order, "environment"]) == sorted(every), f"{form}: a piece is left out, or comes twice"
        assert order[:2] == ["tests/smoke vllm", "tests/smoke 4-bit"]
        first_test = next(place for place, name in enumerate(order[2:]) if name.startswith("tests/"))
        assert all(name.startswith("tests/") for name in order[2:][first_test:]), "numbers behind tests"


def test_the_three_calls_hold_what_25_minutes_of_a_card_are_for_in_the_order_of_its_worth(tmp_path: Path) -> None:
    calls, least, limit = gate(ORDER + """
least = {piece.name: piece.least for piece in pieces()}
print(json.dumps([[names(CALLS[number]) for number in (1, 2, 3)], least, SECONDS_OF_A_CALL]))""", tmp_path)
    assert calls[0][:6] == ["tests/smoke vllm", "tests/smoke 4-bit", "kernels/linear_logprobs", "kernels/nf4_linear",
                            "memory/step-16", "tests/kernels logprob_kernels"]
    assert all(name.startswith("tests/kernels ") for name in calls[0][5:]) and len(calls[0]) == 14
    assert calls[1] == ["rollout/lowmem_grpo", "rollout/vllm_bf16_lora", "loop/lowmem_grpo", "profile/decode"]
    assert calls[2][:4] == ["learner/arithmetic", "rollout/vllm_bnb_lora", "profile/train", "tests/vllm on_card.vllm"]
    assert all(name.startswith("tests/") for name in calls[2][3:])
    for numbers in (calls[0][:5], calls[1], calls[2][:3]):
        assert sum(least[name] for name in numbers) + 30 <= limit < 600, "they do not fit into a call"


def test_a_name_that_is_a_pieces_own_means_this_one_and_a_beginning_means_all_in_the_order_of_asking(
    tmp_path: Path,
) -> None:
    found = gate(ORDER + """
print(json.dumps([names(asked) for asked in (["profile", "memory/step", "memory/step-16"], ["rollout/lowmem_grpo"],
                                             ["tests/smoke vllm"])]))""", tmp_path)
    assert found == [["profile/decode", "profile/train", "memory/step-16", "memory/step-24"], ["rollout/lowmem_grpo"],
                     ["tests/smoke vllm"]]


def test_every_file_with_a_test_for_a_card_is_run(tmp_path: Path) -> None:
    """A file of tests that uses the mark and that the gate does not take for one would never run on a card."""
    run = set(gate(ORDER + "print(json.dumps([p.command[-1] for p in pieces() if p.junit]))", tmp_path))
    here = Path(__file__).parents[1]
    marked = {path for path in here.rglob("test_*.py")
              if re.search(r"^@gpu$|marks=(pytest\.mark\.)?gpu|^from card import .*DEVICES", path.read_text(), re.M)}
    assert len(marked) > 12 and marked == {Path(path) for path in run}


def test_call_and_stages_at_once_are_refused() -> None:
    done = call("--call", "1", "--stages", "memory")
    assert done.returncode == 2 and "leave out --stages, or --call" in done.stderr


RUNNERS = """
sys.argv = ["bench.py"]
import bench.gate.bench as gpu_gate
from bench.gate.runner import OLDER, OWN, environment
ENGINE = "tests/smoke vllm"
asked = []
def answers(works):
    def attempt(piece, now, left, code):
        asked.append([piece.name, environment(piece, now).get("VLLM_USE_V2_MODEL_RUNNER")])
        if piece.name == "environment":
            gpu_gate.append_row(now.results / "environment.jsonl", FACTS)
        good = piece.name != ENGINE or (now.vllm_runner in works)
        return Outcome(piece.name, "passed" if good else "failed", form=now.form, commit=code, run="run",
                       vllm_runner=now.vllm_runner)
    return attempt
def rows():
    return [row.get("vllm_runner") for row in gpu_gate.read_rows(out / "results" / "environment.jsonl")]
"""


@pytest.mark.parametrize(("works", "statuses", "later", "noted"), [
    (["vLLM's own choice"], ["passed"], None, [None, "vLLM's own choice"]),
    (["VLLM_USE_V2_MODEL_RUNNER=0"], ["failed", "passed"], "0", [None, "VLLM_USE_V2_MODEL_RUNNER=0"]),
    ([], ["failed", "failed"], None, [None]),
])
def test_the_model_runner_that_works_is_found_written_down_and_used_by_what_follows(
    tmp_path: Path, works: list[str], statuses: list[str], later: str | None, noted: list[str | None]
) -> None:
    asked, state, outcomes, page, found_rows = gate(RUNNERS + f"""
gpu_gate.attempt = answers({works!r})
one = gpu_gate.Gate(setup(), 100, [], "abc")
one.run((ENGINE, "rollout/lowmem_grpo"))
state = [[row["name"], row["status"], row["vllm_runner"]] for row in gpu_gate.read_rows(out / "gate.jsonl")]
print(json.dumps([asked, state, [o.name for o in one.outcomes], (out / "gate.md").read_text(), rows()]))""", tmp_path)
    assert [status for name, status, _ in state if name == "tests/smoke vllm"] == statuses
    assert asked[-1] == ["rollout/lowmem_grpo", later]
    assert outcomes == ["environment", "tests/smoke vllm", "rollout/lowmem_grpo"], "the page names a piece twice"
    assert found_rows == noted
    assert (f"vLLM's model runner: {noted[-1]}" in page) == (len(noted) == 2)


def test_a_later_call_takes_the_model_runner_that_worked_in_the_first_one(tmp_path: Path) -> None:
    asked, command = gate(RUNNERS + """
gpu_gate.attempt = answers([OLDER])
gpu_gate.Gate(setup(), 100, [], "abc").run((ENGINE,))
before = gpu_gate.earlier(out, CARD, "abc")
asked.clear()
two = gpu_gate.Gate(setup(), 100, before, "abc")
two.run((ENGINE, "rollout/lowmem_grpo"))
print(json.dumps([asked, list(STAGES["environment"](two.setup)[0].command)]))""", tmp_path)
    assert asked == [["environment", "0"], ["rollout/lowmem_grpo", "0"]]
    assert command[command.index("--vllm-runner") + 1] == "VLLM_USE_V2_MODEL_RUNNER=0"


def test_on_a_pretend_card_the_older_runner_is_taken_and_nothing_is_tried_twice(tmp_path: Path) -> None:
    asked = gate(RUNNERS + """
gpu_gate.attempt = answers([])
gpu_gate.Gate(setup(PRETEND), 100, [], "abc").run((ENGINE,))
print(json.dumps(asked))""", tmp_path)
    assert asked == [["environment", "0"], ["tests/smoke vllm", "0"]]


def test_on_a_pretend_card_memory_that_sleeps_is_counted_and_other_values_are_zeros(tmp_path: Path) -> None:
    found = gate(ORDER + """
from bench.gate.runner import environment
now = setup(PRETEND)
print(json.dumps({p.name: environment(p, now) for p in pieces(PRETEND)}))""", tmp_path)
    read, cached = "NULL_CUDA_READ_ZEROS", "PYTORCH_NO_CUDA_MEMORY_CACHING"
    for name in ("tests/smoke vllm", "tests/smoke vllm wakes on a full card", "rollout/lowmem_grpo"):
        assert read in found[name] and cached not in found[name], "sleep mode's pool is part of torch's cache"
    assert cached in found["loop/lowmem_grpo"] and read not in found["loop/lowmem_grpo"]
    assert not {read, cached} & found["memory/step-16"].keys(), "the allocator's own peaks are measured there"


@pytest.fixture
def dry(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A dry run of the quickest stage, into a folder of its own."""
    return lambda *more: call("--dry-run", "--stages", "environment", "--output", str(tmp_path), *more)


@pytest.mark.slow
def test_a_dry_run_writes_rows_log_state_and_page_and_measures_nothing(
    tmp_path: Path, dry: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = dry()
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((tmp_path / "results" / "environment.jsonl").read_text())
    assert row["device"] == "cpu" and row["works"]["triton"] == "works" and row["host_gib"] > 0
    state = [json.loads(line) for line in (tmp_path / "gate.jsonl").read_text().splitlines()]
    assert [(line["name"], line["status"], line["form"]) for line in state] == [("environment", "passed", "cpu")]
    assert "measures nothing" in (tmp_path / "gate.md").read_text()
    assert "1 passed" in done.stdout


def test_the_machine_is_looked_at_in_every_call(tmp_path: Path) -> None:
    found = gate("""
sys.argv = ["bench.py"]
import bench.gate.bench as gpu_gate
before = [Outcome(name, "passed").row() for name in ("environment", "kernels/rope")]
print(json.dumps(sorted(gpu_gate.Gate(setup(), 100, before, "abc").done)))""", tmp_path)
    assert found == ["kernels/rope"], "facts of another machine, or of before a mend, would be taken for this one's"


def test_what_passed_on_this_commit_is_not_run_again_unless_asked_for(tmp_path: Path) -> None:
    found = gate("""
sys.argv = ["bench.py"]
import bench.gate.bench as gpu_gate
from bench.common.rows import append_row
for name, status, commit, form in [("a", "passed", "abc", CARD), ("b", "failed", "abc", CARD),
                                   ("c", "passed", "old", CARD), ("d", "passed", "abc", CPU)]:
    append_row(out / "gate.jsonl", Outcome(name, status, run="r1", commit=commit, form=form).row())
before = gpu_gate.earlier(out, CARD, "abc")
again = gpu_gate.Gate(setup(), 100, before, "abc")
print(json.dumps([sorted(again.done), len(gpu_gate.earlier(out, CARD, "abc+changes"))]))""", tmp_path)
    assert found == [["a"], 0]
