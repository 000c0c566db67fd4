"""LoRA on the experts of a layer, in PEFT's layout for parameters of several matrices (its `target_parameters`).

    delta_e = scale B_e A_e      lora_A (E r, in): the rows of expert e are A_e;    lora_B (out, r E): B.view(out, r, E)

PEFT itself adds the product for all experts to a copy of the stack. Here the stack stays as it is, and
`kernels/routed_experts.py` multiplies by the pair of each row's expert.
"""

import math
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.lora_factors import LoRA
from lowmem_grpo.models.experts import ExpertStack

REFUSED = {"lora_dropout": "LoRA on experts has no dropout", "use_dora": "LoRA on experts has no DoRA",
           "lora_bias": "LoRA on experts has no biases"}
STARTS = (True, False, "gaussian")  # init_lora_weights that draw or clear A and B, whatever the weights are


def check_settings(config: LoraConfig) -> None:
    """Raise ValueError for settings that LoRA on experts does not have, most of which PEFT refuses too."""
    for name, problem in REFUSED.items():
        if getattr(config, name):
            raise ValueError(f"{problem}: leave {name}={getattr(config, name)!r} out, or name attention only in "
                             "target_modules")
    if config.init_lora_weights not in STARTS:
        raise ValueError(f"init_lora_weights={config.init_lora_weights!r}: LoRA on experts begins with one of "
                         f"{', '.join(map(repr, STARTS))}")


class ExpertLoRA(nn.Module, LoraLayer):
    """PEFT's LoRA layer on an `ExpertStack`; `ExpertLayer` reads its weights and its active pair."""

    base_layer: ExpertStack

    def __init__(self, base_layer: ExpertStack, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1,
                 **kwargs: Any) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self.experts = base_layer.experts
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config=config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        stack: Any = module
        return stack.columns, stack.rows

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter of rank r for each expert."""
        check_settings(config)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name] = config.use_rslora
        self.use_dora[adapter_name] = self.lora_bias[adapter_name] = False
        self.lora_dropout.update({adapter_name: nn.Identity()})
        stack = self.base_layer
        self.lora_A[adapter_name] = nn.Linear(stack.columns, r * self.experts, bias=False)
        self.lora_B[adapter_name] = nn.Linear(r * self.experts, stack.rows, bias=False)
        if config.init_lora_weights:
            self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def frozen(self) -> FrozenStack:
        return self.base_layer.frozen

    @property
    def lora(self) -> LoRA | None:
        """The active pair; ValueError where several adapters are active."""
        active = [name for name in self.active_adapters if name in self.lora_A and not self.disable_adapters]
        if len(active) > 1:
            raise ValueError(f"the adapters {', '.join(active)} are active together; on experts only one can be")
        return LoRA(*self.factors(active[0]), self.scaling[active[0]]) if active else None

    def factors(self, adapter: str) -> tuple[Any, Any]:
        """Return A (E r, in) and B (out, r E) of an adapter."""
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError: experts are not merged in place."""
        raise ValueError("an adapter is not merged into experts in place. Save the merged model: "
                         'save_pretrained_merged(folder, tokenizer, "merged_16bit")')
