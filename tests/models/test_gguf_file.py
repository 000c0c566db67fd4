"""Models out of GGUF files: tiny random ones of each architecture, read as transformers itself reads them."""

import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.models import gguf_file
from lowmem_grpo.models.gguf_file import ARCHITECTURES, gguf_config
from lowmem_grpo.models.pretrained import read_model
from lowmem_grpo.models.stored_model import check_stored, find
from lowmem_grpo.runs.saved_adapter import AdapterError

D, F, HEADS, GROUPS, V, E = 256, 512, 4, 2, 80, 4  # sizes of the models: K-quants have blocks of 256 weights
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "F32")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
HEAD_SIZE = {"qwen3": 128, "qwen3moe": 128, "gemma3": 256}  # those of real models, which transformers assumes


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of two layers, by their names in llama.cpp."""
    size = HEAD_SIZE.get(kind, D // HEADS)
    q, k = HEADS * size, GROUPS * size
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    layer["attn_output.weight"] = (D, q)
    parts = {"attn_q": q, "attn_k": k, "attn_v": k}
    layer |= {"attn_qkv.weight": (q + 2 * k, D)} if kind == "phi3" else {
        f"{name}.weight": (rows, D) for name, rows in parts.items()}
    if kind == "qwen2":
        layer |= {f"{name}.bias": (rows,) for name, rows in parts.items()}
    if kind in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,)}
    if kind == "gemma3":
        layer |= {"post_attention_norm.weight": (D,), "post_ffw_norm.weight": (D,)}
    if kind == "qwen3moe":
        layer |= {"ffn_gate_inp.weight": (E, D), "ffn_gate_exps.weight": (E, F, D), "ffn_up_exps.weight": (E, F, D),
                  "ffn_down_exps.weight": (E, D, F)}
    elif kind == "phi3":
        layer |= {"ffn_up.weight": (2 * F, D), "ffn_down.weight": (D, F)}
    else:
        layer |= {"ffn_gate.weight": (F, D), "ffn_up.weight": (F, D), "ffn_down.weight": (D, F)}
    whole: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    if kind not in ("gemma3", "qwen2"):  # which tie their head
        whole["output.weight"] = (V, D)
    return whole | {f"blk.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}


def packed(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> Any:
    """Random weights in a type of GGUF; of a K-quant random bytes, with scales of 1/64."""
    if kind.name in ("Q4_K", "Q6_K"):
        block, size = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
        scale = np.frombuffer(np.float16(1 / 64).tobytes(), np.uint8)
        for start in (0, 2) if kind.name == "Q4_K" else (size - 2,):
            data[..., start : start + 2] = scale
        return data.reshape(*shape[:-1], -1)
    return quants.quantize(rng.normal(0, 0.05, shape).astype(np.float32), kind)


def written(path: Path, kind: str = "llama", extra: dict[str, Any] | None = None,
            tensors: dict[str, Any] | None = None, types: tuple[str, ...] = TYPES) -> Path:
    """Write a random model; `extra` are settings, `tensors` float32 tensors that it has besides."""
    writer, rng, size = GGUFWriter(path, kind), np.random.default_rng(0), HEAD_SIZE.get(kind, D // HEADS)
    settings = {"block_count": 2, "context_length": 512, "embedding_length": D, "feed_forward_length": F,
                "attention.head_count": HEADS, "attention.head_count_kv": GROUPS, "attention.key_length": size,
                "rope.dimension_count": size, "expert_count": E, "expert_used_count": 2,
                "expert_feed_forward_length": F, "attention.sliding_window": 128}
    for name, value in settings.items():
        is_other = (name.startswith("expert") and kind != "qwen3moe") or ("sliding" in name and kind != "gemma3")
        if f"{kind}.{name}" not in (extra or {}) and not is_other:
            writer.add_uint32(f"{kind}.{name}", value)
    for name, number in (("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 5e5)):
        writer.add_float32(f"{kind}.{name}", number)
    for name, value in (extra or {}).items():
        add = {str: writer.add_string, list: writer.add_array, float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<end>", *(f"<{number}>" for number in range(V - 51)), "Ġ", ":", "Ċ", "ab",
                           *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRS"])
    writer.add_token_types([3, 3, *[1] * (V - 2)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(0)
    writer.add_chat_template(TEMPLATE)
    order = cycle(getattr(GGMLQuantizationType, name) for name in types)
    for name, shape in shapes(kind).items():
        used = next(order) if len(shape) > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, packed(rng, shape, used), raw_dtype=used)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_and_type_has_the_weights_that_transformers_reads(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", kind)
    ours = read_model(str(path), AutoConfig.for_model(**gguf_config(path)), {}, dtype=torch.float32)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config.pad_token_id = None  # it would be Phi-3's own
    config.moe_intermediate_size = F  # which transformers does not read
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=config, dtype=torch.float32)
    weights = ours.state_dict()
    assert weights.keys() == theirs.state_dict().keys()
    assert [name for name, value in theirs.state_dict().items() if not torch.equal(weights[name], value)] == []
    ids = torch.arange(40)[None]
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert ours.config.eos_token_id == [0, 1]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf") / "model.gguf")


def load(name: Path | str, **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(name), max_seq_length=128, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(("kind", "form"), [
    ("llama", {"load_in_4bit": True}), ("llama", {"load_in_fp8": True}), ("llama", {"load_in_fp8": "block"}),
    ("qwen3moe", {"load_in_4bit": True}),
])
def test_quantized_weights_are_those_of_the_same_model_in_safetensors(kind: str, form: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", kind)
    plain = read_model(str(path), AutoConfig.for_model(**gguf_config(path)), {}, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "hf")
    ours, tokenizer = load(path, **form)
    tokenizer.save_pretrained(tmp_path / "hf")
    weights = load(tmp_path / "hf", **form)[0].inner.state_dict()
    assert weights.keys() == ours.inner.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in ours.inner.state_dict().items())


def test_tokenizer_and_template_are_those_of_the_file_and_not_of_files_beside_it(file: Path, tmp_path: Path) -> None:
    moved = tmp_path / file.name
    moved.write_bytes(file.read_bytes())
    AutoTokenizer.from_pretrained(find("tiny")).save_pretrained(tmp_path)
    _, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, gguf_file=file.name)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chat = [{"role": "user", "content": "abc : d"}]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template(chat) == theirs.apply_chat_template(chat, return_dict=False)
    assert tokenizer.eos_token == "<end>"


def test_llama_3_positions_are_read_from_their_factors_and_others_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=D, num_attention_heads=HEADS, rope_parameters=rope)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (5e5 ** -(torch.arange(0, 64, 2) / 64) / stretched).numpy()
    path = written(tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    assert gguf_config(path)["rope_parameters"] == pytest.approx(rope)
    path = written(tmp_path / "other.gguf", tensors={"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"other\.gguf scales positions by rope_freqs"):
        gguf_config(path)


@pytest.mark.parametrize(("kind", "extra", "tensor", "words"), [
    ("llama", {"llama.rope.scaling.type": "yarn"}, None, "in the way 'yarn'"),
    ("llama", {"split.count": 2}, None, "2 parts"),
    ("llama", {}, "blk.0.ffn_gate_inp.weight", "ffn_gate_inp"),
    ("mamba", {}, None, "architecture mamba; read are llama"),
    ("llama", {}, "blk.0{}.ffn_up.weight", "no place here"),
    ("llama", {}, "blk.{0.__class__}.ffn_up.weight", "no place here"),
    ("llama", {}, "blk.99999999999.ffn_up.weight", "no place here"),
    ("gemma3", {"gemma3.block_count": 2**31}, None, "weights of 2 layers, and block_count is 2147483648"),
    ("qwen3moe", {"qwen3moe.expert_count": 5}, None, "expert_count is 5"),
    ("qwen3moe", {}, "blk.1.ffn_gate_exps.weight2", "no place here"),
    ("llama", {"llama.attention.head_count_kv": 7}, None, "7 heads"),
    ("llama", {"tokenizer.ggml.bos_token_id": "x"}, None, "bos_token_id is 'x'"),
    ("llama", {"tokenizer.ggml.padding_token_id": [1, 2]}, None, r"padding_token_id is \(1, 2\)"),
    ("llama", {}, "rope_freqs.weight", r"rope_freqs.weight of the shape \(4, 256\) .* for heads of 64"),
    ("llama", {"llama.rope.scaling.type": "a\nb" * 10**6}, None, r"in the way 'a\\nba"),
    ("llama", {"llama.rope.dimension_count": "x"}, None, "rope.dimension_count 'x'"),
    ("qwen3moe", {"qwen3moe.expert_used_count": 5}, None, "expert_used_count 5"),
    ("qwen3moe", {"qwen3moe.expert_used_count": "two"}, None, "expert_used_count 'two'"),
    ("llama", {"split.count": [1, 2]}, None, r"\(1, 2\) parts"),
])
def test_what_cannot_be_read_is_refused_by_name(kind: str, extra: Any, tensor: str | None, words: str,
                                                tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", kind, extra, {tensor: np.zeros((4, D), np.float32)} if tensor else None)
    with pytest.raises(ValueError, match=f"{words}.*checkpoint in 16 bits"):
        check_stored(str(path), str(path), None)


@pytest.mark.parametrize("extra", [
    {"llama.attention.head_count": 0}, {"llama.attention.head_count": [4, 4]}, {"llama.embedding_length": 0},
    {"llama.attention.head_count_kv": 3}, {"llama.attention.key_length": "x"}, {"llama.attention.key_length": [1]},
    {"llama.rope.scaling.type": "linear"}, {"split.count": "two"},
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float("nan")},
], ids=str)
def test_settings_that_no_model_has_are_refused_by_the_file(extra: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ValueError, match=r"model\.gguf") as refused:
        check_stored(str(path), str(path), None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("method", "name", "value"), [
    ("add_token_list", "tokens", None), ("add_token_list", "tokens", ["a"]), ("add_token_list", "tokens", 7),
    ("add_token_merges", "merges", "x"), ("add_token_types", "token_type", ["a"]),
    ("add_tokenizer_model", "model", [1]),
])
def test_a_file_without_a_tokenizer_or_with_a_broken_one_is_refused_by_name(
    method: str, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(writer: Any, *_: Any) -> None:
        adds = {list: writer.add_array, str: writer.add_string, int: writer.add_uint32, type(None): lambda *_: None}
        adds[type(value)](f"tokenizer.ggml.{name}", value)

    monkeypatch.setattr(GGUFWriter, method, add)
    path = written(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"the tokenizer in .*model\.gguf cannot be read") as refused:
        FastLanguageModel.from_pretrained(str(path), max_seq_length=64, load_in_4bit=False)
    assert "\n" not in str(refused.value)


def test_more_matrices_of_experts_than_a_model_has_are_refused_before_they_are_listed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "model.gguf", "qwen3moe")
    monkeypatch.setattr(gguf_file, "MOST_EXPERTS", 2 * 3 * E - 1)
    with pytest.raises(ValueError, match=r"model\.gguf has 24 matrices of experts; at most 23"):
        gguf_config(path)
    assert gguf_config(file)["num_hidden_layers"] == 2


def test_a_type_that_cannot_be_decoded_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", tensors={"blk.0.ffn_up.bias": np.zeros(D, np.int8)})
    with pytest.raises(ValueError, match="type I8"):
        check_stored(str(path), str(path), None)


@pytest.mark.parametrize("damage", [lambda data: data[:-9000], lambda data: b"GGML" + data[4:], lambda data: b""])
def test_a_damaged_file_is_refused(damage: Any, file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"cut\.gguf is not a whole GGUF file"):
        check_stored(str(tmp_path / "cut.gguf"), "cut", None)


def test_a_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", "mamba")
    code = (f"import sys; from lowmem_grpo import FastLanguageModel as F\ntry: F.from_pretrained({str(path)!r})\n"
            "except ValueError as error: print('mamba' in str(error), 'torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True False\n"


def test_a_name_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for name, words in (("nope.gguf", "there is no such file"), ("owner/name/nope.gguf", r"nope.gguf of owner/name")):
        with pytest.raises(OSError, match=words):
            find(name, local_files_only=True)
    with pytest.raises(ValueError, match=r"gguf_file is 'a\.bin'"):
        FastLanguageModel.from_pretrained("tiny", gguf_file="a.bin")


def test_an_adapter_is_loaded_on_the_file_that_it_was_trained_on(file: Path, tmp_path: Path) -> None:
    here, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    here.write_bytes(file.read_bytes())
    model, _ = load(here)
    FastLanguageModel.get_peft_model(model, r=4).save_lora(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter")
    assert (again.loaded.name, again.peft_config["default"].base_model_name_or_path) == (str(here), str(here))
    here.rename(other)
    adapted = FastLanguageModel.get_peft_model(load(other)[0], r=4)
    adapted.load_lora(tmp_path / "adapter")  # the same file under another name
    written(here, types=("F16",))
    with pytest.raises(AdapterError, match="sha256"):
        load(tmp_path / "adapter")
