"""Embedding and head beside LoRA in adapters' files: ours is loaded by plain transformers and peft, and theirs here."""

import copy
import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import TINY, random_model, scatter
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import FastLanguageModel, GRPOConfig, SamplingParams, add_new_tokens
from lowmem_grpo.cli import playing
from lowmem_grpo.fast_model import FastPeftModel, adapter_for
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import adapter_of
from lowmem_grpo.runs.checkpoint import load_checkpoint, load_weights, save_checkpoint
from lowmem_grpo.runs.checkpoint_state import base_digest
from lowmem_grpo.runs.saved_adapter import AdapterError, MismatchError
from lowmem_grpo.trainer.parts import bring_model
from tests.attacks.small_run import StopAt, differences, make, with_new_tokens, with_whole_embedding

IDS = torch.tensor([[5, 9, 11, 200, 31, 7, 8, 90, 14, 301]])
NEW = [f"<new {number}>" for number in range(80)]  # 62 rows have no token, so that the model is resized to 402 rows
WHOLE: dict[str, Any] = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # whether the model is tied, and what is trained beside LoRA
    "whole, tied": (True, WHOLE), "whole, untied": (False, WHOLE),
    "the head": (False, {"modules_to_save": ["lm_head"]}),
    "rows, tied": (True, {"trainable_token_indices": [9, 5, 7]}),
    "rows of the embedding": (False, {"trainable_token_indices": [9, 5, 7]}),
    "rows of both": (False, {"trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [300, 2, 7]}}),
}
NEW_IDS = [*range(322, 402)]
RESIZED: dict[str, tuple[bool, dict[str, Any]]] = {
    "whole, tied": CASES["whole, tied"], "whole, untied": CASES["whole, untied"],
    "rows, tied": (True, {"trainable_token_indices": NEW_IDS}),
    "rows of both": (False, {"trainable_token_indices": {"embed_tokens": NEW_IDS, "lm_head": NEW_IDS}}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Random models, tied and untied, with 384 rows for the 322 tokens of the embedded tokenizer."""
    folders = {tied: tmp_path_factory.mktemp("base") for tied in (True, False)}
    for tied, folder in folders.items():
        random_model("Llama", tie_word_embeddings=tied).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folders


def load(folder: Path, **form: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, **{"load_in_4bit": False} | form)[0]


def ours(base: Path, settings: dict[str, Any], new: list[str] | None = None, **form: Any) -> FastPeftModel:
    """Our model with LoRA and what the settings train beside it, none of it as at the start."""
    bare = load(base, **form)
    if new is not None:
        add_new_tokens(bare, bare.loaded.tokenizer, new, "interpolation")
    model = FastLanguageModel.get_peft_model(bare, r=4, target_modules=["q_proj", "up_proj"], **settings,
                                             use_gradient_checkpointing=False)
    return scattered(model)


def scattered(model: Any) -> Any:
    for place, part in enumerate(("lora_", "modules_to_save", "trainable_tokens_delta")):
        scatter(model, seed=place, of=part)
    return model.eval()


def by_peft(base: Path, folder: Path) -> Any:
    """Plain transformers' and PEFT's model of a saved adapter, as its documentation says."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(base)
    if len(tokenizer) > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(len(tokenizer))
    return PeftModel.from_pretrained(model, str(folder)).eval()


def of_peft(bases: dict[bool, Path], case: str) -> Any:
    """PEFT's own model of a case, none of it as at the start."""
    tied, settings = copy.deepcopy(CASES[case])  # PEFT changes the lists
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", ensure_weight_tying=tied, **settings)
    with warnings.catch_warnings(action="ignore"):
        return scattered(get_peft_model(AutoModelForCausalLM.from_pretrained(bases[tied]), config))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    return model.eval()(input_ids=ids).logits[0].float()


def assert_same(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_a_saved_adapter_gives_its_models_logits_here_and_in_peft(
    case: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, settings = CASES[case]
    model = ours(bases[tied], settings)
    wanted = logits_of(model)
    model.save_lora(tmp_path / "saved")
    assert_same(logits_of(by_peft(bases[tied], tmp_path / "saved")), wanted)
    again = load(tmp_path / "saved")
    assert torch.equal(logits_of(again), wanted)
    with again.disable_adapter():
        assert torch.equal(logits_of(again), logits_of(load(bases[tied])))
    embedding, head = again.get_input_embeddings(), again.get_output_embeddings()
    assert (embedding.weight is head.weight) == tied
    again.save_lora(tmp_path / "again")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", RESIZED)
def test_an_adapter_with_new_tokens_brings_them_and_their_base_along(
    case: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, settings = RESIZED[case]
    model, ids = ours(bases[tied], settings, NEW), torch.tensor([[5, 9, 322, 401, 7]])
    wanted = logits_of(model, ids)
    with Policy(model).reference():
        reference = logits_of(model, ids)
    model.save_lora(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.loaded.tokenizer.convert_tokens_to_ids(NEW) == again.loaded.new_tokens == NEW_IDS
    assert torch.equal(logits_of(again, ids), wanted) and len(wanted[0]) == 402
    with Policy(again).reference():
        assert torch.equal(logits_of(again, ids), reference)
    assert_same(logits_of(by_peft(bases[tied], tmp_path / "saved"), ids), wanted)
    export(tmp_path / "saved", "adapter", tmp_path / "copy")
    assert torch.equal(logits_of(load(tmp_path / "copy"), ids), wanted)


@pytest.mark.parametrize("form", [{"load_in_4bit": True}, {"offload_embedding": True}, {"dtype": "float16"},
                                  {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("case", ["whole, untied", "rows of both"])
def test_models_in_4_and_16_bits_and_embeddings_on_the_host_come_back_as_they_were(
    case: str, form: dict[str, Any], bases: dict[bool, Path], tmp_path: Path
) -> None:
    model, ids = ours(bases[False], RESIZED[case][1], NEW, **form), torch.tensor([[5, 9, 322, 401, 7]])
    model.save_lora(tmp_path / "saved")
    again = load(tmp_path / "saved", **form)
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert again.loaded.new_tokens == NEW_IDS
    assert {name: weight.dtype for name, weight in again.named_parameters()} == {
        name: weight.dtype for name, weight in model.named_parameters()}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_pefts_own_loads_and_samples_with_its_logits(
    case: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, theirs = CASES[case][0], of_peft(bases, case)
    theirs.save_pretrained(tmp_path / "saved")
    wanted = logits_of(theirs)
    assert_same(logits_of(load(tmp_path / "saved")), wanted)
    for other in ({}, WHOLE, {"trainable_token_indices": [5, 1]}):
        live = ours(bases[tied], other)
        own = logits_of(live)
        before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
        with adapter_for(live, live.load_lora(tmp_path / "saved")):
            assert_same(logits_of(live), wanted)
        after = live.state_dict()
        assert [*after] == [*before] and all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert torch.equal(logits_of(live), own)
        request = live.load_lora(tmp_path / "saved")
        assert live.fast_generate("Start", SamplingParams(max_tokens=1), lora_request=request)


def resized_by_peft(base: Path, folder: Path, tied: bool, settings: dict[str, Any]) -> None:
    """Save PEFT's adapter of a model that transformers resized to 402 rows; PEFT saves whole matrices of it too."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(NEW)
    model.resize_token_embeddings(len(tokenizer))
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", ensure_weight_tying=tied, **settings)
    with warnings.catch_warnings(action="ignore"):
        scattered(get_peft_model(model, config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.every(3)
@pytest.mark.parametrize("case", [*(name for name in CASES if name != "rows of both"), "LoRA, tied", "LoRA, untied"])
def test_an_adapter_of_pefts_own_brings_the_matrices_of_its_resized_base(
    case: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, settings = copy.deepcopy(CASES.get(case, (case == "LoRA, tied", {})))
    resized_by_peft(bases[tied], tmp_path / "saved", tied, settings)
    theirs, mine, ids = by_peft(bases[tied], tmp_path / "saved"), load(tmp_path / "saved"), torch.tensor([[5, 401, 7]])
    assert_same(logits_of(mine, ids), logits_of(theirs, ids))
    with mine.disable_adapter(), theirs.disable_adapter():
        assert_same(logits_of(mine, ids), logits_of(theirs, ids))
    mine.save_lora(tmp_path / "again")
    assert_same(logits_of(load(tmp_path / "again"), ids), logits_of(theirs, ids))
    with adapter_for(mine, mine.load_lora(tmp_path / "saved")):
        assert_same(logits_of(mine, ids), logits_of(theirs, ids))
    evaluated, request = playing.load(str(bases[tied]), tmp_path / "saved", 64, load_in_4bit=False)
    with adapter_for(evaluated, request):
        assert_same(logits_of(evaluated, ids), logits_of(theirs, ids))
    export(tmp_path / "saved", "adapter", tmp_path / "copy")
    assert_same(logits_of(by_peft(bases[tied], tmp_path / "copy"), ids), logits_of(theirs, ids))
    export(tmp_path / "saved", "merged", tmp_path / "merged", ExportSettings(load_in_4bit=False, dtype="bfloat16"))
    merged, wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), theirs.merge_and_unload()
    for end in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(merged, end)().weight, getattr(wanted, end)().weight.bfloat16())
    says = (tmp_path / "merged" / "README.md").read_text()
    assert ("trained beside it" in says) == (case in CASES) and "original_module" not in says
    bare = load(bases[tied])
    bare.resize_token_embeddings(402)
    other = FastLanguageModel.get_peft_model(bare, r=4, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"brings its own .*, and this model has other values: load the folder with"):
        other.load_lora(tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"from_pretrained"):
        ours(bases[tied], {}).load_lora(tmp_path / "saved")


@pytest.mark.parametrize("case", CASES)
def test_a_peft_model_that_is_brought_keeps_what_it_trains(
    case: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    theirs = of_peft(bases, case)
    wanted, mine = logits_of(theirs), bring_model(theirs, GRPOConfig(output_dir=str(tmp_path))).model
    assert_same(logits_of(mine), wanted)
    mine.save_lora(tmp_path / "saved")
    assert_same(logits_of(by_peft(bases[CASES[case][0]], tmp_path / "saved")), wanted)


def test_a_model_that_transformers_resized_comes_back_with_the_rows_that_were_drawn(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(bases[True]), AutoModelForCausalLM.from_pretrained(bases[True])
    tokenizer.add_tokens(NEW)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    wanted, ids = logits_of(model, torch.tensor([[5, 390, 401]])), [*range(384, 402)]
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", trainable_token_indices=ids)
    mine = bring_model(model, GRPOConfig(output_dir=str(tmp_path)), tokenizer, config).model
    mine.save_lora(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.loaded.new_tokens == ids
    for context in (nullcontext(), again.disable_adapter()):
        with context:
            assert torch.equal(logits_of(again, torch.tensor([[5, 390, 401]])), wanted)


def test_an_adapter_is_a_teacher_and_is_evaluated_with_what_it_trains_beside_lora(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    for case, (tied, settings) in RESIZED.items():
        model = ours(bases[tied], settings, NEW)
        wanted, folder = logits_of(model), tmp_path / case
        model.save_lora(folder)
        values = adapter_of(folder, Policy(model), model.loaded)
        assert all(torch.equal(values[weight.name], weight.parameter) for weight in Policy(model).trained)
        evaluated, request = playing.load(str(bases[tied]), folder, 64, load_in_4bit=False)
        with adapter_for(evaluated, request):
            assert_same(logits_of(evaluated), wanted)


def edit(folder: Path, name: str, **settings: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | settings))


def change(folder: Path, part: str, act: Any, file: str = "adapter_model.safetensors") -> None:
    """Give the tensors whose names end so another value; None takes them away."""
    tensors = load_file(folder / file)
    changed = {name: act(tensor) if name.endswith(part) else tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, folder / file)


def bring(folder: Path, name: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(384, 32)}, file)


ROWS = "trainable_tokens_delta"
BROKEN: list[tuple[str, Any, str]] = [  # what was saved, what happens to its folder, and what is said
    ("rows, tied", lambda at: change(at, ROWS, lambda _: None), "lacks the rows that its trainable_token_indices"),
    ("rows of both", lambda at: change(at, f"lm_head.token_adapter.{ROWS}", lambda _: None), r"lacks .*lm_head.*delta"),
    ("rows, tied", lambda at: change(at, ROWS, lambda rows: rows[:2].clone()), r"is \[2, 32\] where \[3, 32\] is"),
    ("rows, tied", lambda at: change(at, ROWS, lambda rows: rows * torch.nan), r"is not finite: .*delta holds NaN"),
    ("rows, tied", lambda at: edit(at, "adapter_config.json", trainable_token_indices=[9, 5, 10**9]), "row 1000000000"),
    ("rows, tied", lambda at: edit(at, "adapter_config.json", trainable_token_indices=[9, 5, -7]), "row -7"),
    ("rows, tied", lambda at: edit(at, "adapter_config.json", trainable_token_indices=[9, 5, 9]), "row 9.*twice"),
    ("rows, tied", lambda at: edit(at, "adapter_config.json", trainable_token_indices=None), f"holds .*{ROWS}"),
    ("whole, tied", lambda at: change(at, "lm_head.weight", lambda _: None), r"lacks .*lm_head\.weight"),
    ("whole, tied", lambda at: change(at, "lm_head.weight", lambda all: all + 1), "two different matrices"),
    ("whole, untied", lambda at: change(at, "embed_tokens.weight", lambda all: all[:, :31].clone()), r"\[384, 31\] wh"),
    ("whole, untied", lambda at: edit(at, "adapter_config.json", modules_to_save=["norm"]), "trains norm"),
    ("whole, untied", lambda at: edit(at, "adapter_config.json", modules_to_save=["lm_head"]), r"holds .*embed_tokens"),
    ("new rows", lambda at: change(at, "head", lambda rows: rows[:, :5].clone(), "new_rows.safetensors"), "new tokens"),
    ("new rows", lambda at: change(at, "head", lambda rows: rows[:, :5] * torch.nan, "new_rows.safetensors"),
     r"head is \[\d+, 5\] where \[\d+, 32\]"),
    ("new rows", lambda at: change(at, "embedding", lambda rows: rows[:1] * torch.nan, "new_rows.safetensors"),
     r"embedding is \[1, 32\] where"),
    ("new rows", lambda at: change(at, "ids", lambda ids: torch.zeros(2**21 + 1).long(), "new_rows.safetensors"),
     r"ids is \[2097153\] of int64"),
    ("new rows", lambda at: change(at, "ids", lambda ids: ids + 9, "new_rows.safetensors"), "hold rows of this"),
    ("new rows", lambda at: change(at, "ids", lambda ids: -ids, "new_rows.safetensors"), "hold rows of this"),
    ("new rows", lambda at: change(at, "head", lambda rows: rows * torch.nan, "new_rows.safetensors"), "NaN or inf"),
    ("new rows", lambda at: change(at, "ids", lambda ids: ids.float(), "new_rows.safetensors"), "hold rows of this"),
    ("new rows", lambda at: change(at, "ids", lambda ids: ids[None], "new_rows.safetensors"), "hold rows of this"),
    ("rows, tied", lambda at: bring(at, "base_model.model.other.lm_head.weight"), "brings .*other.lm_head"),
    ("new rows", lambda at: edit(at, "base_model.json", vocab_size=10**12), "names row 999999999999"),
    ("new rows", lambda at: edit(at, "base_model.json", vocab_size="many"), "vocab_size is 'many'"),
    ("new rows", lambda at: edit(at, "base_model.json", vocab_size=384), "hold rows of this base"),
]


@pytest.mark.parametrize(("case", "harm", "says"), BROKEN)
def test_a_file_that_does_not_hold_what_it_promises_is_refused(
    case: str, harm: Any, says: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, settings = RESIZED["rows of both"] if case == "new rows" else CASES[case]
    ours(bases[tied], settings, NEW if case == "new rows" else None).save_lora(tmp_path / "saved")
    harm(tmp_path / "saved")
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "saved")
    if case != "new rows":
        with pytest.raises(AdapterError, match=says):
            ours(bases[tied], {}).load_lora(tmp_path / "saved")


def test_new_tokens_without_their_tokenizer_are_warned_of(
    bases: dict[bool, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours(bases[True], CASES["whole, tied"][1], NEW).save_lora(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    load(tmp_path)
    assert "402 tokens and its base 384" in caplog.text and "holds no tokenizer" in caplog.text


def test_an_adapter_with_new_tokens_is_no_adapter_of_a_model_without_them(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    ours(bases[True], CASES["whole, tied"][1], NEW).save_lora(tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"is \[402, 32\] where \[384, 32\] is expected; .*from_pretrained"):
        ours(bases[True], {}).load_lora(tmp_path / "saved")


def test_an_adapter_of_two_copies_of_a_tied_matrix_is_refused(bases: dict[bool, Path], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases[True])
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **copy.deepcopy(WHOLE))
    with warnings.catch_warnings(action="ignore"):
        scattered(get_peft_model(base, config)).save_pretrained(tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"embedding is its head, and the file has two different matrices"):
        load(tmp_path / "saved")


def test_a_checkpoint_of_other_tokens_is_not_resumed_from(bases: dict[bool, Path], tmp_path: Path) -> None:
    folder, runs = tmp_path / "run", []
    for ids in ([9, 5, 7], [9, 5, 8]):
        model = ours(bases[True], {"trainable_token_indices": ids})
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        runs.append((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)))
    saved = save_checkpoint(folder, 1, *runs[0], {})
    with pytest.raises(MismatchError, match=r"trainable_token_indices is \[9, 5, 7\] in the checkpoint, \[9, 5, 8\]"):
        load_checkpoint(saved, *runs[1])


def test_trained_rows_do_not_make_another_base_of_it(bases: dict[bool, Path]) -> None:
    model = ours(bases[True], {"trainable_token_indices": [0, 1, 9]})
    before = base_digest(model)
    logits_of(scatter(model, of="delta"))  # the rows lie in the base's matrix then
    assert base_digest(model) == before


@pytest.mark.parametrize("model", [with_new_tokens, with_whole_embedding])
def test_a_resumed_run_is_the_undisturbed_one_and_its_best_checkpoint_is_loaded(model: Any, tmp_path: Path) -> None:
    settings = {"embedding_learning_rate": 1e-3, "max_completion_length": 8, "max_steps": 4}
    make(tmp_path / "whole", model=model(), **settings).train()
    make(tmp_path / "parts", model=model(), callbacks=[StopAt(2)], **settings).train()
    trainer = make(tmp_path / "parts", model=model(), **settings)
    assert trainer.train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []
    wanted = logits_of(trainer.model)
    assert torch.equal(logits_of(load(tmp_path / "parts" / "adapter")), wanted)
    load_weights(tmp_path / "parts" / "checkpoint-2", trainer.model)
    assert torch.equal(logits_of(load(tmp_path / "parts" / "checkpoint-2")), logits_of(trainer.model))
    assert not torch.equal(logits_of(trainer.model), wanted)
