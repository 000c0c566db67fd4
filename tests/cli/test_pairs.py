"""`lowmem-grpo pairs`: right completions stand against wrong ones of the same prompt, as rows that trainers read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import load_dataset
from recipe_runs import invoke, invoke_well, lines, run_well
from small_models import TINY
from tables import every_row
from transformers import AutoTokenizer

from lowmem_grpo.data.pairs import Pair, read_pairs, read_scored
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

ASK = [{"role": "user", "content": "1 + 1?"}]
TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"}]


def group(prompt: Any, **scores: float | None) -> RolloutGroup:
    """A prompt whose completions are the names."""
    return RolloutGroup({"prompt": prompt}, [1], [
        Rollout([2], [0.0], "stop", text, reward=score, rewards={"right": score, "short": len(text) / 10})
        for text, score in scores.items()])


def record(folder: Path, *steps: list[RolloutGroup]) -> Path:
    """A run's folder with the completions of its steps."""
    records = RunRecords(folder / "run")
    records.start_run()
    for step, groups in enumerate(steps, 1):
        records.completions(step, groups)
    return folder / "run"


def made(folder: Path, *options: Any) -> list[dict[str, Any]]:
    invoke_well("pairs", folder, "--overwrite", *options)
    return lines(folder / "pairs.jsonl")


@every_row(("prompt", "as_chat"), [("1 + 1 =", False), (ASK, True), (TALK, True)])
def test_a_pair_has_the_prompt_of_the_run_as_text_or_as_messages(prompt: Any, as_chat: bool, tmp_path: Path) -> None:
    folder = record(tmp_path, [group(prompt, two=1.0, three=0.0)])
    chosen, rejected = ([{"role": "assistant", "content": text}] if as_chat else text for text in ("two", "three"))
    assert made(folder) == [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]


@every_row("prompt", ["1 + 1 =", ASK, TALK])
def test_the_trainers_read_the_file_as_it_is(prompt: Any, tmp_path: Path) -> None:
    invoke_well("pairs", record(tmp_path, [group(prompt, two=1.0, three=0.0)]), "--overwrite", "--out",
                tmp_path / "rows.jsonl")
    rows, tokenizer = (load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train"),
                       AutoTokenizer.from_pretrained(TINY))
    for function in (read_pairs, read_scored):
        found, encoder = function(rows, "train_dataset", SimpleNamespace(chat_template_kwargs=None), tokenizer, 64, [])
        assert isinstance(encoder.encode(found[0]), Pair)


