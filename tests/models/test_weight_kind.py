"""A kind of frozen weights is an addition: the package knows nothing of this one."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.layer_forms import FORMS, WeightForm
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.models.lora_layers import OneNode, use_kernel_layers
from lowmem_grpo.models.quantized_linear import QuantizedLinear, form_of


class SignWeight(FrozenWeight, kind="sign"):
    """The signs of weights (out, in), and a scale for each row (out, 1)."""

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        rows, columns = slice(row, row + len(out)), slice(column, column + out.shape[1])
        out.copy_(self.tensors[0][rows, columns] * self.tensors[1][rows])


def test_a_new_kind_has_products_a_lora_layer_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.kernels.frozen_weight.BAND_BYTES", 1000)  # several bands
    signs, scales = torch.randn(33, 24).sign().to(torch.int8), torch.rand(33, 1, dtype=torch.float64)
    linear = QuantizedLinear(SignWeight(signs, scales))
    config, model = LoraConfig(target_modules=["0"], r=4, init_lora_weights=False), nn.Sequential(linear)
    use_kernel_layers(config, model)
    adapted: Any = get_peft_model(model, config).double().base_model.model[0]
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    x, dense = torch.randn(5, 24, dtype=torch.float64, requires_grad=True), linear.frozen.dequantized()
    assert isinstance(adapted, OneNode) and form_of(model) == "sign"
    assert torch.equal(dense, signs * scales)
    torch.testing.assert_close(frozen_linear(x, linear.frozen), x @ dense.T)
    wanted = x @ dense.T + adapted.scaling["default"] * x @ a.T @ b.T
    found, grad = adapted(x), torch.randn(5, 33, dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, a, b), grad) for y in (found, wanted)))
    monkeypatch.setitem(FORMS, "sign", WeightForm("signs", 8, lambda linear: linear.weights + 8 * linear.rows))
    shape = ModelShape.from_config(named_config("qwen2.5-3b"))
    less = sum(count * (linear.weights - 8 * linear.rows) for count, linear in shape.all_linears())
    assert shape.weight_bytes("16bit") - shape.weight_bytes("sign") == less
    found = plan(named_config("qwen2.5-3b"), RunSettings(640, form="sign"), device("h100"))
    assert found.fits and "in signs" in found.rows[0].note
