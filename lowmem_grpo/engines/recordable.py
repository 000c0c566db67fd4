"""Whether token steps can be CUDA graphs: with a model, with how it is loaded, and on a card.

Where they cannot, steps run as they are and one warning says why. Who asks for graphs by name
(`enforce_eager=False`) gets an error in place of that, before weights are loaded as far as it is known by then.
"""

import logging
from functools import cache
from typing import Any

import torch

from lowmem_grpo.config.engine import VLLM
from lowmem_grpo.engines.recorded import Recorded
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.memory.families import family_of, has_experts
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.offload.embedding import on_host

logger = logging.getLogger(__name__)
ASKS = ("dynamic", "longrope")  # kinds of RoPE that read the positions on the host
HOST = "its embedding is on the host"
FIX = "leave enforce_eager out, and token steps run without graphs where they must"


def other_cache(config: Any) -> str:
    """Why a model's rows cannot have their cache at fixed addresses; "" where they can."""
    family = family_of(config)
    if family is not None and family.experts is not None and has_experts(config):
        return "its experts' routes are recorded"
    if family is not None and family.delta_net:
        return "the states of its gated delta nets are replaced in each step"
    if family is not None and family.unlike_layers:
        return "its layers lend each other keys"
    return ""


def not_of_model(config: Any) -> str:
    """Why steps of a model of this config cannot be CUDA graphs, on whatever card; "" where they can."""
    if any(kind in ASKS for kind in kinds_of_rope(config.get_text_config())):
        return f"its RoPE ({', '.join(ASKS)}) looks at the positions on the host"
    return other_cache(config)


def not_recorded(policy: Policy) -> str:
    """Why a step of a loaded model cannot be a CUDA graph; "" where it can, as far as is known without trying."""
    if policy.device.type != "cuda":
        return f"the model is on the {policy.device.type}"
    if policy.autocast_dtype is not None:
        return f"mixed precision converts weights in each step (load the model in {policy.autocast_dtype})"
    if on_host(policy.base):
        return HOST
    return not_of_model(policy.base.config)


def kinds_of_rope(config: object) -> set[str]:
    """The kinds of position embedding that a config names, of all its kinds of layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in settings.values() if isinstance(part, dict)]
    return {str(part.get("rope_type", "default")) for part in (nested or [settings])}


def check_graphs(asked: bool | None, engine: str, device: str, config: Any, offloaded: bool) -> None:
    """EngineUnavailableError where `enforce_eager=False` asks our own engine for CUDA graphs that a model of this
    config cannot have on `device`, with its embedding `offloaded` or not. Nothing is loaded for it; a card is tried
    with a graph of one addition. vLLM judges for itself, but for a mixture of experts on a card."""
    if asked is not False:
        return
    if engine == VLLM:
        refuse_graphs("" if device.startswith("cpu") or not has_experts(config) else
                      "how many tokens each expert has is read on the host", FIX)
        return
    refuse_graphs("" if device.startswith("cuda") else f"the model is on the {device}", FIX)
    refuse_graphs(HOST if offloaded else "", "leave enforce_eager or offload_embedding out")
    refuse_graphs(not_of_model(config) or not_on_card(torch.device(device)), FIX)


def refuse_graphs(why: str, fix: str = FIX) -> None:
    """EngineUnavailableError with the reason and what to do; nothing for no reason."""
    if why:
        raise EngineUnavailableError(f"enforce_eager is False, which asks for token steps as CUDA graphs, and {why}; "
                                     f"{fix}")


def not_on_card(device: torch.device) -> str:
    """Why a card, or its driver, records no CUDA graph, by the name of the card; "" where it does. One addition is
    recorded and run. What it gives is not looked at: the first run of each graph of steps is compared."""
    numbers = torch.zeros(8, device=device)
    try:
        with torch.cuda.device(device):
            Recorded(lambda: numbers.add_(1))()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{card_text(device)} records no graph ({first_line(error)})"
    return ""


def card_text(device: torch.device) -> str:
    """The name of a card, its compute capability and the CUDA that torch is built for."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, CUDA {torch.version.cuda})"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@cache
def say_plain(why: str) -> None:
    """Warn once in a process that steps on a card run as they are."""
    logger.warning("token steps run without CUDA graphs, several times slower where rows are few: %s. "
                   "enforce_eager=True says that this is meant", why)
