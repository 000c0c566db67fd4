"""The one vLLM engine that a process can have: which is open, how it ends, and the state of vLLM's memory pool."""

import gc
import logging
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from lowmem_grpo.engines.vllm import pool as vllm_pool
from lowmem_grpo.engines.vllm.installed import EngineUnavailableError
from lowmem_grpo.engines.vllm.loan import Loan

logger = logging.getLogger(__name__)


class Open(Protocol):
    """An engine, as far as its end is concerned."""

    llm: Any  # vLLM's; None once it is closed


@dataclass
class Process:
    """What a process has one of."""

    engine: "weakref.ref[Open] | None" = None  # the one that is open
    clean: bool = True  # whether vLLM's memory pool can serve another engine as it is


PROCESS = Process()


def living() -> Any:
    """The open VLLMEngine of this process, or None."""
    engine = None if PROCESS.engine is None else PROCESS.engine()
    return engine if engine is not None and engine.llm is not None else None


def check_alone() -> None:
    """Raise EngineUnavailableError where another engine is open."""
    if living() is not None:
        gc.collect()  # it may be unreachable already
    if living() is not None:
        raise EngineUnavailableError("a vLLM engine lives in this process already; close() it first")


def end(llm: Any, loan: Loan) -> None:
    """Shut vLLM down and return the trainer's tensors; also when an engine is deleted without `close`. A sleeping cache
    is unmapped already, and the pool fails if it unmaps it again, so we wake it first where memory has room."""
    loan.close()
    try:
        PROCESS.clean = vllm_pool.woken(llm)
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001 - a dead engine may fail in any way, and has to go all the same
        PROCESS.clean = False
        logger.warning("vLLM's engine did not end cleanly (%s: %s)", type(error).__name__, error)
