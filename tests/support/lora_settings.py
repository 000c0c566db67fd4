"""Settings of LoRA as people give them to PEFT, for a model of two layers: done, only sampled with, or refused."""

from typing import Any

from peft import EvaConfig

ATTENTION = r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj"
UNSLOTH = (  # what its FastModel gives PEFT
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|v_proj|o_proj|"
    r"gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|"
    r"dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
LOADED: dict[str, dict[str, Any]] = {
    "usual": {}, "one": {"target_modules": ["q_proj"]}, "paths": {"target_modules": ["layers.1.mlp.up_proj"]},
    "all-linear": {"target_modules": "all-linear"}, "pattern": {"target_modules": ATTENTION},
    "pattern of unsloth": {"target_modules": UNSLOTH}, "pattern of one": {"target_modules": r".*\.1\..*down_proj"},
    "without": {"exclude_modules": ["k_proj"]}, "without a pattern": {"exclude_modules": r".*\.0\..*"},
    "all-linear without": {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]},
    "a layer": {"layers_to_transform": 1}, "layers": {"layers_to_transform": [0, 1]},
    "layers by pattern": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "rslora": {"use_rslora": True, "lora_alpha": 3}, "large alpha": {"lora_alpha": 64}, "rank 1": {"r": 1},
    "dropout": {"lora_dropout": 0.5}, "gaussian": {"init_lora_weights": "gaussian"},
    "any start": {"init_lora_weights": False}, "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva", "eva_config": EvaConfig(rho=1.0)},
    "ranks": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7}},
    "alphas": {"alpha_pattern": {"down_proj": 32, "v_proj": 1}},
    "ranks and alphas": {"rank_pattern": {"o_proj": 1, r".*\.0\.mlp.*_proj": 8}, "alpha_pattern": {r".*\.0\..*": 5},
                         "use_rslora": True},
    "transposed": {"fan_in_fan_out": True}, "tied": {"ensure_weight_tying": True},
}
SAMPLED = {"dora": {"use_dora": True}, "own bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "pissa, fast": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    "mica": ({"init_lora_weights": "mica"}, "init_lora_weights='mica'"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
    "biases": ({"bias": "all"}, "bias='all'"), "LoRA's biases": ({"bias": "lora_only"}, "bias='lora_only'"),
    "LoRA on the head": ({"target_modules": ["q_proj", "lm_head"]}, r"holds .*lm_head"),
    "LoRA on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, r"holds .*embed_tokens"),
    "norms": ({"modules_to_save": ["norm"]}, "norm.*(cannot be trained|only embedding and head)"),
    "copied layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "parameters": ({"target_parameters": ["self_attn.q_proj.weight"], "target_modules": []}, "target_parameters"),
    "activated": ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
}
