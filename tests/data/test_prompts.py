"""Prompts of a run: every usable row once an epoch, in an order that the seed alone decides."""

import logging
from typing import Any

import pytest
from datasets import Dataset
from scripted import TEMPLATE
from tables import every_row
from template_tokenizers import CharTokenizer, rows, tokenizer_of
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError, DifficultyPools, Prompt, PromptEncoder, PromptSource
from lowmem_grpo.data.texts import ConversationEncoder
from lowmem_grpo.environments.env_spec import EnvSpecs, EpisodeEncoder

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def source(dataset: Any, seed: int = 0, max_prompt_length: int = 20, **options: Any) -> PromptSource:
    return PromptSource(dataset, PromptEncoder(CharTokenizer(), max_prompt_length), seed,
                        **options)  # type: ignore[arg-type]


def test_a_role_that_nobody_knows_is_left_out_and_one_of_the_template_is_taken() -> None:
    tokenizer = tokenizer_of(TEMPLATE)
    odd, own = ([{"role": role, "content": "2 + 2?"}] for role in ("usr", "critic"))
    encoder = PromptEncoder(tokenizer, 200)
    assert encoder.encode({"prompt": odd}) == (
        "a message has the role 'usr'; the roles are system, user, assistant, tool, developer, function")
    tokenizer.chat_template = f"{tokenizer.chat_template}{{# 'critic' #}}"
    assert isinstance(encoder.encode({"prompt": own}), Prompt)
    assert isinstance(encoder.encode({"prompt": odd}), str)
    half = encoder.encode({"prompt": [{"role": "user", "content": "half \ud83d"}]})
    assert half == "prompt has half of a surrogate pair, which is no character"


