"""Wrong arguments are refused by every function of the kernels, with what was got."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from divergence_problem import WIDER, E
from divergence_problem import problem as divergence_problem
from logprob_problem import D, V
from logprob_problem import problem as logprob_problem
from nf4_problem import ONE, quantized
from nf4_problem import problem as nf4_problem
from tables import every_row, not_refused

from lowmem_grpo.kernels import linear_divergence, linear_logprobs, linear_topk
from lowmem_grpo.kernels.fp8 import fp8_dequantize, fp8_quantize
from lowmem_grpo.kernels.frozen import FrozenStack, frozen_linear
from lowmem_grpo.kernels.glu import geglu, glu_backward, glu_forward, swiglu
from lowmem_grpo.kernels.lora import LoRA, lora_linear
from lowmem_grpo.kernels.lora_mlp import lora_mlp
from lowmem_grpo.kernels.nf4 import nf4_dequantize
from lowmem_grpo.kernels.nf4_linear import nf4_linear
from lowmem_grpo.kernels.rms_norm import rms_norm
from lowmem_grpo.kernels.rope import rope
from lowmem_grpo.kernels.routed_experts import routed_experts

IN, INNER = 63, 130
GLU: dict[str, Any] = {"gate": torch.zeros(3, 6), "up": torch.zeros(3, 6)}
SILU = GLU | {"activation": "silu"}
ROPE: dict[str, Any] = {"q": torch.zeros(2, 4, 3, 8), "k": torch.zeros(2, 1, 3, 8), "cos": torch.zeros(2, 3, 8),
                        "sin": torch.zeros(2, 3, 8)}
LINEAR: dict[str, Any] = {"x": torch.zeros(3, IN), "weights": [torch.zeros(INNER, IN)], "loras": [None]}
PAIR = LoRA(torch.zeros(5, IN), torch.zeros(INNER, 5), 1.0)
MLP: dict[str, Any] = {
    "x": torch.zeros(3, IN), "gate": torch.zeros(INNER, IN), "up": torch.zeros(INNER, IN),
    "down": torch.zeros(IN, INNER), "up_lora": PAIR,
}
BF16, META, GRADIENT = {"dtype": torch.bfloat16}, {"device": "meta"}, {"requires_grad": True}
ONE_HEAD = {"teacher_weight": None, "teacher_bias": None}
# A function, arguments that are right, and changes that are not, with a part of the answer.
TABLE: list[tuple[Callable[..., Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (swiglu, GLU, [
        ({"up": torch.zeros(3, 5)}, "(3, 5)"), ({"gate": torch.zeros(()), "up": torch.zeros(())}, "()"),
        ({"gate": torch.zeros(3, 7), "up": None}, "(3, 7)"), ({"up": torch.zeros(3, 6, dtype=torch.half)}, "float16"),
        ({"gate": torch.zeros(3, 6, dtype=torch.long)}, "int64"), ({"up": torch.zeros(3, 6, device="meta")}, "meta"),
        ({"gate": [1.0]}, "gate is a list; it must be a tensor"), ({"up": 2.0}, "up is a float; it must be a tensor"),
    ]),
    (geglu, GLU, [({"approximate": "sigmoid"}, "'sigmoid'")]),
    (glu_forward, SILU, [({"activation": "relu"}, "'relu'")]),
    (glu_backward, SILU | {"grad": torch.zeros(3, 6)}, [({"grad": torch.zeros(3, 5)}, "(3, 5)")]),
    (rms_norm, {"x": torch.zeros(3, 33), "weight": torch.zeros(33)}, [
        ({"x": torch.zeros(())}, "()"), ({"x": torch.zeros(3, 0), "weight": torch.zeros(0)}, "(3, 0)"),
        ({"x": torch.zeros(1, 65537), "weight": torch.zeros(65537)}, "65536"), ({"weight": torch.zeros(5)}, "(5,)"),
        ({"weight": torch.zeros(33, dtype=torch.long)}, "int64"), ({"x": torch.zeros(3, 33).int()}, "int32"),
        ({"weight": torch.zeros(33, device="meta")}, "meta"), ({"residual": torch.zeros(4, 33)}, "(4, 33)"),
        ({"residual": torch.zeros(3, 33, dtype=torch.bfloat16)}, "bfloat16"),
        ({"residual": torch.zeros(3, 33, device="meta")}, "meta"),
        ({"weight": torch.nn.RMSNorm(33)}, "give its weight"), ({"x": np.zeros((3, 33))}, "x is a ndarray"),
        ({"residual": 0.0}, "residual is a float"),
        ({"eps": None}, "eps is None"), ({"offset": torch.tensor(1.0, **GRADIENT)}, "offset is a tensor ()"),
    ]),
    (rope, ROPE, [
        ({"q": torch.zeros(2, 4, 8)}, "(2, 4, 8)"),
        ({"q": torch.zeros(3, 4, 8), "k": torch.zeros(3, 1, 8)}, "(3, 1, 8)"),
        ({"k": torch.zeros(2, 1, 5, 8)}, "(2, 1, 5, 8)"), ({"k": torch.zeros(2, 1, 3, 6)}, "(2, 1, 3, 6)"),
        ({"cos": torch.zeros(2, 3, 6)}, "(2, 3, 6)"), ({"cos": torch.zeros(()), "sin": torch.zeros(())}, "()"),
        ({"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}, "(4, 8)"), ({"heads_first": False}, "(B, T, H, D)"),
        ({"cos": torch.zeros(3, 3, 8), "sin": torch.zeros(3, 3, 8)}, "(3, 3, 8)"),
        ({"cos": torch.zeros(3, 5), "sin": torch.zeros(3, 5)}, "even"),
        ({"cos": torch.zeros(3, 10), "sin": torch.zeros(3, 10)}, "up to 8"),
        ({"k": torch.zeros(2, 1, 3, 8, **BF16)}, "bfloat16"), ({"sin": torch.zeros(2, 3, 8, **BF16)}, "bfloat16"),
        ({"cos": torch.zeros(3, 8, **BF16), "sin": torch.zeros(3, 8, **BF16)}, "bfloat16"),
        ({"q": torch.zeros(2, 4, 3, 8).long(), "k": torch.zeros(2, 1, 3, 8).long()}, "int64"),
        ({"k": torch.zeros(2, 1, 3, 8, **META)}, "meta"), ({"cos": torch.zeros(2, 3, 8, **GRADIENT)}, "detach"),
        ({"k": None}, "k is a NoneType; it must be a tensor"),
    ]),
    (linear_logprobs, logprob_problem(3, torch.float32)[0], [
        ({"hidden": torch.zeros(3)}, "hidden"), ({"hidden": torch.zeros(3, 5)}, "(3, 5)"),
        ({"weight": torch.zeros(V)}, "weight"), ({"targets": torch.zeros(2, dtype=torch.long)}, "(2,)"),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "int32"), ({"targets": torch.zeros(3)}, "float32"),
        ({"bias": torch.zeros(5)}, "bias"), ({"hidden": torch.zeros(3, D, dtype=torch.bfloat16)}, "bfloat16"),
        ({"weight": torch.zeros(V, D, device="meta")}, "meta"),
        ({"targets": torch.zeros(3, dtype=torch.long, device="meta")}, "meta"),
        ({"bias": torch.zeros(V, device="meta")}, "meta"),
        ({"hidden": torch.zeros(3, D, dtype=torch.long), "weight": torch.zeros(V, D, dtype=torch.long)}, "int64"),
        ({"temperature": 0.0}, "temperature is 0.0"), ({"temperature": -1.0}, "temperature is -1.0"),
        ({"chunk_rows": -1}, "chunk_rows is -1"), ({"weight": torch.nn.Linear(D, V)}, "give its weight, and bias"),
        ({"chunk_rows": 2.5}, "chunk_rows is 2.5"), ({"weight": None}, "weight is a NoneType; it must be a tensor"),
        ({"targets": [1, 2, 3]}, "targets is a list"), ({"bias": np.zeros(V)}, "bias is a ndarray"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"logit_scale": None}, "logit_scale is None"),
        *(({name: torch.tensor(2.0, **GRADIENT)}, f"{name} is a tensor (), requires_grad=True; it must be")
          for name in ("temperature", "logit_scale", "softcap")), ({"temperature": torch.ones(3)}, "a tensor (3,)"),
        ({"weight": quantized(V, 64, torch.float32)}, "got a Params4bit in 4 bits. Dequantize it once"),
        *((trained | {"targets": torch.tensor([0, wrong, 5])}, f"hold {wrong}; they must be tokens, from 0 to {V - 1}")
          for wrong in (-100, V) for trained in ({}, {"ignore_index": -1}, {"weight": torch.zeros(V, D, **GRADIENT)})),
    ]),
    (linear_divergence, divergence_problem(3, torch.float32, heads=2, bias=True), [
        *(({"beta": beta}, f"beta is {beta}; it must be") for beta in (-0.1, 1.5, torch.nan)),
        ({"beta": None}, "beta is None"), ({"temperature": 0.0}, "temperature is 0.0"),
        ({"teacher_softcap": "30"}, "teacher_softcap is '30'"), ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"student_hidden": torch.zeros(3, E)}, "expected student_hidden (N, D) and weight (V, D); got (3, 17)"),
        ({"teacher_hidden": torch.zeros(3, D)}, "expected teacher_hidden (N, D) and teacher_weight (V, D); got (3, 3"),
        ({"teacher_weight": None}, "teacher_bias is given without teacher_weight"),
        (ONE_HEAD | {"teacher_softcap": 3.0}, "teacher_softcap is given without teacher_weight"),
        (ONE_HEAD, "expected teacher_hidden (N, D) and weight (V, D); got (3, 17)"),
        ({"teacher_hidden": torch.zeros(2, E)}, "expected as many rows of student_hidden and teacher_hidden"),
        ({"teacher_bias": torch.zeros(V)}, f"expected teacher_bias ({WIDER},)"), ({"bias": np.zeros(V)}, "a ndarray"),
        ({"teacher_hidden": torch.zeros(3, E).double(), "teacher_weight": torch.zeros(V, E).double(),
          "teacher_bias": None}, "both or neither in float64"),
        ({"teacher_hidden": torch.zeros(3, E, **META), "teacher_weight": torch.zeros(V, E, **META),
          "teacher_bias": None}, "on one device"),
        ({"teacher_weight": quantized(V, 64, torch.float32)}, "got a Params4bit in 4 bits. Dequantize it once"),
    ]),
    (linear_topk, {"hidden": torch.zeros(3, D), "weight": torch.zeros(V, D), "k": 5}, [
        *(({"k": k}, f"k is {k!r}; it must be") for k in (0, V + 1, 2.5, "5")),
        ({"hidden": torch.zeros(3, 5)}, "(3, 5)"), ({"temperature": -1.0}, "temperature is -1.0"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ]),
    (nf4_linear, nf4_problem(3, ONE, torch.float32), [
        ({"x": torch.zeros(3, 191)}, "expected x (..., 192)"),
        ({"x": torch.zeros(3, 192, dtype=torch.int32)}, "of a floating dtype"),
        ({"lora_b": None}, "expected lora_a and lora_b, or neither"),
        ({"lora_a": torch.zeros(4, 192)}, "expected lora_a (1 * rank, 192)"),
        ({"lora_a": [torch.zeros(5, 192)]}, "as tensors: stack those of adjacent matrices, or call lora_linear"),
        ({"bias": torch.zeros(71)}, "expected bias (70,)"),
        ({"scale": torch.zeros(1)}, "expected scale ()"),
        ({"bias": torch.zeros(70, device="meta")}, "expected bias on the device of x, cpu; got meta"),
        ({"weight": torch.zeros(70, 192)}, "expected a Params4bit"), ({"scale": None}, "scale is None"),
        ({"weight": torch.nn.Linear(192, 70)}, "got Linear: give its weight"), ({"x": [1.0]}, "x is a list"),
    ]),
    (nf4_dequantize, {"weight": quantized(64, 64, torch.float32)}, [({"weight": torch.zeros(3, 5)}, "got Tensor")]),
    (fp8_dequantize, {"weight": fp8_quantize(torch.ones(2, 3))}, [({"weight": torch.zeros(3, 5)}, "got a Tensor")]),
    (fp8_quantize, {"weight": torch.ones(6, 16)}, [
        *(({"block": block}, f"block is {block!r}; it must be")
          for block in (128, (0, 8), (-1, 8), (2.0, 8.0), (1, 2, 3))),
        *(({"weight": torch.zeros(shape)}, f"{shape}") for shape in ((), (4,), (2, 3, 4))),
        ({"weight": torch.ones(2, 3).long()}, "int64"),
        ({"weight": torch.nn.Linear(2, 3)}, "weight is a Linear; it must be a tensor: give its weight"),
    ]),
    (frozen_linear, {"x": torch.zeros(3, 8), "weight": torch.zeros(4, 8)}, [
        ({"weight": torch.zeros(4, 8, **GRADIENT)}, "frozen"), ({"weight": torch.zeros(4, 9)}, "(4, 9)"),
        ({"weight": torch.nn.Linear(8, 4)}, "give its weight"), ({"bias": torch.zeros(3)}, "(3,)"),
        ({"x": np.zeros((3, 8))}, "x is a ndarray"), ({"weight": fp8_quantize(torch.zeros(4, 5))}, "(4, 5)"),
        ({"x": torch.zeros(3, 8).long()}, "int64"),
    ]),
    (routed_experts, {"x": torch.zeros(3, 4), "ids": torch.zeros(3, 1).long(), "weights": torch.ones(3, 1),
                      **dict.fromkeys(("gate_up", "down"), FrozenStack.from_weights(torch.ones(2, 8, 4)))}, [
        ({"down": torch.zeros(2, 4, 4)}, "FrozenStack.from_weights; got ['Tensor']"), ({"ids": [[0]]}, "ids is a list"),
    ]),
    (lora_linear, LINEAR, [
        ({"biases": [torch.zeros(3)]}, "expected a bias (130,) of torch.float32; got (3,) of torch.float32"),
        ({"biases": [None, None]}, "expected one entry of biases for each weight; got 1 and 2"),
        ({"biases": [torch.zeros(INNER, **GRADIENT)]}, "biases are frozen"),
        ({"weights": torch.zeros(INNER, IN)}, "expected lists"), ({"loras": PAIR}, "lora_linear(x, [weight], [lora])"),
        ({"weights": [torch.nn.Linear(IN, INNER)]}, "give its weight"), ({"weights": [None]}, "weight is a NoneType"),
        ({"loras": [(PAIR.a, PAIR.b, 0.5)]}, "expected LoRA(a, b, scale), or None, for each weight; got a tuple"),
        ({"loras": [replace(PAIR, a=None)]}, "a is a NoneType"), ({"x": np.zeros((3, IN))}, "x is a ndarray"),
        ({"loras": [replace(PAIR, scale=torch.tensor(1.0, **GRADIENT))]}, "scale is a tensor (), requires_grad=True"),
        ({"loras": [replace(PAIR, scale="0.5")]}, "scale is '0.5'; it must be a number"),
    ]),
    (lora_mlp, MLP, [
        ({"gate": torch.zeros(INNER, 5)}, "(130, 5)"), ({"down": torch.zeros(IN, 5)}, "(63, 5)"),
        ({"up": torch.zeros(5, IN)}, "(5, 63)"), ({"gate": torch.zeros(INNER, IN, dtype=torch.bfloat16)}, "bfloat16"),
        ({"gate": torch.zeros(INNER, IN, requires_grad=True)}, "frozen"), ({"activation": "relu"}, "'relu'"),
        ({"gate_lora": LoRA(torch.zeros(5, IN), torch.zeros(5, 5), 1.0)}, "(5, 5)"), ({"up": None}, "up_lora"),
        *(({"tile_rows": rows}, f"tile_rows is {rows!r}; it must be at least 1") for rows in (0, -3, 2.0, "2")),
        ({"down": torch.nn.Linear(INNER, IN)}, "give its weight"), ({"gate": None}, "weight is a NoneType"),
    ]),
]


@every_row(("function", "arguments", "rows"), TABLE)
def test_wrong_arguments_are_refused_with_what_was_got(
    function: Callable[..., Any], arguments: dict[str, Any], rows: list[tuple[dict[str, Any], str]]
) -> None:
    assert not_refused(lambda changes: function(**(arguments | changes)), rows) == []
