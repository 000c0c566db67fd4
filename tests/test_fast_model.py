"""What the loader hands out: sampling in vLLM's shape, with the adapter that was asked for, and adapters on disk."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import scatter
from tables import every_row
from transformers import PreTrainedTokenizerBase, TextStreamer

import lowmem_grpo
from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.config.sampling import as_sampling_params
from lowmem_grpo.data.prompt_inputs import encoded
from lowmem_grpo.engines.request_output import as_request
from lowmem_grpo.fast_model import BareModel, FastPeftModel, RequestOutput, adapter_for
from lowmem_grpo.runs.saved_adapter import CheckpointError, base_of_adapter

QUESTION = "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@every_row("options", [{"temperature": 0.0}, {"n": 3, "temperature": 1.3}, {"stop": ["Answer", "="]}])
def test_text_is_told_in_parts_which_are_the_completions_of_fast_generate_in_their_order(
    bare: BareModel, options: dict[str, Any]
) -> None:
    params, said = SamplingParams(max_tokens=40, seed=3, **options), list[str]()
    bare.stream_text(CHAT, params, None, said.append)
    (output,) = bare.fast_generate(CHAT, params)
    assert "".join(said) == "".join(f"{completion.text}\n" for completion in output.outputs)
    assert len(said) > 5 or "stop" in options


def test_the_text_streamer_of_transformers_prints_while_either_model_generates(
    bare: BareModel, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (bare, load()):
        tokenizer = model.loaded.tokenizer
        ids = tokenizer(QUESTION, return_tensors="pt").input_ids
        capsys.readouterr()
        made = model.generate(input_ids=ids, streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=6,
                              do_sample=False)
        assert capsys.readouterr().out == tokenizer.decode(made[0, ids.shape[1]:]) + "\n"


def load(r: int = 4) -> FastPeftModel:
    """The embedded model under a random adapter."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    return scatter(FastLanguageModel.get_peft_model(bare, r=r, use_gradient_checkpointing=False), 0.2)


@pytest.fixture(scope="module")
def bare() -> BareModel:
    """The embedded model without an adapter."""
    return FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)[0]


