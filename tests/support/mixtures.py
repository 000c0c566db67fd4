"""A small random mixture of experts as a user loads it, plain transformers on routes that are given to it, and problems
for routed_experts: random experts in NF4 and in plain numbers, rows, routes and gate values."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from families import GROUPS, loaded, plain_twin, saved_family
from nf4_problem import in_4_bit
from torch import Tensor, nn

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.mxfp4 import mxfp4_quantize
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

EXPERTS, K, LAYERS = 16, 4, 3
BOTH: dict[str, Any] = {"num_experts_per_tok": K, "num_hidden_layers": LAYERS}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**BOTH, "num_experts": EXPERTS, "moe_intermediate_size": 32},
    "gpt_oss": {**BOTH, "num_local_experts": EXPERTS, "intermediate_size": 32,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def mixture_folder(folder: Path, kind: str = "qwen3_moe", **changes: Any) -> Path:
    """Where a small random mixture of experts lies."""
    return saved_family(kind, folder, **(SIZES[kind] | changes))


def policy_and_twin(folder: Path, dtype: torch.dtype, checkpointing: bool | str = False) -> tuple[Policy, Any]:
    """A policy with an adapter that matters, and plain transformers with the same weights."""
    model, _ = loaded(folder, checkpointing)
    twin = plain_twin(model, folder).to(dtype)
    twin.get_base_model().set_experts_implementation("eager")  # the default computes in no float64
    return Policy(model.to(dtype)), twin


def groups_with_routes(seed: int = 0) -> list[RolloutGroup]:
    """Random completions whose routes are random too, so that nearly all of them differ from what a router chooses."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 380, (count,), generator=generator).tolist()

    def routes(count: int) -> Tensor:
        order = torch.rand(count, LAYERS, EXPERTS, generator=generator).argsort(-1)
        return order[..., :K].to(torch.uint8)

    made = []
    for prompt, completions in GROUPS:
        own = routes(prompt)
        made.append(RolloutGroup({}, ids(prompt), [
            Rollout(ids(n), [0.0] * n, "stop", routes=Routes((own, routes(n - 1)))) for n in completions]))
    return made


def replayed_alone(twin: nn.Module, prompt: list[int], rollout: Rollout) -> Tensor:
    """(C,) log-probabilities of one completion by plain transformers, each router made to choose the recorded experts;
    the values of the gates are its own."""
    ids = torch.tensor([[*prompt, *rollout.completion_ids]])
    recorded = torch.cat(rollout.routes.parts).long()
    with routed(twin, recorded):
        logits = twin(input_ids=ids[:, :-1], use_cache=False).logits[0]
    logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :]


@contextmanager
def routed(twin: nn.Module, recorded: Tensor) -> Iterator[None]:
    """Inside, the layers of transformers' own model take these experts (T, layers, k)."""

    def choosing(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            logits, _, live = output
            ids = recorded[:, layer]
            values = logits.softmax(-1).gather(-1, ids)
            return logits, (values / values.sum(-1, keepdim=True)).to(logits.dtype), ids.to(live.dtype)

        return hook

    routers = [module for module in twin.modules() if type(module).__name__.endswith("TopKRouter")]
    assert len(routers) == recorded.shape[1]
    with ExitStack() as hooks:
        for layer, router in enumerate(routers):
            hooks.callback(router.register_forward_hook(choosing(layer)).remove)
        yield


def by_rollout(policy: Policy, batches: list[MicroBatch]) -> dict[int, Tensor]:
    """Log-probabilities (C,) of each rollout, by its identity."""
    found = {}
    for batch in batches:
        logprobs, _ = policy.logprobs(batch, 1.0)
        sizes = [len(one.completion_ids) for one in batch.rollouts]
        found |= {id(one): own for one, own in zip(batch.rollouts, logprobs.split(sizes), strict=True)}
    return found


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def stack(
    experts: int, out: int, columns: int, kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> FrozenStack:
    """Random experts: kind "plain", "nf4", "nested" or "mxfp4"."""
    weights = (random(experts, out, columns, seed=out) / columns**0.5).to(device, dtype)
    if kind == "plain":
        return FrozenStack.from_weights(weights)
    if kind == "mxfp4":
        return FrozenStack(mxfp4_quantize(weights.flatten(0, 1)), experts)
    param = in_4_bit(weights.flatten(0, 1), double=kind == "nested", device=device)
    return FrozenStack(NF4Weight.from_bitsandbytes(param), experts)


def problem(
    rows: int, sizes: tuple[int, int, int, int], kind: str = "nested", dtype: torch.dtype = torch.float32,
    device: str = "cpu", idle: int = 0,
) -> dict[str, Any]:
    """Arguments of routed_experts for sizes (E, k, D, I), of which the last `idle` experts take no row."""
    experts, taken, size, inner = sizes
    scores = random(rows, experts - idle, seed=rows, device=device)
    values, ids = scores.softmax(-1).topk(taken, -1)
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": random(rows, size, seed=1, dtype=dtype, device=device).requires_grad_(), "ids": ids,
        "weights": (values / values.sum(-1, keepdim=True)).to(wide).requires_grad_(),
        "gate_up": stack(experts, 2 * inner, size, kind, dtype, device),
        "down": stack(experts, size, inner, kind, dtype, device),
    }
