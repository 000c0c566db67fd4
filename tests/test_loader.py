"""Loading: 16 bit and NF4 on the CPU, LoRA, and a plain word for everything that cannot be honoured."""

import json
import logging
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from families import save_large
from packed_problem import batch_of, learned
from small_models import SPLIT, TINY, scatter
from tables import every_row
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from lowmem_grpo import FastLanguageModel, FastModel, FastVisionModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.config.loading import FROM_PRETRAINED, GET_PEFT_MODEL
from lowmem_grpo.fast_model import BareModel, FastPeftModel
from lowmem_grpo.models.policy import Policy

CONTEXT = 128


@pytest.mark.parametrize(("level", "seen"), [(logging.WARNING, ["another"]), (logging.INFO, ["Failed", "another"])])
def test_the_kernel_that_bitsandbytes_misses_is_named_only_to_whoever_lowered_the_level(
    level: int, seen: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "No module named 'kernels'")
    logger.warning("another")
    assert [text.split()[0] for text in caplog.messages] == seen
    file = Path(bitsandbytes.__file__).parent / "backends" / "cpu" / "ops.py"
    assert "gemm_4bit_forward from kernels-community" in file.read_text(), "the line has moved, and is shown again"


def load(four_bit: bool = False, **options: Any) -> BareModel:
    """The embedded model."""
    return FastLanguageModel.from_pretrained("tiny", max_seq_length=CONTEXT, load_in_4bit=four_bit, **options)[0]


def adapt(model: BareModel, r: int = 4, **options: Any) -> FastPeftModel:
    """The model under LoRA, both factors non-zero, so that every adapter parameter has a gradient."""
    return scatter(FastLanguageModel.get_peft_model(model, r=r, **options))


@pytest.fixture(scope="module")
def bare() -> BareModel:
    """The embedded model in 16 bit's place (float32 on the CPU), only to be looked at."""
    return load()


@pytest.fixture(scope="module")
def quantized() -> BareModel:
    """The embedded model in NF4, only to be looked at."""
    return load(four_bit=True)


def decoder_linears(model: BareModel) -> list[tuple[str, torch.nn.Module]]:
    """Every linear layer of the decoder, by name."""
    return [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in SPLIT]


@every_row("dtype", [None, "auto", "float32", "bfloat16", torch.bfloat16, torch.float16])
def test_16_bit_weights_have_the_wanted_dtype_and_are_frozen(dtype: Any) -> None:
    model = load(dtype=dtype)
    default = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    wanted = default if dtype in (None, "auto") else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(decoder_linears(model)) == 7 * model.config.num_hidden_layers


def test_4_bit_quantizes_every_linear_layer_and_leaves_the_head_alone(quantized: BareModel) -> None:
    for name, module in decoder_linears(quantized):
        assert isinstance(module, bitsandbytes.nn.Linear4bit), name
        assert module.weight.dtype == torch.uint8, name
        assert module.weight.quant_type == "nf4", name
        assert module.weight.quant_state.nested, name  # double quantization
    assert type(quantized.get_output_embeddings()) is torch.nn.Linear
    assert quantized.get_output_embeddings().weight.is_floating_point()


@pytest.mark.parametrize("name", ["./nowhere", "../no/where", "/nowhere/at/all", "~/nowhere-at-all", "runs/a/b/c",
                                  "nowhere", "no-such-owner/no-such-model"])
def test_a_model_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="no model") as caught:
        FastLanguageModel.from_pretrained(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="holds no config"):
        FastLanguageModel.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("style", ["absolute", "relative", "bare name"])