@pytest.fixture(scope="module")
def model() -> FastPeftModel:
    """The embedded model under a random adapter; tests leave it as it was."""
    return load()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with another adapter, and what the model says with it."""
    folder, other = tmp_path_factory.mktemp("adapters") / "saved", scatter(load(r=2), 0.2, seed=2)
    other.save_lora(folder)
    return folder, texts(other.fast_generate([CHAT, "Start"], GREEDY, other.current_lora()))


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def snapshot(model: FastPeftModel) -> list[Any]:
    """Everything about the adapters that `fast_generate` must leave alone, but the values."""
    return [[(name, id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()],
            list(model.peft_config), model.active_adapter, [(n, m.training) for n, m in model.named_modules()]]


@pytest.fixture(params=[True, False], ids=["training", "evaluating"])
def untouched(model: FastPeftModel, request: pytest.FixtureRequest) -> Iterator[FastPeftModel]:
    """The model, in either mode; afterwards it must be what it was."""
    model.train(request.param)
    before, values = snapshot(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    yield model
    assert snapshot(model) == before
    assert not [name for name, p in model.named_parameters() if not torch.equal(p, values[name])]


@every_row(("prompts", "count"), [
    (QUESTION, 1), ([QUESTION], 1), ([QUESTION, "Start"], 2), (CHAT, 1), ([CHAT], 1), ([CHAT, CHAT[:1], CHAT], 3),
    ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2), ([QUESTION, CHAT, [5, 6]], 3), ((QUESTION, "Start"), 2),
])
def test_every_kind_of_prompt_gives_one_output_each_in_order(bare: BareModel, prompts: Any, count: int) -> None:
    outputs = bare.fast_generate(prompts, SamplingParams(temperature=0, max_tokens=3))
    assert len(outputs) == count
    each = [prompts] if count == 1 and not isinstance(prompts[0], (str, list)) else list(prompts)
    each = [prompts] if isinstance(prompts, str) else each
    alone = [bare.fast_generate([prompt], SamplingParams(temperature=0, max_tokens=3))[0] for prompt in each]
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_token_ids for output in alone]
    assert texts(outputs) == texts(alone)


def test_strings_are_taken_as_they_are_and_chats_through_the_template(
    bare: BareModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    as_text, as_chat, as_ids = bare.fast_generate([rendered, CHAT, tokenizer(rendered).input_ids], GREEDY)
    assert as_text == as_chat == as_ids
    assert as_chat.prompt == rendered
    assert bare.fast_generate(QUESTION, GREEDY)[0].prompt_token_ids == tokenizer(QUESTION).input_ids


def test_outputs_have_the_fields_that_vllm_gives(bare: BareModel, tokenizer: PreTrainedTokenizerBase) -> None:
    (output,) = bare.fast_generate(CHAT, SamplingParams(n=3, max_tokens=40, seed=0))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert len(completion.logprobs) == len(completion.token_ids) <= 40
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == tokenizer.eos_token_id else "length")


def test_no_lora_request_means_the_base_model(bare: BareModel, untouched: FastPeftModel) -> None:
    base = bare.fast_generate([CHAT, "Start"], GREEDY)
    assert untouched.fast_generate([CHAT, "Start"], GREEDY) == base
    assert untouched.fast_generate([CHAT, "Start"], sampling_params=GREEDY, lora_request=None) == base


def test_a_saved_adapter_samples_and_the_live_one_is_left_alone(
    untouched: FastPeftModel, saved: tuple[Path, list[str]]
) -> None:
    folder, expected = saved
    live = texts(untouched.fast_generate([CHAT, "Start"], GREEDY, untouched.current_lora()))
    for path in (folder, str(folder)):
        assert texts(untouched.fast_generate([CHAT, "Start"], GREEDY, untouched.load_lora(path))) == expected
    assert texts(untouched.fast_generate([CHAT, "Start"], GREEDY, untouched.current_lora())) == live != expected


def test_the_live_adapter_is_left_alone_when_sampling_with_a_saved_one_fails(
    untouched: FastPeftModel, saved: tuple[Path, list[str]]
) -> None:
    request = untouched.load_lora(saved[0])
    with pytest.raises(ValueError, match="leaves no room in a context of 128"):
        untouched.fast_generate([[5] * 200], GREEDY, request)
    with pytest.raises(KeyboardInterrupt), adapter_for(untouched, request):
        raise KeyboardInterrupt
    assert texts(untouched.fast_generate([CHAT, "Start"], GREEDY, request)) == saved[1]


def test_the_folder_of_a_saved_adapter_loads_as_a_model_with_that_adapter(
    saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, expected = saved
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128)
    assert texts(model.fast_generate([CHAT, "Start"], GREEDY, model.current_lora())) == expected
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(copy)
    again, beside = FastLanguageModel.from_pretrained(str(copy), max_seq_length=128, max_lora_rank=1)
    assert beside.chat_template == again.loaded.tokenizer.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("missing", ["everything", "adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_is_no_adapter_is_named_when_it_is_loaded(
    model: FastPeftModel, saved: tuple[Path, list[str]], missing: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    if missing == "everything":
        folder = folder / "nowhere"
    else:
        (folder / missing).unlink()
    with pytest.raises(CheckpointError, match="is not a folder" if missing == "everything" else missing):
        model.load_lora(folder)


def test_a_saved_adapter_has_its_tokenizer_end_tokens_and_base_beside_it(model: FastPeftModel, tmp_path: Path) -> None:
    model.save_lora(tmp_path / "adapter")
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "base_model.json",
             "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == names
    record = base_of_adapter(tmp_path / "adapter")
    assert (record.model, record.load_in_4bit, record.dtype, record.revision) == ("tiny", False, "float32", None)


@dataclass
class ForeignParams:
    """Sampling parameters with vLLM's field names and defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] = field(default_factory=list)
    presence_penalty: float = 0.0
    logprobs: int | None = None
    logit_bias: Any = None
    output_text_buffer_length: int = 0  # vLLM computes it from stop
    _eos_token_id: int | None = None


