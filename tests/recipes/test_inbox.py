"""Recipe inbox: its rows, short runs with rules and with a judge, its refusals, and the small model it begins with."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.tiny_models import inbox_model
from bench.tiny_models.inbox_model import PHRASES, TOOLS, clerk_talk
from bench.tiny_models.talks import encode_talk
from lowmem_grpo.cli.main import main
from lowmem_grpo.models.model_names import resolve
from lowmem_grpo.recipes.inbox import make_dataset
from lowmem_grpo.recipes.tasks import mail_database
from lowmem_grpo.recipes.tasks.inbox import Inbox
from lowmem_grpo.recipes.tasks.mailbox import mailbox
from tests.attacks.judge_server import by_length, serving


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def run(folder: Path, *words: str) -> Result:
    small = ["gpu=cpu", "max_steps=1", "eval_problems=4", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1", "engine=transformers", f"output_dir={folder}"]
    return invoke("run", "inbox", *small, *words)


def records(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, metrics of the only step) of a run."""
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / "summary.json").read_text()), json.loads(line)


# rows


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_row_has_what_the_inbox_takes_and_the_splits_share_no_question(name: str) -> None:
    rows = {split: make_dataset(split, 50, 1, name).to_list() for split in ("train", "test")}
    asked = {split: {row["prompt"][-1]["content"] for row in given} for split, given in rows.items()}
    assert len(asked["train"]) == len(asked["test"]) == 50 and not asked["train"] & asked["test"]
    columns = {"prompt", "mailbox", "mail_seed", "answer", "source", "calls", "unknown"}
    assert all(set(row) == columns for row in rows["train"])
    doubted = Inbox()
    doubted.reset(**rows["test"][0])
    doubted.answer("unknown", [])
    assert doubted.earned == (0.0 if name == "large" else -1.0)
    for row in rows["test"]:
        inbox = Inbox()
        inbox.reset(**row)
        assert row["answer"] in inbox.read(row["source"]) and inbox.most == row["calls"]
    told = [message["content"] for message in rows["test"][0]["prompt"] if message["role"] == "system"]
    assert ("at most" not in str(told)) and (("10 calls" in told[0]) if name == "large" else not told)


# short runs


def test_a_short_run_searches_trains_and_says_how_others_play(tmp_path: Path) -> None:
    result = run(tmp_path, "seed=3")
    assert result.exit_code == 0, result.output
    summary, line = records(tmp_path)
    assert (summary["recipe"], summary["status"], summary["model"], summary["mailbox"]) == \
        ("inbox", "finished", "tiny-inbox", "small")
    assert summary["baselines"]["keywords"] == 1.0 and summary["baselines"]["random"] < 0.5
    assert summary["eval_problems"] == len(summary["samples"]) == 4
    assert -2 <= line["rewards/earned/mean"] <= 2 and line["tools/call_frequency"] > 0
    rows = [json.loads(text) for text in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert all(row["reward"] == row["rewards"]["earned"] for row in rows)


def test_a_judge_pays_without_labels_and_the_rules_only_count(tmp_path: Path) -> None:
    with serving(by_length) as server:
        result = run(tmp_path / "run", "reward=ruler", f"judge={server.url}", "judge_model=m", "judge_key=local")
    assert result.exit_code == 0, result.output
    summary, line = records(tmp_path / "run")
    assert summary["judging"]["calls"] > 0 and "rewards/earned/mean" in line and summary["judge"] == server.url
    rows = [json.loads(text) for text in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert all(row["reward"] == row["rewards"]["ruler"] for row in rows)


def test_eval_asks_the_questions_of_the_small_mailbox(tmp_path: Path) -> None:
    result = invoke("eval", "tiny-inbox", "--recipe", "inbox", "--limit", "6", "--out", str(tmp_path), "--engine",
                    "transformers")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["prompts"] == 6 and 0 <= found["base"]["accuracy"] <= 1
    assert all("<tool_call>" in row["base"][0]["text"] or "search" in row["base"][0]["text"] for row in found["rows"])


@pytest.mark.parametrize(("words", "message"), [
    (["mailbox=huge"], "mailbox is 'huge'; allowed: small, large"), (["calls=1"], "calls is 1; it must be at least 2"),
    (["reward=best"], "reward is 'best'; allowed: rules, ruler"),
    (["judge_model=m"], "judge_model is for a judge: give reward=ruler with it"),
    (["judge=http://127.0.0.1/v1"], "judge is for a judge: give reward=ruler"),
    (["reward=ruler", "judge=gpt"], "judge is 'gpt'; allowed are"),
    (["reward=ruler", "judge=http://127.0.0.1/v1"], "judge_model is missing"),
    (["calls=6"], "max_turns is 6, but an episode has 6 calls; give max_turns=7 or more, or fewer calls"),
    (["eval_problems=1000"], "the mailbox 'small' of seed 0 has 67 questions to test, and 1000 are asked for"),
    (["train_size=0"], "train_size is 0; it must be a whole number"),
])
def test_a_wrong_option_is_found_before_the_model_is_loaded(words: list[str], message: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", *words)
    assert result.exit_code == 1 and message in result.output
    assert not (tmp_path / "run").exists()


def test_a_python_without_full_text_search_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_database, "PROBE", "CREATE VIRTUAL TABLE words USING fts99 (word)")
    result = run(tmp_path / "run")
    assert result.exit_code == 1 and "has no full-text search FTS5 (no such module: fts99)" in result.output
    assert not (tmp_path / "run").exists()


# the model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("tiny-inbox"), trust_remote_code=False)


def test_a_name_and_a_number_are_one_token_wherever_they_stand(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("What is the budget of Falcon?", '{"words": "budget Falcon"}', "412 | budget Falcon", "of Falcon 41."):
        assert "Falcon" in tokenizer.tokenize(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert [len(tokenizer.encode(str(number))) for number in (1, 41, 412, 500)] == [1, 1, 1, 1]
    assert all(len(tokenizer.encode(phrase)) == 1 for phrase in PHRASES)


def test_a_demonstration_trains_the_calls_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    rng, questions = random.Random(0), mailbox("small", 5).questions
    for question in questions[:20]:
        talk = clerk_talk(question, 5, rng)
        ids, own = encode_talk(tokenizer, talk, TOOLS)
        said = tokenizer.decode([token for token, mine in zip(ids, own, strict=True) if mine])
        assert said.count("<|im_end|>") == said.count("<tool_call>") == len(talk) // 2
        assert "Tools:" not in said and "From:" not in said and "What is" not in said
        assert len(ids) < 250


def test_the_clerk_searches_and_reads_as_badly_as_it_should() -> None:
    rng, question = random.Random(0), mailbox("small", 5).questions[0]
    talks = [clerk_talk(question, 5, rng) for _ in range(600)]
    names = [[one["tool_calls"][0]["function"]["name"] for one in talk[1::2]] for talk in talks]
    assert all(called[0] == "search" and called[-1] == "answer" for called in names)
    assert sum("read" in called for called in names) / 600 == pytest.approx(inbox_model.READS, abs=0.06)
    right = [talk[-1]["tool_calls"][0]["function"]["arguments"]["text"] == question.answer for talk in talks]
    assert 0.08 < sum(right) / 600 < 0.3


def test_demonstrations_are_of_the_training_split_and_of_other_seeds() -> None:
    held_out = {question.text for question in mailbox("small", 0).of_split("test")}
    demonstrations = inbox_model.demonstrations(0)
    assert not any(next(demonstrations)()[0][0]["content"] in held_out for _ in range(200))
    assert inbox_model.FIRST_SEED > 100_000