def drawn(prompts: PromptSource, count: int) -> list[int]:
    return [prompt.row["index"] for prompt in prompts.take(count)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own_that_the_seed_alone_decides() -> None:
    prompts = source(rows(50), seed=1)
    first, second, third = (drawn(prompts, 50) for _ in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert first != second != third != first
    assert first + second == drawn(source(Dataset.from_list(rows(50)), seed=1), 100)
    assert first != drawn(source(rows(50), seed=2), 50)
    assert drawn(source(rows(3), shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_dataset_of_another_size_is_refused_when_resuming() -> None:
    with pytest.raises(DataError, match="5 rows, this one has 4"):
        source(rows(4)).restore(source(rows(5)).state())


@pytest.mark.parametrize(("prompt", "reason"), [
    ("", "empty prompt"), ("  \n", "empty prompt"), (None, "empty prompt"), ([], "empty prompt"),
    (7, "prompt is int, not text or chat"), (["2 + 2?"], "message 1 of prompt has no role, or no text"),
    ([{"role": "user"}], "message 1 of prompt has no"), ([{"content": "2 + 2?"}], "message 1 of prompt has no role"),
    ([{"role": "user", "content": None}], "message 1 of prompt has no role, or no text"),
    ([{"role": "user", "content": " "}], "no message of prompt has a text"),
    ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "message 1 of prompt has a part of type 'i"),
    ("x" * 21, "prompt longer than 20 tokens"), ("half \ud83d", "prompt has half of a surrogate pair"),
])
def test_an_unusable_row_is_skipped_counted_and_named(
    prompt: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = source([{"prompt": prompt, "index": 0}, *rows(3)[1:]], shuffle=False)
    assert prompts.epoch == 0
    with caplog.at_level(logging.WARNING):
        assert drawn(prompts, 4) == [1, 2, 1, 2]
    assert prompts.epoch == 2  # it counts skipped rows too
    ((named, count),) = prompts.skipped.items()
    assert named.startswith(reason)
    assert count == 2
    assert caplog.messages[0] == f"row 0 skipped: {named}"


@pytest.mark.parametrize("truncate", [False, True])
def test_short_rows_are_counted_without_their_tokens_and_the_count_is_that_of_the_encoder(truncate: bool) -> None:
    texts = ["x" * 12, "x" * 13, "x" * 20, "x" * 21, "\u20ac" * 4, "\u20ac" * 5, "\u20ac" * 21, " ", "half \ud83d"]
    held = [*({"prompt": text} for text in texts), {"prompt": None}, {"prompt": 7}, *({"prompt": [
        {"role": role, "content": text}]} for role, text in (("user", "x"), ("usr", "x"), ("user", "x" * 99)))]
    encoder = PromptEncoder(tokenizer_of(TEMPLATE), 20, truncate=truncate)
    sure = [encoder.surely(row) for row in held]
    prompts = PromptSource(held, encoder, 0)
    assert prompts.count_rows(read=True) == sum(isinstance(encoder.encode(row), Prompt) for row in held)
    assert all(isinstance(encoder.encode(row), Prompt) for row, known in zip(held, sure, strict=True) if known)
    assert [place for place, known in enumerate(sure) if known][:2 + truncate] == ([0, 1, 2] if truncate else [0, 4])


def test_the_log_names_only_the_first_few_bad_rows(caplog: pytest.LogCaptureFixture) -> None:
    prompts = source([{"prompt": "", "index": index} for index in range(50)] + [*rows(1), {"index": 51}], shuffle=False)
    with caplog.at_level(logging.WARNING):
        assert drawn(prompts, 1) == drawn(prompts, 1) == [0]  # the row without a prompt lies between them
    assert len(caplog.messages) == 3
    assert prompts.skipped["empty prompt"] == 101


@pytest.mark.parametrize("pools", [None, DifficultyPools()])
def test_a_dataset_of_unusable_rows_is_refused_instead_of_searched_for_ever(pools: DifficultyPools | None) -> None:
    bad = [{"prompt": ""}, {"prompt": "x" * 99}]
    with pytest.raises(DataError, match=r"no row of the dataset can be used: .*empty prompt \(1\)"):
        source(bad, pools=pools).take(1)


@every_row(("dataset", "message"), [
    ([], "has no rows"), (iter([]), "list_iterator.*from_list"),
    (Dataset.from_list(rows(2)).to_iterable_dataset(), "IterableDataset.*a streamed dataset"),
    ([{"question": "2 + 2?"}], "no column 'prompt'; its columns are question"),
    (Dataset.from_list([{"question": "?", "answer": "!"}]), "its columns are question, answer"),
])
def test_a_dataset_that_cannot_be_trained_on_is_refused_with_what_to_do(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(dataset)


def test_a_chat_is_rendered_for_the_assistants_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = PromptEncoder(tokenizer, 100).encode({"prompt": CHAT, "answer": "4"})
    assert isinstance(prompt, Prompt)
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompt.ids) == prompt.text
    assert prompt.row == {"prompt": CHAT, "answer": "4"}
    length = len(prompt.ids)  # the longest that is allowed is kept, and one token more is not
    assert isinstance(PromptEncoder(tokenizer, length).encode({"prompt": CHAT}), Prompt)
    assert PromptEncoder(tokenizer, length - 1).encode({"prompt": CHAT}) == f"prompt longer than {length - 1} tokens"


def test_chat_template_kwargs_reach_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'think' if enable_thinking else 'answer' }}"
    kwargs = {"enable_thinking": False, "chat_template": template}
    assert PromptEncoder(tokenizer, 100, kwargs).render(CHAT, kwargs) == "Be brief.2 + 2?answer"


def test_a_rows_reasoning_effort_reaches_a_template_that_reads_it_before_that_of_the_run() -> None:
    """Unsloth's notebooks for gpt-oss have it as a column of the dataset; without it, they sample at "medium"."""
    row = {"prompt": CHAT, "messages": [*CHAT, {"role": "assistant", "content": "4"}], "reasoning_effort": "low"}
    tokenizer = tokenizer_of("gptoss")
    encoders: list[Any] = [PromptEncoder(tokenizer, 500, {"reasoning_effort": "high"}),
                           ConversationEncoder(tokenizer, 500, [tokenizer.eos_token_id])]
    specs = EnvSpecs(tokenizer, [], None, 10, {})
    for encoder in [*encoders, EpisodeEncoder(PromptEncoder(tokenizer, 500), specs)]:
        efforts = [encoder.encode(row | {"reasoning_effort": effort}).text.partition("Reasoning: ")[2].split()[0]
                   for effort in ("low", None, "high")]
        assert efforts == ["low", "high" if encoder is encoders[0] else "medium", "high"]
    tokenizer = tokenizer_of("qwen3")
    texts = {PromptEncoder(tokenizer, 500).encode(each).text for each in (row, {"prompt": CHAT})}  # type: ignore
    assert len(texts) == 1


def test_chats_for_a_tokenizer_without_a_template_are_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match="no chat template: set"):
        source([{"prompt": CHAT}]).take(1)
