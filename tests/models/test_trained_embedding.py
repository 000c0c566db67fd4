"""Embedding and head beside LoRA give the values and gradients of plain transformers and peft, tied and untied."""

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy
import peft
import pytest
import torch
from families import assert_alike
from packed_problem import alone, batch_of, gradients, learned, learned_alone
from small_models import TINY, random_model, scatter
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.fast_model import FastPeftModel, with_lora
from lowmem_grpo.memory.offload.embedding import HostEmbedding
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.trained_embedding import SharedRows, prepare_embeddings
from lowmem_grpo.trainer.model_setup import Brought

BATCH = batch_of([(3, [4]), (2, [5, 3])])
BATCH.input_ids[4] = BATCH.input_ids[1]  # a token that occurs twice
ROWS = [int(each) for each in (BATCH.input_ids[4], BATCH.targets[5], 0, 383, BATCH.input_ids[0])]  # 0 is padding
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "whole, untied": ("Llama", False, WHOLE),
    "whole, tied": ("Llama", True, WHOLE | {"ensure_weight_tying": True}),
    "whole, tied, one name": ("Qwen3", True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "the embedding": ("Llama", False, {"modules_to_save": ["embed_tokens"]}),
    "the head": ("Llama", False, {"modules_to_save": ["lm_head"]}),
    "whole, scaled, capped": ("Gemma3", True, WHOLE | {"ensure_weight_tying": True}),
    "rows, tied": ("Llama", True, {"trainable_token_indices": ROWS}),
    "rows of the embedding": ("Llama", False, {"trainable_token_indices": ROWS}),
    "rows of both": ("Llama", False, {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": ROWS[:3]}}),
    "rows, scaled, capped": ("Gemma3", True, {"trainable_token_indices": ROWS}),
    "rows of one, the other whole": ("Llama", False, {"trainable_token_indices": ROWS, "modules_to_save": ["lm_head"]}),
}


def pair(family: str, tied: bool, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Ours and PEFT's model of the same weights, whose LoRA and trained embedding are not those of the start."""
    base = random_model(family, tie_word_embeddings=tied).to(dtype)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings(action="ignore"):
        theirs = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
        ours = Brought(base, AutoTokenizer.from_pretrained(TINY), config, None, GRPOConfig(), 64).trainable()
    for model in (theirs, ours):
        with torch.no_grad():
            for place, part in enumerate(("lora_", "modules_to_save", "trainable_tokens_delta")):
                scatter(model, seed=place, of=part)
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_transformers_and_peft(case: str) -> None:
    ours, theirs = pair(*CASES[case])
    assert_alike(learned(Policy(ours), BATCH), learned_alone(theirs, BATCH), 1e-5)


@pytest.mark.parametrize("case", ["whole, untied", "rows, tied", "rows of both", "rows, scaled, capped"])
def test_entropy_and_other_tokens_train_embedding_and_head_at_any_temperature(case: str) -> None:
    ours, theirs = pair(*CASES[case])
    policy, places, tokens = Policy(ours), torch.tensor([0, 2, 2, 5]), torch.tensor([ROWS[0], 7, ROWS[1], ROWS[1]])
    for temperature in (0.3, 1.7):
        hidden, targets = policy.at_trained(BATCH)
        logprobs, entropy, _ = policy.at_head(hidden, targets, temperature, True)
        other = policy.head.logits_of(hidden, places, tokens)
        mine = gradients(ours, torch.cat([logprobs, entropy, other]))
        dense = all_logprobs(theirs, temperature)
        scores = torch.cat([dense.gather(1, targets[:, None])[:, 0], -(dense.exp() * dense).sum(1),
                            all_logprobs(theirs, None)[places, tokens]])
        for name, gradient in gradients(theirs, scores).items():
            assert (mine[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("case", ["rows, tied", "rows of both", "rows, scaled, capped"])
def test_transformers_own_forward_pass_trains_the_rows_of_the_head(case: str) -> None:
    ids = BATCH.input_ids[None]
    mine, theirs = (gradients(model, model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids.flip(1)[..., None]))
                    for model in pair(*CASES[case]))
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def all_logprobs(model: Any, temperature: float | None) -> Tensor:
    """(N, V) log-probabilities of all tokens by the model's own forward pass; its logits without a temperature."""
    found = torch.zeros(len(BATCH.input_ids), 384)
    lengths = BATCH.cu_seqlens.diff().tolist()
    for row, length in zip(BATCH.sources.view(len(lengths), -1), lengths, strict=True):
        mine = BATCH.loss_mask[row[:length]]
        logits = model(input_ids=BATCH.input_ids[row[:length]][None], use_cache=False).logits[0]
        found = found.index_put((row[:length][mine],), logits[mine])
    found = found[BATCH.trained]
    return found if temperature is None else (found / temperature).log_softmax(-1)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_base_and_the_adapter_comes_back(case: str) -> None:
    ours, theirs = pair(*CASES[case])
    policy = Policy(ours)
    with torch.no_grad():
        begun, _ = policy.logprobs(BATCH, 1.0)
        with policy.base_model(), theirs.disable_adapter():
            assert (policy.logprobs(BATCH, 1.0)[0] - alone(theirs, BATCH)).abs().max() < 1e-5
        assert torch.equal(policy.logprobs(BATCH, 1.0)[0], begun)
        assert (ours(BATCH.input_ids[None]).logits - theirs(BATCH.input_ids[None]).logits).abs().max() < 1e-5


def test_rows_make_no_copy_of_the_matrix_and_no_gradient_of_its_size() -> None:
    ours, _ = pair(*CASES["rows of both"])
    policy = Policy(ours)
    assert policy.head.weight is policy.base.get_output_embeddings().original_module.weight
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(tuple(kept.shape)) or kept, lambda x: x):
        logprobs, _ = policy.logprobs(BATCH, 1.0)
    logprobs.sum().backward()
    assert (384, 32) not in saved
    assert {tuple(weight.parameter.grad.shape) for weight in policy.trained if weight.base is not None} == {
        (5, 32), (3, 32)}


def test_a_second_adapter_starts_from_the_bases_rows_not_from_the_first_ones() -> None:
    ours, theirs = pair(*CASES["rows, tied"])
    embedding = ours.get_base_model().get_input_embeddings()
    ours(BATCH.input_ids[None])
    ours.add_adapter("other", copy.deepcopy(ours.peft_config["default"]))
    assert torch.equal(embedding.token_adapter.trainable_tokens_delta["other"],
                       theirs.get_base_model().get_input_embeddings().original_module.weight[ROWS])
    ours.set_adapter("other")
    with torch.no_grad(), theirs.disable_adapter():
        assert (ours(BATCH.input_ids[None]).logits - theirs(BATCH.input_ids[None]).logits).abs().max() < 1e-5
    assert isinstance(embedding.token_adapter, SharedRows)


@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens", "lm_head"]},
                                      {"trainable_token_indices": ROWS}])
def test_an_embedding_on_the_host_is_trained_there(settings: dict[str, Any]) -> None:
    base = random_model("Llama", tie_word_embeddings=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    theirs = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    base.set_input_embeddings(HostEmbedding(base.get_input_embeddings()))
    ours = Brought(base, AutoTokenizer.from_pretrained(TINY), config, None, GRPOConfig(), 64).trainable()
    for model in (theirs, ours):
        with torch.no_grad():
            scatter(model, of="lora_")
    assert_alike(learned(Policy(ours), BATCH), learned_alone(theirs, BATCH), 1e-5)


def test_rows_of_an_embedding_on_the_host_are_trained_on_the_models_device() -> None:
    base = random_model("Llama", tie_word_embeddings=False)
    table = HostEmbedding(base.get_input_embeddings())
    base.to("meta").set_input_embeddings(table)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=ROWS))
    prepare_embeddings(model)
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    assert {weight.device.type for name, weight in model.named_parameters() if "tokens_delta" in name} == {"meta"}
    assert table.weight.device.type == "cpu"


