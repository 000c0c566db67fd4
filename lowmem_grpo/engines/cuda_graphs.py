"""CUDA graphs of decode steps, and the reasons why a card, a model or a setting rules them out."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.loading import VLLM, EngineUnavailableError
from lowmem_grpo.memory.families import family_of, has_experts
from lowmem_grpo.memory.offload.embedding import on_host
from lowmem_grpo.memory.oom import RECORDING
from lowmem_grpo.models.policy import Policy

logger = logging.getLogger(__name__)
AGREE = 0.02  # how far a graph's first logits may be from the eager step's, as a share of the largest logit
HOST = "its embedding is on the host"
FIX = "leave enforce_eager out, and token steps run without graphs where they must"

Run = Callable[[], Tensor]
Record = Callable[[Run, Any], Run]  # (work, a graph whose memory pool it may share)


class CudaGraph:
    """A recorded CUDA graph, replayed in one launch. Its work must use fixed addresses and never synchronize."""

    def __init__(self, work: Run, beside: "CudaGraph | None" = None) -> None:
        """Record the work without running it. If another graph is passed as `beside`, share its memory pool; the two
        graphs must then never run at the same time. RuntimeError if the work cannot be recorded."""
        self.graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.graph.pool()
        # another thread may train meanwhile, and its CUDA calls must not invalidate this capture
        with RECORDING, torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = work()

    def __call__(self) -> Tensor:
        """Replay the graph; returns the same tensor each time, overwritten."""
        self.graph.replay()
        return self.result


def differs(replayed: Tensor, logits: Tensor) -> str:
    """Return how a graph's logits (B, V) differ from an eager step's; "" if they agree or the eager logits have NaN."""
    far = (replayed - logits).abs().max() / logits.abs().max()
    if bool(far <= AGREE) or bool(logits.isnan().any()):
        return ""
    return f"it gave logits that differ by {float(far):.2g} of the largest from the same step without a graph"


def not_of_model(config: Any) -> str:
    """Return why a model of this config cannot keep its cache at fixed addresses, as CUDA graphs need; "" if it can."""
    family = family_of(config)
    if family is not None and family.experts is not None and has_experts(config):
        return "its experts' routes are recorded"
    if family is not None and family.delta_net:
        return "the states of its gated delta nets are replaced in each step"
    if family is not None and family.unlike_layers:
        return "its layers lend each other keys"
    return ""


def not_recorded(policy: Policy) -> str:
    """Return why a decode step of a loaded model cannot be a CUDA graph; "" if nothing is known to prevent it."""
    if policy.device.type != "cuda":
        return f"the model is on the {policy.device.type}"
    if policy.autocast_dtype is not None:
        return f"mixed precision converts weights in each step (load the model in {policy.autocast_dtype})"
    if on_host(policy.base):
        return HOST
    return not_of_model(policy.base.config)


def check_graphs(asked: bool | None, engine: str, device: str, config: Any, offloaded: bool) -> None:
    """Raise EngineUnavailableError if `enforce_eager=False` asks for CUDA graphs that this model cannot have. For
    vLLM, only mixtures of experts on a card are refused here, because vLLM checks the rest itself."""
    if asked is not False:
        return
    if engine == VLLM:
        refuse_graphs("" if device.startswith("cpu") or not has_experts(config) else
                      "how many tokens each expert has is read on the host", FIX)
        return
    refuse_graphs("" if device.startswith("cuda") else f"the model is on the {device}", FIX)
    refuse_graphs(HOST if offloaded else "", "leave enforce_eager or offload_embedding out")
    refuse_graphs(not_of_model(config), FIX)


def refuse_graphs(why: str, fix: str = FIX) -> None:
    """Raise EngineUnavailableError with the reason `why` and the advice `fix`; do nothing if `why` is empty."""
    if why:
        raise EngineUnavailableError(f"enforce_eager is False, which asks for token steps as CUDA graphs, and {why}; "
                                     f"{fix}")


@cache
def say_plain(why: str) -> None:
    logger.warning("token steps run without CUDA graphs, several times slower where rows are few: %s. "
                   "Set enforce_eager=True if this is intended", why)
