"""Small random models of every family on disk: whole, beside images and sounds, and in many shards."""

import copy
import shutil
from pathlib import Path
from typing import Any

import peft
import torch
from packed_problem import Learned
from small_models import HYBRIDS, SHAPE, TINY, scatter
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.families import FAMILIES
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import RolloutGroup

WINDOW = 8  # tokens: completions are longer
LAYER_TYPES = ["sliding_attention", "full_attention"]
# what differs from `SHAPE`, so that every form of the family is there
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LAYER_TYPES,
                    "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": LAYER_TYPES,
                "no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                "logits_scaling": 2.0},
    "glm4": {"head_dim": 16, "attention_bias": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "exaone4": {"sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    "ministral3": {"head_dim": 16, "sliding_window": WINDOW, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "original_max_position_embeddings": 8,
        "max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
        "llama_4_scaling_beta": 0.1}},
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": LAYER_TYPES * 2, "sliding_window": WINDOW, "head_dim": 8,
        "global_head_dim": 16, "num_kv_shared_layers": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384, "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0},
    "qwen3_5_text": HYBRIDS["Qwen3_5"],
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "norm_topk_prob": True},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW,
                "layer_types": LAYER_TYPES, "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "truncate": False, "original_max_position_embeddings": 16}},
}
TRAINED = [kind for kind, row in FAMILIES.items() if not row.refused and not row.vision]
GROUPS = [(9, [5, 12, 1, 14]), (6, [13]), (1, [7, 3])]  # (prompt, completions), in tokens


def family_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A seeded random model of a family in float32; norms, biases and scales are random too."""
    torch.manual_seed(0)
    shape = SHAPE | {"initializer_range": 0.1} | SHAPES.get(model_type, {}) | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).eval()
    with torch.no_grad():
        for one in [*model.parameters(), *model.buffers()]:
            if one.ndim == 1 and one.is_floating_point() and one.numel() != SHAPE["vocab_size"]:
                one.add_(torch.randn_like(one) * 0.1)
        for name, one in model.named_parameters():
            if name.endswith("proj_bias"):  # experts'
                one.normal_(0, 0.1)
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0:  # Gemma 4 has learnt what others have as a constant
                module.q_norm.weight.mul_(module.head_dim**-0.5)
    return model


def saved_family(model_type: str, folder: Path, **changes: Any) -> Path:
    """A folder with the family's model and the embedded tokenizer, as the hub would have it."""
    family_model(model_type, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def loaded(folder: Path, checkpointing: bool | str = False, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) as a user gets them, with an adapter that matters."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=128, **({"load_in_4bit": False} | options))
    adapted = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=checkpointing, mlp_tile=8
                                               if checkpointing else None)
    return scatter(adapted, 0.1, of="lora_"), tokenizer


def plain_twin(ours: Any, folder: Path) -> peft.PeftModel:
    """transformers' own model under PEFT's own layers, with the same weights and adapter."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    config = copy.deepcopy(ours.peft_config["default"])
    twin = peft.get_peft_model(base, peft.LoraConfig(
        r=config.r, lora_alpha=config.lora_alpha, target_modules=config.target_modules, task_type="CAUSAL_LM"))
    adapter = {name: value for name, value in ours.state_dict().items() if "lora_" in name}
    assert adapter and not twin.load_state_dict(adapter, strict=False).unexpected_keys
    return twin


NEAR = 1e-5  # of log-probabilities, and of gradients as a part of the largest of their tensor
SAMPLED = 1e-4


def assert_alike(ours: Learned, theirs: Learned, gradients: float = NEAR) -> None:
    """What `learned` gives: log-probabilities, and every gradient, of which none is zero throughout."""
    assert (ours[0] - theirs[0]).abs().max() <= NEAR
    assert ours[1].keys() == theirs[1].keys()
    for name, grad in theirs[1].items():
        assert grad.any(), name
        assert (ours[1][name] - grad).abs().max() <= gradients * grad.abs().max(), name


def sampled_apart(model: Any, tokenizer: Any) -> Tensor:
    """The largest difference of log-probabilities between sampling and training."""
    policy, prompts = Policy(model), [[5, 6, 7, 8], [9], list(range(20, 45))]
    groups = TransformersEngine(policy, tokenizer, 128).generate(
        prompts, SamplingParams(n=3, max_tokens=30, seed=1, ignore_eos=True))
    (batch,) = pack([RolloutGroup({}, *pair) for pair in zip(prompts, groups, strict=True)])
    with torch.no_grad():
        trained, _ = policy.logprobs(batch, 1.0)
    return (trained - batch.at_trained(batch.rollout_logprobs)).abs().max()


TINY_PART = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "head_dim": 8, "patch_size": 4}
COMPOSITES: dict[str, tuple[type[Any], type[Any], str, dict[str, Any]]] = {  # config, model, text family, other parts
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration, "gemma4_text", {
        "vision_config": TINY_PART | {"num_key_value_heads": 2, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}),
    "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration, "ministral3", {
        "vision_config": TINY_PART | {"model_type": "pixtral", "image_size": 16}, "tie_word_embeddings": False}),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, "qwen3_5_text", {
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                          "out_hidden_size": SHAPE["hidden_size"], "num_position_embeddings": 16, "patch_size": 4}}),
}


def composite(kind: str) -> PreTrainedModel:
    """A model in float32 with every part; that of text is the small model of its family."""
    config, model, family, parts = COMPOSITES[kind]
    text: Any = family_model(family)
    whole: PreTrainedModel = model(config(text_config=text.config.to_dict(), **parts)).eval()
    whole.get_decoder().load_state_dict(text.get_decoder().state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return whole


def saved_composite(kind: str, folder: Path) -> Path:
    """A folder with the model and the embedded tokenizer, as the hub would have it."""
    composite(kind).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def save_large(folder: Path) -> tuple[int, int]:
    """A random model in bfloat16, in several files; its bytes, and those of its largest matrix."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1536, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, dtype="bfloat16",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="90MB")
    finally:
        torch.set_default_dtype(before)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) >= 4
    return sum(sizes), 2 * config.hidden_size * config.intermediate_size