def test_a_saved_model_loads_from_any_kind_of_path(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy").symlink_to(TINY, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    name = {"absolute": str(tmp_path / "copy"), "relative": "./copy", "bare name": "copy"}[style]
    model, tokenizer = FastLanguageModel.from_pretrained(name, load_in_4bit=False)
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.parametrize(("name", "closest"), [
    ("load_in_4bits", "load_in_4bit"), ("max_seq_len", "max_seq_length"), ("gpu_memory_utilisation", "gpu_memory"),
    ("fast_inferense", "fast_inference"), ("zzz", None),
])
def test_an_unknown_loading_option_is_named_with_the_closest_one(name: str, closest: str | None) -> None:
    with pytest.raises(TypeError, match=rf"no option '{name}'" + (f"; did you mean .*{closest}" if closest else "$")):
        FastLanguageModel.from_pretrained("tiny", **{name: 1})


REFUSALS = {  # an option, and a value that asks for what is not done here
    "load_in_8bit": True, "full_finetuning": True, "trust_remote_code": True, "qat_scheme":
    "int4", "rope_scaling": {"type": "linear", "factor": 2.0}, "float8_kv_cache": True, "resize_model_vocab": 999,
    "quantization_config": {"load_in_8bit": True}, "num_labels": 2, "float32_mixed_precision": True,
    "whisper_language": "English", "whisper_task": "transcribe", "auto_config": {}.__class__, "model_types":
    ["llama"], "auto_model": AutoConfig, "tokenizer_name": "other", "tokenizer_revision": "v2",
    "max_memory": {0: "1GiB"}, "model_patcher": AutoConfig, "target_parameters": ["experts"],
    "loftq_config": {"loftq_bits": 4}, "use_dora": True,
    "task_type": "SEQ_CLS", "offload_layers": 4, "block_swap_layers": 2,
    "prefetch_depth": 2, "rope_parameters": {"rope_type": "linear"}, "max_num_batched_tokens": 4096,
    "device_map_planner_kwargs": {"a": 1}, "on_model_resolved": print,
    "checkpoint_skip_layers": 3, "layer_replication": [[0, 2]], "inference_mode": True,
    **dict.fromkeys(("lora_bias", "use_bdlora", "use_qalora"), True), "alora_invocation_tokens": [1],
    **{f"{kind}_config": {"rho": 1.0} for kind in ("arrow", "corda", "eva", "kasa", "lora_ga", "monteclora", "velora")},
}


def test_the_older_name_of_dtype_says_the_same_and_only_one_of_them_is_taken() -> None:
    for value in (torch.bfloat16, "bfloat16"):
        model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, torch_dtype=value)
        assert model.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="dtype and torch_dtype are two names of the same; give one"):
        FastLanguageModel.from_pretrained("tiny", dtype="float32", torch_dtype="float32")


@every_row("name", REFUSALS)
def test_a_refused_option_says_what_to_do_instead_and_its_off_values_pass(name: str, bare: BareModel) -> None:
    for method, fates in (("from_pretrained", FROM_PRETRAINED), ("get_peft_model", GET_PEFT_MODEL)):
        call, first = getattr(FastLanguageModel, method), "./nowhere" if method == "from_pretrained" else bare
        for value in (REFUSALS[name], None, False)[: 3 if name in fates else 0]:
            with pytest.raises((ValueError, OSError)) as caught:
                call(first, **{name: value} | ({} if first == "./nowhere" else {"r": 0}))
            refused = f"FastLanguageModel.{method}: {name}={value!r} is not supported (allowed: "
            passed = "no model" if first == "./nowhere" else "r is 0"  # the call went on to the next check
            assert (refused if value == REFUSALS[name] or (name in ("auto_model", "task_type") and value is False)
                    else passed) in str(caught.value)
            assert value != REFUSALS[name] or str(caught.value).endswith(fates[name].advice)


def test_every_option_with_a_fate_is_either_refused_above_or_never_changes_anything() -> None:
    for name, fate in (FROM_PRETRAINED | GET_PEFT_MODEL).items():
        assert (name in REFUSALS) != fate.any_value, name


@pytest.mark.parametrize(("options", "layers", "kinds"), [
    ({"finetune_mlp_modules": False}, 6, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ({"finetune_attention_modules": False}, 6, {"gate_proj", "up_proj", "down_proj"}),
    ({"layers_to_transform": [0, 3], "target_modules": ["q_proj", "up_proj"]}, 2, {"q_proj", "up_proj"}),
    ({"layers_to_transform": 5, "finetune_vision_layers": True}, 1, SPLIT),
    ({"finetune_last_n_layers": 2, "target_modules": "all-linear"}, 2, SPLIT),
    ({"finetune_last_n_layers": 99}, 6, SPLIT),
])
@pytest.mark.every(2)
def test_only_the_part_of_the_model_that_was_asked_for_is_trained(
    options: dict[str, Any], layers: int, kinds: Any, tmp_path: Path
) -> None:
    model = FastVisionModel.get_peft_model(load(), r=2, **options)
    trained = [name.split(".") for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {path[-4] for path in trained} == set(kinds)
    assert len({path[path.index("layers") + 1] for path in trained}) == layers
    gradients(model)
    model.save_lora(tmp_path)
    assert model.fast_generate("Start", SamplingParams(max_tokens=2), model.load_lora(tmp_path))


@pytest.mark.parametrize(("options", "message"), [
    ({"device_map": {"": 0, "model.layers.1": 1}}, "one device"),
    ({"device_map": "nowhere"}, "device_map is 'nowhere'"),
    ({"device_map": "cpu", "device": "cuda:1"}, "give one of them"),
    ({"load_in_4bit": True, "load_in_16bit": True}, "contradict each other"),
    ({"load_in_fp8": True, "load_in_4bit": True}, "load_in_4bit=True and load_in_fp8=True contradict each other"),
    ({"load_in_fp8": "block", "load_in_16bit": True}, "load_in_16bit=True and load_in_fp8='block' contradict"),
    ({"load_in_fp8": "rows"}, "load_in_fp8 is 'rows'; it must be True"),
    ({"max_seq_length": 4096}, "max_seq_length is 4096; this model's context is 2048"),
    *[({"dtype": dtype}, "must be float32, bfloat16") for dtype in ("int8", "half-ish", torch.int32)],
])
def test_a_place_or_kind_of_weights_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.from_pretrained("tiny", **options)


@pytest.mark.parametrize("options", [{"device_map": {"": "cpu"}}, {"device_map": "cpu"}, {"device_map": "auto"}])
def test_unsloths_names_for_16_bit_on_one_device_load_the_whole_context(options: dict[str, Any]) -> None:
    options |= {"max_seq_length": None, "load_in_16bit": True, "local_files_only": True}
    model, _ = FastModel.from_pretrained("tiny", **options)
    assert model.loaded.max_seq_length == model.loaded.keeper.max_seq_length == 2048
    assert not any(type(module) is bitsandbytes.nn.Linear4bit for module in model.modules())


UNSLOTH = json.loads((Path(__file__).parent / "support" / "unsloth_defaults.json").read_text())


@pytest.mark.parametrize("loader", [FastLanguageModel, FastModel, FastVisionModel])
def test_every_option_of_unsloth_is_accepted_at_unsloths_own_default(loader: type[FastLanguageModel]) -> None:
    own = UNSLOTH[loader.__name__]
    options = own["from_pretrained"] | {"model_name": "tiny"}
    model, _ = loader.from_pretrained(**options)
    adapted = loader.get_peft_model(model, **own["get_peft_model"])
    assert adapted.peft_config["default"].r == 16
    assert sum(".lora_A." in name for name, _ in adapted.named_parameters()) == 42


@every_row(("options", "message"), [
    ({"r": 10**9}, "r is 1000000000; it must be"), ({"lora_alpha": "x"}, "lora_alpha is 'x'; it must be above 0"),
    ({"random_state": "x"}, "random_state is 'x'; it must be a whole number"), ({"use_rslora": "x"}, "True or False"),
    ({"target_modules": 5}, "target_modules is 5; it must be a text, or a list of texts"),
    ({"rank_pattern": {"x": "y"}}, "it must be a dict of numbers"),
    ({"bias": "all"}, 'only "none" is supported'), ({"max_seq_length": 64}, "loaded with 128"),
    ({"target_modules": ["q_proj", "qproj", "w1"]}, r"names \['qproj', 'w1'\], which this model does not have; its "
     "linear layers are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    ({"target_modules": ["w1", "c_attn"]}, r"names \['c_attn', 'w1'\], which this model does not have"),
    ({"target_modules": ["lm_head"]}, "name linear layers too"),
    ({"target_modules": "q_proj"}, "all-linear"), ({"finetune_language_layers": False}, "leaves nothing to train"),
    ({"finetune_attention_modules": False, "finetune_mlp_modules": False}, "leaves nothing to train"),
    *(({f"finetune_{part}": None}, f"finetune_{part} is None; it must be True or False")
      for part in ("language_layers", "attention_modules", "mlp_modules")),
    ({"layers_to_transform": [6]}, "names layer 6; the model has the layers 0 to 5"),
    ({"layers_to_transform": 1, "finetune_last_n_layers": 1}, "both choose layers"),
    ({"target_modules": ["gate_proj"], "finetune_mlp_modules": False}, "names no layer of the part"),
    ({"finetune_last_n_layers": 0}, "must be at least 1"), ({"random_state": None}, "random_state is None; it must be"),
    ({"random_state": 2**64}, "from -2"), ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq' is not supp"),
    ({"layers_to_transform": "a"}, "layers_to_transform is 'a'; it must be a whole number, or a list of them"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern is .*; it must be a dict of numbers, each by a name or a regular expr"),
    ({"use_gradient_checkpointing": "disk"}, '"auto" and its alias "unsloth"'),
    ({"use_gradient_checkpointing": None}, "allowed are True, False"),
])
def test_a_bad_lora_setting_is_refused_before_the_model_changes(
    bare: BareModel, options: dict[str, Any], message: str
) -> None:
    names = [name for name, _ in bare.named_parameters()]
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.get_peft_model(bare, **options)
    assert [name for name, _ in bare.named_parameters()] == names


def test_lora_on_no_model_and_on_something_else_says_how_to_load_one() -> None:
    with pytest.raises(TypeError, match="takes what from_pretrained returned; got a Linear"):
        FastLanguageModel.get_peft_model(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"get_peft_model needs the model that from_pretrained returned: model, token"):
        FastLanguageModel.get_peft_model()


def test_the_seed_alone_decides_the_adapter_and_leaves_other_draws_alone() -> None:
    def weights(seed: int, global_seed: int) -> list[torch.Tensor]:
        model = load()
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        adapted = FastLanguageModel.get_peft_model(model, r=2, random_state=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return [parameter for name, parameter in adapted.named_parameters() if "lora_A" in name]

    one, again, other = weights(3407, 0), weights(3407, 1), weights(3408, 0)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("value", "checkpoints", "offload"), [
    (True, True, False), (False, False, False), ("offload", True, True), ("unsloth", True, True),
])
def test_use_gradient_checkpointing_switches_what_it_says(value: bool | str, checkpoints: bool, offload: bool) -> None:
    model = FastLanguageModel.get_peft_model(load(), r=2, use_gradient_checkpointing=value)
    assert model.get_base_model().is_gradient_checkpointing == checkpoints
    assert model.loaded.offload == offload


def gradients(model: FastPeftModel) -> tuple[dict[str, torch.Tensor], int]:
    """The adapter's gradients, and how often a decoder layer ran."""
    runs: list[int] = []
    layer = model.get_base_model().model.layers[0]
    hook = layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    _, found = learned(Policy(model.train()), batch_of([(20, [4, 2])]))
    hook.remove()
    return found, len(runs)


@pytest.mark.parametrize("four_bit", [False, True])
def test_gradients_with_checkpointing_are_those_without_bit_for_bit(four_bit: bool) -> None:
    plain, once = gradients(adapt(load(four_bit), use_gradient_checkpointing=False))
    assert once == 1
    assert len(plain) == 14 * 6
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    for mode in (True, "offload"):
        recomputed, runs = gradients(adapt(load(four_bit), use_gradient_checkpointing=mode))
        assert runs == 2, f"{mode}: the layer was not recomputed"
        assert plain.keys() == recomputed.keys()
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain), mode


def test_gradients_flow_through_4_bit_weights_after_sampling() -> None:
    model = adapt(load(four_bit=True))
    fresh, _ = gradients(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]))  # here bitsandbytes would repack the weights, on some CPUs
    sampled, _ = gradients(model)
    assert fresh.keys() == sampled.keys()
    assert all(torch.equal(fresh[name], sampled[name]) for name in fresh)


@pytest.mark.parametrize("four_bit", [False, True])
def test_a_training_step_changes_the_adapter_and_nothing_else(four_bit: bool, tmp_path: Path) -> None:
    model = adapt(load(four_bit))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=2,
        max_completion_length=4, learning_rate=1e-2, save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))], args=config,
        train_dataset=[{"prompt": "Start with 1."}],
    )
    out = trainer.train()
    assert out.finished
    assert trainer.state.log_history[0]["grad_norm"] > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (".lora_" in name), name


def test_the_embedded_model_loads_with_plain_transformers(bare: BareModel) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Start with 1. Add 1. Add 1."}], tokenize=False,
                                         add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, bare.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(tokenizer("é 漢字 17").input_ids) == "é 漢字 17"


@pytest.fixture(scope="module")
def in_4_bit(quantized: BareModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as bitsandbytes stored it."""
    folder = tmp_path_factory.mktemp("quantized")
    quantized.save_pretrained(folder)
    quantized.loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("asked", [True, False])
def test_a_checkpoint_that_is_in_4_bit_already_loads_as_it_is_whatever_was_asked(
    asked: bool, in_4_bit: Path, quantized: BareModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lowmem_grpo"):
        model, _ = FastLanguageModel.from_pretrained(str(in_4_bit), max_seq_length=CONTEXT, load_in_4bit=asked)
    assert "stored in 4 bit" in caplog.text
    stored = dict(quantized.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
        assert not parameter.requires_grad
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, quantized.eval()(input_ids=ids).logits)
    gradient, _ = gradients(adapt(model))
    assert all(value.abs().sum() > 0 for value in gradient.values())


def test_a_checkpoint_in_4_bit_computes_in_the_dtype_that_was_asked_for(in_4_bit: Path, quantized: BareModel) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(in_4_bit), max_seq_length=CONTEXT, dtype="bfloat16")
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    linears, stored = decoder_linears(model), dict(decoder_linears(quantized))
    assert len(linears) == len(stored)
    for name, module in linears:
        assert (module.compute_dtype, module.weight.quant_state.dtype) == (torch.bfloat16, torch.bfloat16), name
        assert torch.equal(module.weight, stored[name].weight), name
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_revision_and_token_reach_every_call_that_reads_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def watched(kind: Any) -> Any:
        original = kind.from_pretrained
        return lambda path, **options: (seen.update({kind.__name__: options}), original(path, **options))[1]

    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", watched(kind))
    load(revision="v2", token="secret")
    assert set(seen) == {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"}
    assert all((options["revision"], options["token"]) == ("v2", "secret") for options in seen.values())


LOADING = """
import sys
from lowmem_grpo import FastLanguageModel
FastLanguageModel.from_pretrained("tiny")  # imports what is imported late
print("begin", flush=True)
model, _ = FastLanguageModel.from_pretrained(sys.argv[1], max_seq_length=64, dtype="bfloat16",
                                             load_in_fp8=sys.argv[2] == "fp8")
print("end", sum(parameter.nbytes for parameter in model.parameters()), flush=True)
sys.stdin.read()
"""


FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # else glibc keeps what tensors gave back


def own_bytes(process: int) -> int:
    """What a process holds and the system cannot take back: without the pages of files, which it can drop."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("form", "share"), [("nf4", 0.3), ("fp8", 0.55)])
def test_quantizing_a_checkpoint_never_holds_its_16_bit_weights_in_memory(
    form: str, share: float, tmp_path: Path
) -> None:
    stored, largest = save_large(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", LOADING, str(tmp_path), form], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | FREED_AT_ONCE)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    before, peak = own_bytes(process.pid), 0
    while not select.select([process.stdout], [], [], 0.002)[0]:
        peak = max(peak, own_bytes(process.pid))
    said = process.stdout.readline().split()
    after = own_bytes(process.pid)
    process.communicate("", timeout=200)
    assert (said[:1], process.returncode) == (["end"], 0)
    assert int(said[1]) < share * stored
    # quantizing one matrix on the CPU makes about five copies of it in float32
    assert peak - after < 12 * largest < 0.4 * stored, f"{before:,} before, {peak:,} at the peak, {after:,} after"
    assert after - before < (share + 0.1) * stored


def test_what_ships_with_the_package_stays_below_13_mib() -> None:
    assert sum(path.stat().st_size for path in TINY.parent.rglob("*") if path.is_file()) < 13 * 2**20