def test_sampling_params_of_vllms_kind_mean_what_ours_mean(bare: BareModel) -> None:
    foreign = ForeignParams(n=2, temperature=0, max_tokens=9, stop=["="], output_text_buffer_length=0, _eos_token_id=2)
    ours = SamplingParams(n=2, temperature=0, max_tokens=9, stop=["="])
    assert as_sampling_params(foreign, 128) == ours
    assert bare.fast_generate([CHAT, "Start"], foreign) == bare.fast_generate([CHAT, "Start"], ours)
    assert as_sampling_params(ForeignParams(stop=["ab"], output_text_buffer_length=1), 128).max_tokens == 16
    assert as_sampling_params(ForeignParams(max_tokens=None), 128).max_tokens == 128  # as far as the context goes
    assert as_sampling_params(None, 128) == SamplingParams()


@pytest.mark.parametrize(("count", "wanted"), [(0, 1), (3, 3), (-1, 384)])
@pytest.mark.every(3)
def test_logprobs_that_are_asked_for_come_in_vllms_shape_and_are_the_models_own(
    untouched: FastPeftModel, tokenizer: PreTrainedTokenizerBase, count: int, wanted: int
) -> None:
    params = SamplingParams(n=2, temperature=0.7, top_k=20, max_tokens=12, seed=1, logprobs=count)
    (output,) = untouched.fast_generate(CHAT, params, untouched.current_lora())
    plain = untouched.fast_generate(CHAT, replace(params, logprobs=None), untouched.current_lora())[0]
    for found, same in zip(output.outputs, plain.outputs, strict=True):
        assert (found.token_ids, found.text) == (same.token_ids, same.text)
        mode = untouched.training
        with torch.no_grad():
            logits = untouched.eval()(input_ids=torch.tensor([[*output.prompt_token_ids, *found.token_ids]])).logits[0]
        untouched.train(mode)
        exact = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        for place, token, row in zip(found.logprobs, found.token_ids, exact, strict=True):
            assert wanted <= len(place) <= wanted + 1
            assert next(iter(place)) == token
            assert set(row.topk(max(count, 0)).indices.tolist()) <= place.keys()
            for each, entry in place.items():
                assert entry.logprob == pytest.approx(row[each].item(), abs=1e-4)
                better, level = ((row > row[each] + slack).sum() for slack in (1e-4, -1e-4))  # rounding may swap them
                assert better < entry.rank <= 1 + level
                assert entry.decoded_token == tokenizer.decode([each])
        total = exact[range(len(exact)), found.token_ids].sum().item()
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.vllm
def test_vllms_own_sampling_params_ask_for_logprobs_too(bare: BareModel) -> None:
    vllm = pytest.importorskip("vllm")
    params = vllm.SamplingParams(temperature=0, max_tokens=4, logprobs=2, stop=["<"])
    assert type(lowmem_grpo.vLLMSamplingParams(temperature=0)) is vllm.SamplingParams
    (output,) = bare.fast_generate(["Start"], sampling_params=params)
    assert [len(place) for place in output.outputs[0].logprobs] == [2] * len(output.outputs[0].token_ids)
    assert {"request_id", "finished", "prompt_logprobs", "lora_request"} < vars(output).keys()


