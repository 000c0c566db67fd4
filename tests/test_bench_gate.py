"""The GPU gate: what it runs and skips on which machine, that a failure hides nothing, that it goes on where it
stopped, and what its last page says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
HEADER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from gate import facts, last_page, runner, stages
from gate.runner import Outcome, attempt
from gate.stages import CARD, CPU, PRETEND, STAGES, Piece, Setup
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
    done = subprocess.run([sys.executable, "-c", HEADER + code, str(folder)], cwd=BENCH, capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def call(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    return subprocess.run([sys.executable, str(BENCH / "gpu_gate.py"), *options], capture_output=True, text=True,
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
    assert list(found["card"]) == ["environment", "tests", "kernels", "memory", "rollout", "loop", "learner", "peers",
                                   "profile"]


@pytest.mark.parametrize(("changes", "skipped", "why"), [
    ('bf16=False, capability=[7, 5]', ["rollout/lowmem_grpo", "memory/step-16", "loop/lowmem_grpo"], "sm_75"),
    ('works=WORKS | {"bitsandbytes": "ImportError: broken"}', ["tests/package", "kernels/nf4_linear"], "broken"),
    ('works=WORKS | {"vllm": "vLLM is not installed"}', ["tests/vllm", "rollout/lowmem_grpo"], "not installed"),
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
    assert found["tests/kernels"] is None


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
    assert done.returncode == 2 and "no stage speed; choose from environment, tests" in done.stderr


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


def test_stages_takes_the_beginning_of_a_pieces_name(tmp_path: Path) -> None:
    found = gate("""
sys.argv = ["gpu_gate.py"]
import gpu_gate
gpu_gate.attempt = lambda piece, *rest: Outcome(piece.name, "passed")
now = gpu_gate.Gate(setup(), 100, [], "abc")
for name in STAGES:
    now.stage(name, gpu_gate.asked_for("memory/step,profile", False))
print(json.dumps([o.name for o in now.outcomes]))""", tmp_path)
    assert found == ["memory/step-16", "memory/step-24", "profile/train", "profile/decode"]


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
sys.argv = ["gpu_gate.py"]
import gpu_gate
before = [Outcome(name, "passed").row() for name in ("environment", "kernels/rope")]
print(json.dumps(sorted(gpu_gate.Gate(setup(), 100, before, "abc").done)))""", tmp_path)
    assert found == ["kernels/rope"], "facts of another machine, or of before a mend, would be taken for this one's"


def test_what_passed_on_this_commit_is_not_run_again_unless_asked_for(tmp_path: Path) -> None:
    found = gate("""
sys.argv = ["gpu_gate.py"]
import gpu_gate
from rows import append_row
for name, status, commit, form in [("a", "passed", "abc", CARD), ("b", "failed", "abc", CARD),
                                   ("c", "passed", "old", CARD), ("d", "passed", "abc", CPU)]:
    append_row(out / "gate.jsonl", Outcome(name, status, run="r1", commit=commit, form=form).row())
before = gpu_gate.earlier(out, CARD, "abc")
again = gpu_gate.Gate(setup(), 100, before, "abc")
print(json.dumps([sorted(again.done), len(gpu_gate.earlier(out, CARD, "abc+changes"))]))""", tmp_path)
    assert found == [["a"], 0]
