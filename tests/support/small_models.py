"""The embedded model, and small random models of other families."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowmem_grpo.memory.families import DELTA_IN, DELTA_OUT, family_of

TINY = Path(__file__).parents[2] / "lowmem_grpo" / "assets" / "tiny"
SHAPE: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2, "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
               "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Phi3": {"num_key_value_heads": 4, "sliding_window": 8},
}
HYBRIDS: dict[str, dict[str, Any]] = {  # with gated delta nets; three of these layers come before one of attention
    "Qwen3_5": {
        "num_hidden_layers": 4, "head_dim": 16, "initializer_range": 0.05, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                            "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
}
Model = TypeVar("Model", bound=torch.nn.Module)
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@functools.cache
def shallow() -> Path:
    """The embedded model with the first and the last of its six layers, in a folder of this process: most of what a
    trainer does is the same with two layers, in half of the time. It talks nonsense."""
    folder = Path(tempfile.mkdtemp(prefix="lowmem-grpo-shallow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name.replace(f"layers.{last}.", "layers.1."): weight
               for name, weight in load_file(TINY / "model.safetensors").items()
               if ".layers." not in name or f".layers.{last}." in name or ".layers.0." in name}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_model(family: str, **sizes: Any) -> transformers.PreTrainedModel:
    """A seeded random model of one family, in float32, with other `sizes` where they are given."""
    torch.manual_seed(0)
    config_name = f"{family}TextConfig" if family in ("Gemma3", *HYBRIDS) else f"{family}Config"
    config = getattr(transformers, config_name)(**(SHAPE | (FAMILIES | HYBRIDS)[family] | sizes))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def noisy_model(dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """A random model that rounding in 16 bits changes as much as a published one: in bfloat16, the mean |difference| of
    log-probabilities between decoding with a cache and one pass is about 0.03, as for SmolLM2-135M-Instruct."""
    return random_model("Llama", num_hidden_layers=8, initializer_range=0.2, hidden_size=64).to(dtype)


def load_model(family: str) -> transformers.PreTrainedModel:
    """The embedded model ("tiny"), two of its layers ("shallow"), or a random one."""
    if family in ("tiny", "shallow"):
        return AutoModelForCausalLM.from_pretrained(TINY if family == "tiny" else shallow())
    return random_model(family)


def with_adapter(model: transformers.PreTrainedModel, lora_dropout: float = 0.0) -> peft.PeftModel:
    """`model` with LoRA on every linear layer but the head, both factors random, so that the adapter matters."""
    config = peft.LoraConfig(r=4, target_modules=projections(model), lora_dropout=lora_dropout, task_type="CAUSAL_LM")
    return scatter(peft.get_peft_model(model, config))


def projections(model: transformers.PreTrainedModel) -> list[str]:
    """The names of the linear layers of attention and of the MLP."""
    row = family_of(model.config)
    assert row is not None
    delta = [*DELTA_IN, DELTA_OUT] if row.delta_net else []
    return [*row.attention.inner, "o_proj", *row.mlp.inner, "down_proj", *delta]


@torch.no_grad()
def scatter(model: Model, spread: float = 0.05, seed: int = 1, of: str = "lora_B") -> Model:
    """The model, with random values in the LoRA factor that begins at zero, so that the adapter matters; in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if of in name:
            parameter.copy_(torch.empty_like(parameter, device="cpu").normal_(0, spread, generator=generator))
    return model


def saved_reward_model(folder: Path, family: str = "Llama", **sizes: Any) -> Path:
    """A seeded random reward model of one family in a folder, with the embedded model's tokenizer."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | {"num_labels": 1} | sizes))
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


WIDE = SHAPE | {  # whose matrices end where a block of the double quantization ends
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 256,
    "initializer_range": 0.02}


def save_wide(folder: Path, family: str = "Llama", **shape: Any) -> Path:
    """A folder with a random model whose weights can lie side by side in 4 bits, and the embedded tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(WIDE | shape))
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    getattr(transformers, name)(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder
