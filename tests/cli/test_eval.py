"""`lowmem-grpo eval`: the intervals, pass@k, base against adapter, and mistakes answered in words."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from recipe_runs import invoke, invoke_well
from small_models import scatter
from tables import every_row

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.cli.eval import Candidate, find_subject, problems
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.recipes.proximity import STEPS, WORDS, Task
from lowmem_grpo.recipes.proximity import make_dataset as proximity_problems
from lowmem_grpo.recipes.recipe_file import find_function
from lowmem_grpo.rewards import RewardError, Verifier
from lowmem_grpo.rollout.assessment import answer, rows_of
from lowmem_grpo.runs.accuracy import (
    Answers,
    accuracy_interval,
    compared,
    described,
    independent_answers,
    paired_difference,
    pass_at_k,
    powers_of_two,
    wilson_interval,
)
from lowmem_grpo.runs.views.tables import show_result

# the numbers


def test_wilson_is_the_published_interval() -> None:
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(1.0, 10)[1] <= 1.0 and wilson_interval(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("samples", "k"), [(4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k(samples: int, k: int) -> None:
    counts = [0, 1, samples // 2, samples]
    wanted = []
    for count in counts:
        verdicts = [True] * count + [False] * (samples - count)
        draws = list(itertools.combinations(verdicts, k))
        wanted.append(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at_k(counts, samples, k) == pytest.approx(sum(wanted) / len(wanted))
    with pytest.raises(ValueError, match=f"pass@{samples + 1} needs k from 1 to the {samples} answers"):
        pass_at_k(counts, samples, samples + 1)


def test_answers_that_agree_within_a_prompt_count_as_one() -> None:
    agreeing = [8, 0] * 20
    assert independent_answers([count / 8 for count in agreeing], 8) == pytest.approx(40, rel=0.05)
    assert accuracy_interval(agreeing, 8)[1] == pytest.approx(accuracy_interval([1, 0] * 20, 1)[1], abs=0.01)
    mixed = [4] * 40
    assert independent_answers([0.5] * 40, 8) == 40  # no spread that would say more
    assert accuracy_interval(mixed, 8)[0] == 0.5
    rng = random.Random(0)
    free = [sum(rng.random() < 0.5 for _ in range(8)) for _ in range(400)]
    assert independent_answers([count / 8 for count in free], 8) > 0.75 * 400 * 8


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, held, trials = random.Random(1), {"share": 0, "difference": 0}, 400
    for _ in range(trials):
        skill = [rng.betavariate(2, 3) for _ in range(60)]  # prompts differ, and so do answers to one of them
        before, after = ([sum(rng.random() < s for _ in range(4)) for s in skill] for _ in range(2))
        share, difference = accuracy_interval(before, 4)[1], paired_difference(before, after, 4)[1]
        held["share"] += share[0] <= 0.4 <= share[1]
        held["difference"] += difference[0] <= 0 <= difference[1]
    assert all(0.92 <= count / trials <= 0.995 for count in held.values()), held


def test_the_difference_is_paired_and_keeps_a_width() -> None:
    change, (low, high) = paired_difference([0, 0, 1, 1], [1, 1, 1, 1], 1)
    assert change == 0.5
    assert low < 0.5 < high
    change, (low, high) = paired_difference([1] * 50, [1] * 50, 1)
    assert change == 0
    assert low == -high < -0.01
    wide = [1, 0] * 100
    paired = paired_difference(wide, [*wide[:-1], 1], 1)[1]
    alone = accuracy_interval(wide, 1)[1]
    assert paired[1] - paired[0] < (alone[1] - alone[0]) / 3  # what both find hard is no noise


def test_ks_double_up_to_the_number_of_answers() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_what_two_models_answer_is_compared_prompt_by_prompt() -> None:
    def answers(right: list[list[bool]]) -> Answers:
        return Answers([["text"] * 2 for _ in right], right, 1, 60, 3, {"length": 0.5})

    base = answers([[True, False], [False, False], [True, True]])
    adapter = answers([[True, True], [False, False], [True, False]])
    found = described(base, [1, 2])
    assert found["accuracy"] == 0.5
    assert found["pass_at_k"] == {"1": 0.5, "2": pytest.approx(2 / 3)}
    assert (found["mean_tokens"], found["cut_off"], found["unjudged"]) == (10, 0.5, pytest.approx(1 / 6))
    assert found["rewards"] == {"length": 0.5}
    change = compared(base, adapter)
    assert (change["accuracy"], change["better"], change["worse"], change["same"]) == (0.0, 1, 1, 1)


# the command


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has unlearnt arithmetic, on some of the layers."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=2, target_modules=["q_proj", "up_proj"])
    folder = tmp_path_factory.mktemp("eval") / "adapter"
    scatter(model, 2.0).save_lora(folder)
    return folder


def test_base_and_adapter_answer_the_same_prompts(adapter: Path, tmp_path: Path) -> None:
    done = invoke_well("eval", adapter, "--recipe", "arithmetic", "--limit", 12, "-n", 2, "--out", tmp_path, "--json")
    found, kept = json.loads(done.stdout), json.loads((tmp_path / "eval.json").read_text())
    assert found["base"]["accuracy"] > 0.2
    assert found["adapter"]["accuracy"] < 0.1
    assert found["difference"]["accuracy"] == pytest.approx(found["adapter"]["accuracy"] - found["base"]["accuracy"])
    assert found["difference"]["interval"][1] < 0
    assert set(found["base"]["pass_at_k"]) == {"1", "2"}
    assert found["base"]["interval"][0] <= found["base"]["accuracy"] <= found["base"]["interval"][1]
    assert (found["model"], found["prompts"], found["samples"], found["max_tokens"]) == ("tiny", 12, 2, 64)
    assert len(kept["rows"]) == 12
    right = [one["right"] for row in kept["rows"] for one in row["base"]]
    assert sum(right) / len(right) == pytest.approx(found["base"]["accuracy"])
    assert all(row["answer"] in row["base"][0]["text"] for row in kept["rows"] if row["base"][0]["right"])
    assert "rows" not in found and found["dtype"] in ("float32", "bfloat16")


def a_run(adapter: Path, folder: Path, **record: Any) -> Path:
    """A finished run that has left this adapter, with changes to the record of its base."""
    final = folder / "adapter"
    final.mkdir(parents=True)
    for path in adapter.iterdir():
        (final / path.name).write_bytes(path.read_bytes())
    base = json.loads((final / "base_model.json").read_text())
    (final / "base_model.json").write_text(json.dumps(base | record))
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    return folder


@pytest.mark.parametrize(("target", "named", "revision"), [
    (None, False, "old"), ("org/model", True, "old"), ("org/another", True, None),
])
def test_an_adapter_of_an_older_revision_is_not_put_on_the_newest(
    target: str | None, named: bool, revision: str | None, adapter: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = a_run(adapter, tmp_path / "run", model="org/model", revision="old")
    subject = find_subject(target or str(run), run if named else None, None)
    assert (subject.model, subject.revision) == (target or "org/model", revision)
    seen: list[dict[str, Any]] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append({"name": name} | options)
        raise OSError("seen enough")

    monkeypatch.setattr(FastLanguageModel, "from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="seen enough"):
        subject.load("transformers", 64)
    assert (seen[0]["name"], seen[0]["revision"]) == (subject.model, revision)


def test_the_adapter_option_takes_a_run_as_well(adapter: Path, tmp_path: Path) -> None:
    run = a_run(adapter, tmp_path / "run")
    final = Candidate("tiny", run / "adapter", False, run, "final adapter of the run run")
    assert find_subject("tiny", run, None) == final
    done = invoke_well("eval", "tiny", "--adapter", run, "--recipe", "arithmetic", "--limit", 1, "--max-tokens", 2)
    assert "final adapter of the run run" in done.output
    assert json.loads((run / "eval.json").read_text())["adapter_folder"] == str(run / "adapter")


def test_a_model_alone_is_tested_on_the_users_file_with_the_users_function(tmp_path: Path) -> None:
    rows = [{"question": "Start with 17. Add 8. What is the result?", "answer": "25"},
            {"question": "Start with 3. Add 4. What is the result?", "answer": "7"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def short(completions, **kwargs):\n    return [1.0 if len(c) < 1000 else 0.0 for c in completions]\n"
    )
    words = ("tiny", "--dataset", tmp_path / "mine.jsonl", "--reward", f"{tmp_path / 'mine.py'}:short", "--reward",
             "number_match", "--out", tmp_path, "--max-tokens", 8, "--temperature", 0)
    refused = invoke("eval", *words)
    assert refused.exit_code == 1
    assert "has no column 'prompt'; it has question, answer. Name the one with the prompts" in refused.output
    assert not (tmp_path / "eval.json").exists()
    done = invoke_well("eval", *words, "--prompt-column", "question")
    for word in ("accuracy", "95% interval", "100.0%", "number_match", "expected: 25", "cut off at 8 tokens"):
        assert word in done.output
    assert "adapter" not in json.loads((tmp_path / "eval.json").read_text())


def test_the_table_shows_answers_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    def model(share: float) -> dict[str, Any]:
        return {"accuracy": share, "interval": [share - 0.1, share + 0.1], "pass_at_k": {"1": share, "4": 0.9},
                "mean_tokens": 30.0, "cut_off": 0.0, "unjudged": 0.0}

    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4",
           "base": [{"text": "[red]five", "right": False}], "adapter": [{"text": "4\x1b[2J", "right": True}]}
    result = {"model": "tiny", "load_in_4bit": True, "recipe": "arithmetic", "dataset": None, "prompts": 1,
              "samples": 4, "temperature": 1.0, "max_tokens": 64, "base": model(0.3), "adapter": model(0.7),
              "difference": {"accuracy": 0.4, "interval": [0.1, 0.6], "better": 1, "worse": 0, "same": 0},
              "rows": [row]}
    show_result(result, "", 1, width=100)
    shown = capsys.readouterr().out
    for word in ("4-bit", "pass@4", "30.0%", "70.0%", "+40.0 points", "more than chance", "[red]five", "right",
                 "wrong"):
        assert word in shown
    assert "\x1b" not in shown
    for dtype, words in (("float32", "tiny (32-bit weights)"), ("bfloat16", "tiny (16-bit weights)")):
        show_result(result | {"load_in_4bit": False, "dtype": dtype}, "", 0, width=100)
        assert words in capsys.readouterr().out


# what it asks


def test_ready_made_rewards_and_verifiers_are_made_by_their_names() -> None:
    for name in ("number_match", "math_match", "boxed_match", "answer_match"):
        made = find_function(name)
        assert isinstance(made, Verifier) and made.columns == ("answer",)
    for name in ("correctness_reward_func", "number_equal"):
        right, wrong = "<answer>4</answer>", "<answer>5</answer>"
        found = find_function(name)(prompts=["?"] * 2, completions=[right, wrong], answer=["4", "4"])
        assert found[0] > 0 >= found[1]


@every_row(("name", "message"), [
    ("SYSTEM_PROMPT", "SYSTEM_PROMPT is not a reward function"),
    ("regex_match", "regex_match is not a reward function: .* needs pattern, which"),
    ("qqqqqq", r"no reward 'qqqqqq' in lowmem_grpo.rewards\. Name your own"),
    ("number_equl", r"did you mean number_equal or .*\? Name your own"),
    ("nothing.py:score", "there is no file nothing.py"), ("no_such:score", "there is no module 'no_such'"),
    ("math:score", "math has no 'score'"), ("xml.score:score", "there is no module 'xml.score' here"),
    ("math:pi", "math:pi is not a reward function"),
])
def test_what_is_no_reward_function_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_function(name)


def asked(**changed: Any) -> dict[str, Any]:
    """What the command was given."""
    return {"recipe": "proximity", "dataset": None, "rewards": (), "limit": 3, "seed": 1, "max_tokens": None,
            "split": "test", "prompt_column": "prompt", "options": (), **changed}


@pytest.mark.parametrize(("model", "task"), [("tiny", STEPS), ("org/model", WORDS)])
def test_a_model_is_asked_the_task_that_it_is_trained_on(model: str, task: Task, tmp_path: Path) -> None:
    rows, _, tokens, play = problems(Candidate(model, None, False, tmp_path), asked())
    assert rows == proximity_problems("test", 3, 1, task).to_list()
    assert tokens == 512 and play is None


@pytest.mark.parametrize("source", ["recipe", "file"])
def test_answers_may_be_as_long_as_in_training(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    of = {} if source == "recipe" else {"recipe": None, "dataset": str(tmp_path / "x.jsonl")}
    trained = Candidate("org/model", tmp_path / "run" / "checkpoint-5", False, tmp_path)
    assert problems(trained, asked(**of))[2] == 512
    assert capsys.readouterr().err == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"config": {"max_completion_length": 3072}}')
    assert problems(trained, asked(**of))[2] == 3072
    assert "answers of up to 3072 tokens, as the run was trained; --max-tokens" in capsys.readouterr().err
    assert problems(trained, asked(max_tokens=7, **of))[2] == 7
    assert problems(Candidate("org/model", None, False, tmp_path / "run"), asked(**of))[2] == 512


def test_the_context_has_room_for_the_answers(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[int] = []

    def from_pretrained(name: str, max_seq_length: int, **options: Any) -> Any:
        seen.append(max_seq_length)
        raise ValueError("seen enough")

    monkeypatch.setattr(FastLanguageModel, "from_pretrained", from_pretrained)
    for words in (["--max-tokens", 3072], ["--max-tokens", 64], ["--max-seq-length", 99]):
        invoke("eval", "tiny", "--recipe", "arithmetic", "--limit", 1, "--out", tmp_path, *words)
    assert seen == [4096, 2048, 99]


def test_a_verifier_without_a_verdict_counts_as_wrong_and_is_reported() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    rows = rows_of([{"prompt": "Start", "answer": label} for label in ("no number", "1")], 2)
    found = answer(model, rows, [find_function("number_match")], SamplingParams(max_tokens=3, temperature=0, n=2))
    assert found.unjudged == 2
    assert found.right[0] == [False, False]
    assert found.texts[0] == found.texts[1]
    with pytest.raises(RewardError, match="requires answer, which no dataset column provides"):
        answer(model, [{"prompt": "Start"}], [find_function("number_match")], SamplingParams(max_tokens=3))


def test_more_prompts_than_fit_at_a_time_are_sampled_in_parts() -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    rows = [{"prompt": "Start", "answer": "1"}] * 5
    params = SamplingParams(max_tokens=6, temperature=1.5, n=2, seed=3)
    found = answer(model, rows, [find_function("number_match")], params, together=4)
    assert [len(texts) for texts in found.texts] == [2] * 5
    assert found.texts[0] != found.texts[2]  # another part has another seed
    assert found.texts == answer(model, rows, [find_function("number_match")], params, together=4).texts


def test_rows_without_a_prompt_are_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": ""}, {"prompt": None}, {"prompt": "b"}])
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        assert rows_of(rows, 3) == [{"prompt": "a"}]
        assert "2 of 3 rows have an empty prompt and are left out" in caplog.text
        caplog.clear()
        rows_of(rows, 1)
        assert not caplog.text
    with pytest.raises(DataError, match="no rows"):
        rows_of([], None)
