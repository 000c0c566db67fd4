"""Run the step of `weigh.py` for real on a card, with random weights and tokens; read the allocator's peaks."""

from contextlib import nullcontext
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from bench.loop.phase_watch import used_bytes
from bench.memory.fake_models import linear_4bit, meta_model, quantize
from bench.memory.stages import Features
from bench.memory.weigh import add_lora, groups_of, largest, learner_of, sizes_of, weight_count
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.offload.embedding import embed_on_host, movable
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.step_accumulator import StepAccumulator
from lowmem_grpo.utils import GIB

CARD = "cuda"


def measure(
    config: dict[str, Any], lengths: list[int], features: Features, rank: int, gib: float | None
) -> dict[str, Any]:
    """Return the peaks of one optimizer step in bytes, allocated and reserved; `gib` bounds what is used of the card,
    the driver's own part included.

    If memory runs out, the row has an `error`. The first step warms up; the second one is measured.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a card; leave it out to use fake tensors")
    torch.cuda.empty_cache()
    total, outside = torch.cuda.mem_get_info()[1], used_bytes(CARD) - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gib * GIB - outside) / total) if gib else 1.0)
    try:
        return step(config, lengths, features, rank)
    except torch.cuda.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0][:160]}"}
    finally:
        torch.cuda.empty_cache()


def step(config: dict[str, Any], lengths: list[int], features: Features, rank: int) -> dict[str, Any]:
    """Load the model, run two steps, and return the peaks of the second."""
    model = add_lora(random_model(config, features), rank, max(lengths), features)
    learner = learner_of(model, lengths, features, GRPOObjective)
    policy, optimizer = learner.policy, learner.optimizer
    batch = largest(groups_of(lengths, features), max(lengths) if features.packing else None).to(CARD)
    offload = ActivationOffload(model) if features.checkpointing == "offload" else None
    held = engine_weights(policy) if not features.shared_weights else []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with offload or nullcontext():
            totals = StepTotals(len(lengths), sum(lengths), sum(lengths))
            learner.accumulate(iter([batch]), totals, StepAccumulator(policy.device))
        activations = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    sizes = {f"{name}_bytes": size for name, size in sizes_of(model, policy, features).items()}
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values()
                 if torch.is_tensor(value) and value.is_cuda)
    sizes |= {"gradients_bytes": sizes["adapters_bytes"], "optimizer_bytes": states}
    return sizes | {
        "device_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": used_bytes(CARD), "host_bytes": 0 if offload is None else offload.host_bytes_peak,
        "activations_bytes": activations - sum(sizes.values()), "engine_held_bytes": sum(part.nbytes for part in held),
    }


def engine_weights(policy: Policy) -> list[torch.Tensor]:
    """Return the weights that an engine with its own copy would hold, in 16 bits."""
    return [torch.empty(weight_count(weight), dtype=torch.bfloat16, device=CARD)
            for weight in policy.base.parameters() if not weight.requires_grad]


def random_model(config: dict[str, Any], features: Features) -> PreTrainedModel:
    """Return a frozen model of random weights on the card; its linears are quantized to NF4 one at a time."""
    kind = AutoConfig.for_model(**config)
    model = meta_model(kind, torch.bfloat16, nf4=False)
    quantize(model, random_4bit)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                values = (torch.ones_like(parameter, device=CARD) if parameter.ndim == 1  # a norm
                          else torch.randn_like(parameter, device=CARD).mul_(0.02))
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
    model.tie_weights()
    backbone = getattr(model, model.base_model_prefix)
    backbone.rotary_emb = type(backbone.rotary_emb)(config=kind).to(CARD)  # its buffers are computed
    if features.host_embedding and movable(model):
        embed_on_host(model)
    return model.requires_grad_(False)


def random_4bit(linear: nn.Linear) -> Linear4bit:
    """Return a 4-bit layer of the same shape with random weights, on the card."""
    with torch.device("meta"):
        new = linear_4bit(linear, torch.bfloat16)
    values = torch.randn(linear.weight.shape, dtype=torch.bfloat16, device=CARD).mul_(0.02)
    new.weight = Params4bit(values, requires_grad=False, compress_statistics=True, quant_type="nf4").to(CARD)
    new.quant_state = new.weight.quant_state
    if linear.bias is not None:
        new.bias = nn.Parameter(torch.zeros(linear.out_features, dtype=torch.bfloat16, device=CARD), False)
    return new