@pytest.mark.parametrize("case", ["rows, tied", "rows of both"])
def test_what_computed_with_other_values_leaves_the_trained_rows_in_the_matrix(case: str) -> None:
    ours, _ = pair(*CASES[case])
    policy = Policy(ours)
    matrix = policy.base.get_input_embeddings().original_module.weight
    policy.logprobs(BATCH, 1.0)
    own, values = matrix.detach().clone(), policy.trained.values()
    policy.reference_adapter = {name: value + 1 for name, value in values.items()}
    policy.device = torch.device("meta")  # some values, as those of an embedding on the host, lie elsewhere
    for context in (policy.base_model, policy.reference):
        with torch.no_grad(), context():
            policy.logprobs(BATCH, 1.0)
            assert not torch.equal(matrix, own)
        assert torch.equal(matrix, own)
    ours.add_adapter("other", copy.deepcopy(ours.peft_config["default"]))
    ours.set_adapter("other")
    assert not torch.equal(matrix, own)
    ours.set_adapter("default")
    assert torch.equal(matrix, own)


@pytest.mark.parametrize("settings", [WHOLE, WHOLE | {"ensure_weight_tying": True}])
def test_a_float16_model_trains_float32_copies(settings: dict[str, Any]) -> None:
    ours, theirs = pair("Llama", "ensure_weight_tying" in settings, settings, torch.float16)
    policy = Policy(ours)
    assert policy.dtype == torch.float16
    mine, (values, theirs_own) = learned(policy, BATCH), learned_alone(theirs, BATCH)
    assert (mine[0] - values).abs().max() < 0.02
    for name, gradient in mine[1].items():
        if "modules_to_save" in name:
            assert gradient.dtype == torch.float32
            far = (gradient - theirs_own[name].float()).norm() / theirs_own[name].float().norm()
            assert far < 0.02, (name, far)
    assert ours(BATCH.input_ids[None]).logits.isfinite().all()


