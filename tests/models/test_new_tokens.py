"""New tokens and resized vocabularies: the rows that transformers and arithmetic give them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SHAPE, TINY, random_model
from tables import not_refused
from torch import Tensor
from transformers import AutoTokenizer

from lowmem_grpo import FastLanguageModel, SamplingParams, add_new_tokens
from lowmem_grpo.memory.offload.embedding import HostEmbedding
from lowmem_grpo.models.new_tokens import untrained

TOKENS = len(AutoTokenizer.from_pretrained(TINY))  # rows of the models here: 384


def folder_of(folder: Path, **sizes: Any) -> Path:
    """A random model with rows that no token has, and the embedded tokenizer."""
    random_model("Llama", **sizes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return folder_of(tmp_path / "base", tie_word_embeddings=request.param)


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, **{"load_in_4bit": False} | options)


def matrices(model: Any) -> list[Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def mean(rows: Tensor) -> Tensor:
    """The mean without the padding token's row, which is zero in an embedding of transformers' own."""
    return rows[rows.abs().sum(1) > 0].mean(0)


def names(count: int) -> list[str]:
    return [f"<new {number}>" for number in range(count)]


def test_a_resized_model_has_transformers_rows_and_logits(stored: Path) -> None:
    model, tokenizer = load(stored)
    theirs = random_model("Llama", tie_word_embeddings=model.config.tie_word_embeddings)
    tokenizer.add_tokens(names(80))
    begun = torch.get_rng_state()
    assert model.resize_token_embeddings(float(len(tokenizer)), pad_to_multiple_of=16) is model.get_input_embeddings()
    assert torch.equal(torch.get_rng_state(), begun)
    theirs.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=16)
    assert model.config.vocab_size == theirs.config.vocab_size == 416 > len(tokenizer)
    for got, wanted in zip(matrices(model), matrices(theirs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)  # they draw with a variance of 1e-9
    ids = torch.tensor([[5, 9, len(tokenizer) - 1]])
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=2e-2)
    assert model.loaded.new_tokens == [*range(384, 416)]


def test_new_tokens_take_free_rows_and_then_new_ones_with_the_mean_of_the_old(stored: Path) -> None:
    model, tokenizer = load(stored)
    before = [weight.clone() for weight in matrices(model)]
    add_new_tokens(model, tokenizer, names(3))
    assert tokenizer.convert_tokens_to_ids(names(3)) == model.loaded.new_tokens == [*range(TOKENS, TOKENS + 3)]
    for weight, old in zip(matrices(model), before, strict=True):
        wanted = old.clone()
        wanted[TOKENS:TOKENS + 3] = mean(old)
        torch.testing.assert_close(weight, wanted)
    add_new_tokens(model, tokenizer, names(70))
    assert model.config.vocab_size == len(matrices(model)[1]) == len(tokenizer) == TOKENS + 70
    assert model.loaded.new_tokens == [*range(TOKENS, TOKENS + 70)]
    tied = matrices(model)[0] is matrices(model)[1]
    assert tied == model.config.tie_word_embeddings
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_interpolated_token_is_between_the_mean_and_the_tokens_of_its_text(stored: Path) -> None:
    model, tokenizer = load(stored)
    pieces = tokenizer("<sum>", add_special_tokens=False).input_ids
    before = [weight.clone() for weight in matrices(model)]
    add_new_tokens(model, tokenizer, ["<sum>"], method="interpolation", interpolation=0.25)
    assert len(pieces) > 1 and tokenizer("<sum>", add_special_tokens=False).input_ids == [TOKENS]
    for weight, old in zip(matrices(model), before, strict=True):
        torch.testing.assert_close(weight[TOKENS], 0.75 * mean(old) + 0.25 * old[pieces].mean(0))


def test_rows_of_zeros_are_no_part_of_the_mean(tmp_path: Path) -> None:
    model, tokenizer = load(folder_of(tmp_path / "base"))
    model.get_input_embeddings().weight.data[TOKENS:] = 0
    wanted = model.get_input_embeddings().weight[1:TOKENS].mean(0)
    add_new_tokens(model, tokenizer, ["<sum>"])
    torch.testing.assert_close(model.get_input_embeddings().weight[TOKENS], wanted)


def test_tokens_that_the_tokenizer_has_are_told_and_a_cell_run_twice_changes_nothing(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = load(stored)
    add_new_tokens(model, tokenizer, ["<sum>", "a"])
    assert "has 'a' already" in caplog.text
    before, vocabulary = [weight.clone() for weight in matrices(model)], tokenizer.get_vocab()
    add_new_tokens(model, tokenizer, ["<sum>", "a"])
    adapted = FastLanguageModel.get_peft_model(model, r=2)
    add_new_tokens(adapted, tokenizer, ["<sum>", "a"])
    assert tokenizer.get_vocab() == vocabulary
    assert all(map(torch.equal, matrices(adapted), before))


def test_a_token_that_only_the_tokenizer_has_gets_its_row(stored: Path) -> None:
    model, tokenizer = load(stored)
    tokenizer.add_tokens(names(70))
    add_new_tokens(model, tokenizer, [names(70)[-1]])
    assert model.loaded.new_tokens == [*range(384, TOKENS + 70)] and model.config.vocab_size == TOKENS + 70


def test_rows_are_kept_where_fewer_are_asked_for(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = load(stored)
    model.resize_token_embeddings(len(tokenizer) + 5)
    assert f"keeps its 384 rows, of which {TOKENS + 5} were asked for" in caplog.text
    assert len(matrices(model)[1]) == model.config.vocab_size == 384 and model.loaded.new_tokens == []
    assert "trainable_token_indices" not in caplog.text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    model.resize_token_embeddings(len(tokenizer))
    assert f"trainable_token_indices=[{TOKENS}, {TOKENS + 1}] of get_peft_model trains them" in caplog.text


def test_new_tokens_are_trained_unless_something_else_is_named(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    for named, both in (({}, True), ({"trainable_token_indices": [5]}, False), ({"modules_to_save": ["lm_head"]}, 0)):
        model, tokenizer = load(stored)
        add_new_tokens(model, tokenizer, names(2))
        tied = model.config.tie_word_embeddings
        with caplog.at_level("INFO", logger="lowmem_grpo"):
            adapted = FastLanguageModel.get_peft_model(model, r=2, **named)
        new = model.loaded.new_tokens
        assert ("rows of 2 new tokens are trained beside LoRA" in caplog.text) == both
        config = adapted.peft_config["default"]
        if both:
            assert config.trainable_token_indices == (new if tied else {"embed_tokens": new, "lm_head": new})
        assert untrained(adapted, new) == ([] if both or (tied and "modules_to_save" in named) else new)
        caplog.clear()


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"offload_embedding": True}, {}])
def test_a_new_token_is_sampled_with_by_quantized_models_and_by_embeddings_on_the_host(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model, tokenizer = load(folder_of(tmp_path / "base", tie_word_embeddings=False), **options)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    first = model.fast_generate("Start", params)[0].outputs[0].token_ids
    add_new_tokens(model, tokenizer, names(80))
    assert isinstance(model.get_input_embeddings(), HostEmbedding) == ("offload_embedding" in options)
    assert [*model.fast_generate("Start", params)[0].outputs[0].token_ids] == [*first]
    model.get_output_embeddings().weight.data[-1] = 100 * model.get_output_embeddings().weight[first[0]]
    [said] = model.fast_generate("Start", params)[0].outputs
    assert said.token_ids[0] == TOKENS + 79 and said.text.startswith(names(80)[-1])


def test_what_cannot_be_added_or_resized_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    model, tokenizer = load(folder_of(tmp_path / "base"))
    adapted = FastLanguageModel.get_peft_model(load(tmp_path / "base")[0], r=2)
    before = tokenizer.get_vocab()
    calls = {
        "a_list_of_texts": (lambda: add_new_tokens(model, tokenizer, "<sum>"), "must be a list of texts"),
        "nothing": (lambda: add_new_tokens(model, tokenizer), "must be a list of texts"),
        "empty": (lambda: add_new_tokens(model, tokenizer, [""]), "must be a list of texts"),
        "method": (lambda: add_new_tokens(model, tokenizer, ["<a>"], method="zero"), "method is 'zero'"),
        "share": (lambda: add_new_tokens(model, tokenizer, ["<a>"], "interpolation", 1.5), "interpolation is 1.5"),
        "lora": (lambda: add_new_tokens(adapted, tokenizer, ["<a>"]), "has LoRA already, which was made"),
        "resized lora": (lambda: adapted.resize_token_embeddings(400), "has LoRA already"),
        "drawn": (lambda: model.resize_token_embeddings(400, mean_resizing=False), "mean_resizing=False: new rows"),
        "too few": (lambda: model.resize_token_embeddings(5), f"is 5, and the tokenizer has {TOKENS} tokens"),
        "no number": (lambda: model.resize_token_embeddings("400"), "new_num_tokens is '400'"),
    }
    assert not_refused(lambda case: calls[case][0](), [(case, says) for case, (_, says) in calls.items()],
                       ValueError) == []
    for wrong in ((random_model("Llama"), tokenizer), (tokenizer, model), (model, None), (model, "tiny")):
        with pytest.raises(TypeError, match="take the one that FastLanguageModel"):
            add_new_tokens(*wrong, ["<a>"])
    assert adapted.resize_token_embeddings(384) is adapted.get_input_embeddings()  # a cell that is run twice
    assert tokenizer.get_vocab() == before and len(matrices(model)[0]) == SHAPE["vocab_size"]