@every_row(("scores", "options", "wanted"), [
    ({"a": 1.0, "b": 0.0, "c": 1.0, "d": 1.0}, (), 1), ({"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}, (), 2),
    ({"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}, ("--most", 1), 1), ({"a": 1.0, "b": 0.5, "c": 0.6}, (), 1),
    ({"a": 1.0, "b": 0.2, "c": 0.6, "d": 0.0}, ("--margin", 0.4), 2), ({"a": 0.7, "b": 0.2}, (), 1),
    ({"a": 1.0, "b": 0.0, "c": None}, (), 1), ({"a": 0.0, "bbbbbb": 0.0}, ("--reward", "short"), 1),
])
def test_each_completion_stands_in_one_pair_that_is_far_enough_apart(
    scores: dict[str, Any], options: tuple[Any, ...], wanted: int, tmp_path: Path
) -> None:
    rows = made(record(tmp_path, [group("q", **scores)]), *options)
    used = [text for row in rows for text in (row["chosen"], row["rejected"])]
    assert len(rows) == wanted and len({*used}) == len(used)
    value = (lambda text: len(text) / 10) if "short" in options else scores.__getitem__
    assert all(value(row["chosen"]) - value(row["rejected"]) > 0.39 for row in rows)


def test_completions_of_one_prompt_in_several_steps_stand_together_and_others_apart(tmp_path: Path) -> None:
    steps = [group("q", two=1.0), group(ASK, one=1.0)], [group("q", three=0.0, two=1.0), group("r", four=0.0)]
    folder = record(tmp_path, *map(list, steps))
    assert made(folder) == [{"prompt": "q", "chosen": "two", "rejected": "three"}]
    assert "1 pair from 1 of 3 prompts; completions left out: repeated 1" in invoke(
        "pairs", folder, "--overwrite").output.replace("\n", " ")


def test_completions_that_were_not_said_to_their_end_are_left_out_and_counted(tmp_path: Path) -> None:
    found = group("q", a=1.0, b=0.0, c=0.0, d=1.0, e=1.0)
    found.rollouts[2].finish_reason = "length"
    found.rollouts[3].turns = [Turn([1], [2], [0.0], "stop", "d"), Turn([1], [2], [0.0], "stop", "d")]
    found.rollouts[4].text = " "
    folder = record(tmp_path, [found])
    said = " ".join(invoke_well("pairs", folder).output.split())
    assert said.endswith("1 pair from 1 of 1 prompt; completions left out: cut off 1, of several turns 1, empty 1")


def test_the_seed_decides_among_equals_and_the_same_seed_decides_alike(tmp_path: Path) -> None:
    scores = {letter: float(letter in "abcdefgh") for letter in "abcdefghijklmnop"}
    folder = record(tmp_path, [group("q", **scores)])
    first, again, other = (made(folder, "--seed", seed, "--most", 4) for seed in (1, 1, 2))
    assert first == again != other


@every_row(("options", "message"), [
    (("--reward", "rihgt"), "--reward is 'rihgt'; the run's reward functions are right, short"),
    (("--margin", 2), "differ by at most 1 in their reward, and --margin is 2; give a --margin of at most 1"),
    (("--margin", 0), "0.0 is not in the range x>0"), (("--most", 0), "0 is not in the range x>=1"),
    (("--out", "/proc/none/pairs.jsonl"), "/proc/none: No such file or directory"),
    ((), "is there already; choose another file with --out"),
])
def test_options_that_fit_nothing_are_refused_in_words(options: Any, message: str, tmp_path: Path) -> None:
    folder = record(tmp_path, [group("q", a=1.0, b=0.0)])
    (folder / "pairs.jsonl").write_text("old")
    more = [] if message.startswith("is there") else ["--overwrite"]
    result = invoke("pairs", folder, *more, *options)
    assert result.exit_code and message in " ".join(result.output.split()), result.output
    assert (folder / "pairs.jsonl").read_text() == "old"


@every_row(("groups", "message"), [
    (None, "has no completions.jsonl; name the folder of a run"),
    ([group("q", a=1.0, b=1.0)], "differ by at most 0 in their reward, and --margin is 0.5"),
    ([group("q", a=None)], "no completion of the run can be used; completions left out: without a reward 1"),
])
def test_a_run_without_pairs_is_refused_in_words(groups: Any, message: str, tmp_path: Path) -> None:
    folder = record(tmp_path, *([] if groups is None else [groups]))
    result = invoke("pairs", folder)
    assert result.exit_code and message in " ".join(result.output.split()), result.output
    assert not (folder / "pairs.jsonl").exists()


@pytest.mark.slow
def test_the_completions_of_a_recipe_give_pairs(tmp_path: Path) -> None:
    run_well("arithmetic", tmp_path / "run", "num_generations=16", "per_device_train_batch_size=64", "max_steps=4")
    for row in made(tmp_path / "run", "--margin", 0.1):
        assert row["prompt"][-1]["role"] == "user" and row["chosen"] != row["rejected"]


@every_row("value", ["x", [1], 5, "1" + "0" * 400, None, {"a": "b"}])
@every_row("name", ["rewards", "reward", "role", "messages", "turns"])
def test_a_completion_with_a_field_of_another_kind_is_left_out_or_taken_without_it(
    name: str, value: Any, tmp_path: Path
) -> None:
    folder = record(tmp_path, [group(ASK, two=1.0, three=0.0, four=1.0)])
    first, *others = (folder / "completions.jsonl").read_text().splitlines()
    broken = json.loads(first) | {name: "HERE"}
    said = value if str(value).startswith("100") else json.dumps(value)
    (folder / "completions.jsonl").write_text("\n".join([json.dumps(broken).replace('"HERE"', said), *others, ""]))
    for options in ((), ("--reward", "right")):
        rows = made(folder, *options)
        assert len(rows) == 1 and rows[0]["rejected"][0]["content"] == "three"


def test_names_of_reward_functions_in_a_message_are_few_and_short(tmp_path: Path) -> None:
    folder = record(tmp_path, [group(ASK, two=1.0)])
    line = lines(folder / "completions.jsonl")[0]
    line["rewards"] = {"q" * 10**6: 1.0, "a\nb": 1.0, **{f"r{number}": 1.0 for number in range(10**4)}}
    (folder / "completions.jsonl").write_text(json.dumps(line) + "\n")
    said = str(invoke("pairs", folder, "--reward", "nope").output)
    assert "functions are " + "q" * 80 + ", a b, r0" in said and len(said) < 1000