def test_an_average_of_16_bit_matrices_follows_and_is_computed_with() -> None:
    policy = Policy(pair("Llama", False, WHOLE, torch.bfloat16)[0])
    (weight,) = (each for each in policy.trained if each.group == "lm_head")
    expected = weight.parameter.detach().double()
    policy.keep_reference(moves=True)
    with torch.no_grad():
        weight.parameter.mul_(1.02)
    for _ in range(20):
        policy.move_reference(0.05)
        expected = 0.95 * expected + 0.05 * weight.parameter.detach().double()
    assert policy.reference_adapter is not None
    assert (policy.reference_adapter[weight.name].double() - expected).abs().max() < 1e-6 * expected.abs().max()
    with policy.reference():
        assert torch.equal(policy.head.weight, policy.reference_adapter[weight.name].bfloat16())
        assert policy.logprobs(BATCH, 1.0)[0].isfinite().all()


def loaded(tmp: Any = None) -> Any:
    return FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)[0]


def test_unsloths_spelling_and_pefts_mean_the_same(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
                    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        with caplog.at_level("INFO", logger="lowmem_grpo"):
            model = FastLanguageModel.get_peft_model(loaded(), r=2, **options)
        assert "one matrix is trained for both" in caplog.text
        embedding, head = model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings()
        assert head.weight is embedding.weight and embedding.weight.requires_grad
        assert isinstance(model, FastPeftModel)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modules_to_save": ["model.norm"]}, "norm cannot be trained .*: allowed .* are embed_tokens and lm_head"),
    ({"modules_to_save": "lm_head"}, "must be a list of names"),
    ({"modules_to_save": ["lm_head"], "ensure_weight_tying": False}, "set ensure_weight_tying=True"),
    ({"target_modules": ["lm_head"]}, "name linear layers too"),
    ({"target_modules": r"lm_head|.*q_proj"}, "names lm_head; embedding and head get no LoRA"),
    ({"trainable_token_indices": [1, 384]}, "names row 384 of embed_tokens, .* rows 0 to 383.*add_new_tokens"),
    ({"trainable_token_indices": [-1]}, "names row -1"),
    ({"trainable_token_indices": [4, 9, 4]}, "names row 4 of embed_tokens twice"),
    ({"trainable_token_indices": [1.5]}, "list of whole numbers"), ({"trainable_token_indices": 3}, "list of whole"),
    ({"trainable_token_indices": {"norm": [1]}}, "norm cannot be trained"),
    ({"trainable_token_indices": {"lm_head": [1]}}, "give trainable_token_indices as a list"),
    ({"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}, "both name embed_tokens"),
    ({"trainable_token_indices": [1], "modules_to_save": ["lm_head"]}, "both name embed_tokens"),
    ({"trainable_token_indices": {5: [1]}}, "by the names of modules"),
    ({"trainable_token_indices": {"embed_tokens": []}}, "names no row of embed_tokens; leave it out"),
    *(({"modules_to_save": [name]}, "cannot be trained beside LoRA") for name in ("base_model.model.lm_head", "")),
    ({"trainable_token_indices": {"base_model.embed_tokens": [1]}}, "base_model.embed_tokens cannot be trained"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_trained_is_refused_with_the_fix(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        FastLanguageModel.get_peft_model(loaded(), r=2, **({"target_modules": ["q_proj"]} | options))


def test_names_in_a_tuple_and_numpys_ids_are_trained_and_saved(tmp_path: Path) -> None:
    chosen = {"embed_tokens": (numpy.int64(4), numpy.int64(3))}
    model = FastLanguageModel.get_peft_model(loaded(), r=2, target_modules=["q_proj"], trainable_token_indices=chosen)
    model.save_lora(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["trainable_token_indices"] == {"embed_tokens": [4, 3]}
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=("lm_head",), ensure_weight_tying=True)
    assert with_lora(loaded(), config).get_output_embeddings().weight.requires_grad


def test_a_tied_model_with_pefts_default_is_refused() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **WHOLE)
    with pytest.raises(ValueError, match="two copies that drift apart: set ensure_weight_tying=True"):
        Brought(model, None, config, None, GRPOConfig(), 64).trainable()


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": {"lm_head": [5]}}])
def test_a_head_in_4_bits_is_refused_before_peft_wraps_it(settings: dict[str, Any]) -> None:
    model = random_model("Llama", tie_word_embeddings=False)
    model.lm_head = bitsandbytes.nn.Linear4bit(32, 384, bias=False, quant_type="nf4")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    with pytest.raises(ValueError, match="lm_head is a Linear4bit, and only plain weights in 16 or 32 bits"):
        Brought(model, AutoTokenizer.from_pretrained(TINY), config, None, GRPOConfig(), 64).trainable()
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("case", ["whole, untied", "whole, tied", "rows of both"])
def test_a_model_that_peft_made_keeps_its_parameters_and_its_base(case: str) -> None:
    ours, theirs = pair(*CASES[case])
    own = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    brought = Brought(theirs, AutoTokenizer.from_pretrained(TINY), None, None, GRPOConfig(), 64).trainable()
    held, ids = dict(brought.named_parameters()), BATCH.input_ids[None]
    assert all(held[name] is parameter for name, parameter in own.items())
    with torch.no_grad():
        assert torch.equal(brought(ids).logits, ours(ids).logits)
        with brought.disable_adapter(), ours.disable_adapter():
            assert torch.equal(brought(ids).logits, ours(ids).logits)


def test_rows_are_trained_in_a_base_whose_embedding_makes_leaves_that_require_gradients() -> None:
    base = random_model("Llama", tie_word_embeddings=False)
    base.enable_input_require_grads()  # as prepare_model_for_kbit_training does
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], trainable_token_indices=ROWS)
    ours = Brought(base, AutoTokenizer.from_pretrained(TINY), config, None, GRPOConfig(), 64).trainable()
    with torch.no_grad():
        scatter(ours, seed=0, of="lora_")
        scatter(ours, seed=2, of="trainable_tokens_delta")
    assert_alike(learned(Policy(ours), BATCH), learned_alone(pair(*CASES["rows of the embedding"])[1], BATCH), 1e-5)


def test_a_head_with_a_bias_which_no_adapters_file_would_hold_is_refused() -> None:
    model = random_model("Llama", tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(32, 384)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head has a bias, .* name rows of it in trainable_token_indices"):
        Brought(model, AutoTokenizer.from_pretrained(TINY), config, None, GRPOConfig(), 64).trainable()


@pytest.mark.parametrize("case", ["rows, tied", "rows of both"])
def test_merged_rows_leave_the_base_where_it_is_asked_for_and_stay_where_peft_leaves_them(case: str) -> None:
    (ours, theirs), ids = pair(*CASES[case]), BATCH.input_ids[None]
    for model in (ours, theirs):
        model.merge_adapter()
    with torch.no_grad():
        merged = theirs(ids).logits
        with ours.disable_adapter(), theirs.disable_adapter():
            assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4
            assert (ours(ids).logits - merged).abs().max() > 1
        ours.merge_adapter()
        assert (ours.unload()(ids).logits - merged).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["rows, tied", "rows of both"])
def test_rows_that_were_first_read_in_inference_mode_are_trained(case: str) -> None:
    ours, theirs = pair(*CASES[case])
    with torch.inference_mode(), ours.disable_adapter():
        ours(BATCH.input_ids[None])
    with torch.inference_mode():
        ours(BATCH.input_ids[None])
    assert_alike(learned(Policy(ours), BATCH), learned_alone(theirs, BATCH), 1e-5)