def test_what_stopped_a_completion_is_said_as_vllm_says_it(
    bare: BareModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (free,) = bare.fast_generate(CHAT, GREEDY)
    third = free.outputs[0].token_ids[2]
    (by_token,) = bare.fast_generate(CHAT, SamplingParams(temperature=0, stop_token_ids=[third]))
    assert by_token.outputs[0].stop_reason == third
    text = tokenizer.decode([third])
    (by_text,) = bare.fast_generate(CHAT, SamplingParams(temperature=0, stop=["never", text]))
    assert by_text.outputs[0].stop_reason == text
    assert free.outputs[0].stop_reason is None


@every_row(("settings", "error", "message"), [
    ({"presence_penalty": 0.5}, ValueError, "presence_penalty=0.5 is not supported.*reward the text"),
    ({"logprobs": -2}, ValueError, r"logprobs is -2; it must be -1 \(all\)"),
    ({"max_tokens": None}, ValueError, "max_tokens is None; it must"),
    ({"stop": ["a", ""]}, ValueError, "it must be a text, or a list of texts, none of them empty"),
    ({"stop": ""}, ValueError, "none of them empty"), ({"stop_token_ids": ["a"]}, ValueError, "a list of token ids"),
    ({"stop_token_ids": 5}, ValueError, "a list of token ids"), ({"stop_token_ids": [-1]}, ValueError, "of token ids"),
    ({"prompt_logprobs": 1}, ValueError, "prompt_logprobs=1 is not supported"),
    ({"max_token": 3}, TypeError, "no option 'max_token'; did you mean max_tokens"),
])
def test_our_sampling_params_refuse_by_name_what_vllms_have_and_ours_lack(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**settings)


@pytest.mark.vllm
def test_our_sampling_params_take_every_default_of_vllms() -> None:
    vllm = pytest.importorskip("vllm")
    default = vllm.SamplingParams()
    known = {name: getattr(default, name) for name in type(default).__struct_fields__ if not name.startswith("_")}
    derived = {"output_kind", "output_text_buffer_length"}  # no choices of a user's
    assert SamplingParams(**{name: value for name, value in known.items() if name not in derived}).max_tokens == 16


@pytest.mark.parametrize("kind", ["encoding", "dictionary", "padded", "tensor", "vLLM's text", "vLLM's ids", "parts"])
def test_what_notebooks_pass_is_the_same_prompt(bare: BareModel, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    (wanted,) = bare.fast_generate(CHAT, GREEDY)
    ids = wanted.prompt_token_ids
    given: Any = {
        "encoding": tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True),
        "dictionary": {"input_ids": ids}, "tensor": torch.tensor([ids]),
        "padded": {"input_ids": [[0, 0, *ids]], "attention_mask": [[0, 0, *[1] * len(ids)]]},
        "vLLM's text": {"prompt": wanted.prompt}, "vLLM's ids": [{"prompt_token_ids": ids}],
        "parts": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    }[kind]
    assert bare.fast_generate(given, sampling_params=[GREEDY], use_tqdm=False) == [wanted]


IMAGE = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What?"}]}]


@every_row(("given", "error", "message"), [
    ({"prompts": [{"prompt": "x", "multi_modal_data": {"image": 1}}]}, ValueError, "multi_modal_data; only text"),
    ({"prompts": [IMAGE]}, ValueError, "part of type 'image'; only text"),
    ({"prompts": [{"text": "x"}]}, TypeError, "dictionary with text; pass text, chat"),
    ({"prompts": [3.5]}, TypeError, "prompt that is a float"),
    ({"prompts": [["a", "b"]]}, TypeError, "list with a str"),
    *[({"prompts": [[1, wrong]]}, ValueError, f"has the token id {wrong}; the model's are 0 to 383")
      for wrong in (384, -1, True)],
    *[({"prompts": [CHAT, [{"role": "user", "content": said}]]}, ValueError, "of the role 'user' has no text; its")
      for said in (None, 5, [{"type": "text", "text": None}])],
    ({"input_ids": [[1]], "max_new_tokens": 3}, TypeError, r"input_ids, max_new_tokens.*call model\.generate"),
    ({"prompts": "x", "sampling_params": [GREEDY, GREEDY]}, ValueError, "has 2 entries and there are 1 prompts"),
    ({"prompts": "x", "lora_request": 7}, TypeError, r"lora_request is a int; pass model\.load_lora"),
    *[({"prompts": empty}, ValueError, "no prompt, or an empty one") for empty in ("", [], [""], [[]], ["Start", ""])],
    *[({"prompts": half}, ValueError, r"half of a surrogate pair, which is no character: write it as text\.encode")
      for half in ("\ud83d", ["a", "\udc00"], [{"role": "user", "content": "\ud83d"}])],
    *[({"prompts": given}, TypeError, f"fast_generate got a {type(given).__name__}") for given in (None, 7, CHAT[0])],
    *[({"prompts": "x", "sampling_params": params}, TypeError, r"pass a lowmem_grpo\.SamplingParams")
      for params in ({"temperature": 0.5}, 0.5, "greedy")],
    *[({"prompts": "x", "sampling_params": ForeignParams(**{name: value})}, ValueError,
       rf"sets {name}=.*not supported; leave it out\. Supported are n, temperature")
      for name, value in (("presence_penalty", 0.5), ("logit_bias", torch.ones(3)))],
    ({"prompts": "x", "sampling_params": ForeignParams(top_p=0)}, ValueError, "top_p is 0; it must be in"),
])
def test_what_cannot_be_generated_from_is_refused_by_name(
    bare: BareModel, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bare.fast_generate(**given)


def test_calls_about_an_adapter_that_is_not_there_say_how_to_get_one(
    bare: BareModel, model: FastPeftModel, tmp_path: Path
) -> None:
    for call in (bare.save_lora, bare.load_lora):
        with pytest.raises(ValueError, match=f"{call.__name__} needs a model with LoRA: put it on with"):
            call(tmp_path)
    with pytest.raises(ValueError, match="needs a model with LoRA: put it on with"):
        bare.fast_generate("Start", GREEDY, model.current_lora())
    for wrong in (None, "", 7):
        with pytest.raises(ValueError, match=f"path is {wrong!r}; it must be a folder's name"):
            model.load_lora(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"save_directory is {wrong!r}; it must be a folder's name"):
            model.save_lora(wrong)  # type: ignore[arg-type]


def test_the_home_folder_may_be_written_as_a_tilde(
    model: FastPeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model.save_lora("~/lora")
    model.save_pretrained(Path("~/saved"))
    model.save_pretrained_merged("~/merged", save_method="lora")
    assert {path.name for path in tmp_path.iterdir()} == {"lora", "saved", "merged"}
    assert model.load_lora("~/lora").path == as_request("~/lora").path == tmp_path / "lora"  # type: ignore[union-attr]
    again, _ = FastLanguageModel.from_pretrained("~/saved", max_seq_length=128, load_in_4bit=False)
    assert isinstance(again, FastPeftModel)


@pytest.mark.parametrize("prompt", ["<added>", [{"role": "user", "content": "<added>"}]])
def test_a_token_that_only_the_tokenizer_has_is_refused(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> None:
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<added>"])
    with pytest.raises(ValueError, match=f"has the token id {len(tokenizer)}; .* only added to the tokenizer has no w"):
        encoded(more, prompt, len(tokenizer))


def test_the_bare_model_lends_what_the_transformers_model_has(bare: BareModel) -> None:
    assert bare.config.model_type == "qwen2"
    assert bare.get_input_embeddings().weight is bare.inner.get_input_embeddings().weight
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = bare.nothing_like_this


def test_the_engine_of_vllm_sleeps_and_wakes_under_unsloths_names(model: FastPeftModel, bare: BareModel) -> None:
    bare.vllm_engine.sleep()  # nothing is kept yet
    bare.vllm_engine.wake_up()
    told: list[str] = []
    model.loaded.keeper.kept = SimpleNamespace(  # type: ignore[assignment]
        sleep=lambda: told.append("sleep"), wake=lambda: told.append("wake"))
    try:
        model.vllm_engine.sleep(level=2)
        model.vllm_engine.wake_up(tags=["weights"])
        assert told == ["sleep"]
        model.vllm_engine.wake_up()
    finally:
        model.loaded.keeper.kept = None
    assert told == ["sleep", "wake"] and not hasattr(model.vllm_engine, "llm_engine")
    with pytest.raises(AttributeError, match="no 'generate' here, but sleep and wake_up; sample with"):
        _ = model.vllm_engine.generate


def test_the_switches_for_inference_and_training_do_what_they_say(model: FastPeftModel) -> None:
    assert not FastLanguageModel.for_inference(model).training
    assert FastLanguageModel.for_training(model).training


def test_a_cell_that_puts_lora_on_may_be_run_twice_and_another_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    made = FastLanguageModel.get_peft_model(bare, r=2, target_modules=["q_proj"])
    assert "goes on from it" not in caplog.text
    assert FastLanguageModel.get_peft_model(made, r=2, target_modules=["q_proj"]) is made
    assert "has this LoRA already, and goes on from it" in caplog.text
    with pytest.raises(ValueError, match=r"LoRA already, .* load the model again for another"):
        FastLanguageModel.get_peft_model(made, r=4, target_modules=["q_proj"])
    made.unload()
    with pytest.raises(ValueError, match="LoRA already"):
        FastLanguageModel.get_peft_model(made, r=2, target_modules=["q_proj"])


def test_the_bare_model_refuses_to_sample_once_it_has_an_adapter_and_takes_no_second() -> None:
    taken, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    FastLanguageModel.get_peft_model(taken, r=2, use_gradient_checkpointing=False)
    with pytest.raises(ValueError, match="that get_peft_model returned"):
        taken.fast_generate("Start", GREEDY)
    with pytest.raises(ValueError, match="LoRA already"):
        FastLanguageModel.get_peft_model(taken, r=2, use_gradient_checkpointing=False)
