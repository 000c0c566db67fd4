"""Run one provider's steps of the whole loop, in a process that bench/common/child.py starts.

It also runs in a peer's environment, so only a provider's own file imports what that provider needs.
"""

import math
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.loop.inputs import GIB, PackageModel, Patience, RandomModel, loop_shape
from bench.loop.phase_watch import PhaseWatch

RUNNERS = {  # provider -> its module, function and options
    "lowmem_grpo": ("bench.loop.ours", "run", {"engine": "vllm"}),
    "lowmem_grpo_transformers": ("bench.loop.ours", "run", {"engine": "transformers"}),
    "lowmem_grpo_16bit": ("bench.loop.ours", "run", {"engine": "transformers", "sampling_weights": "16bit"}),
    "trl": ("bench.loop.peers", "run_trl", {"use_vllm": True, "four_bit": False}),
    "trl_nf4": ("bench.loop.peers", "run_trl", {"use_vllm": True, "four_bit": True}),
    "trl_transformers": ("bench.loop.peers", "run_trl", {"use_vllm": False, "four_bit": False}),
    "unsloth": ("bench.loop.peers", "run_unsloth", {}),
}

DEFAULTS = {"problems": None, "prompts": 1, "warm_up": 1, "batch": None, "gib": None, "time_limit": math.inf,
            "loss_type": "dapo"}


def cap_memory(gib: float | None, device: str) -> None:
    """Limit the memory that torch may use on the card."""
    if gib and device != "cpu":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))


def run(**given: Any) -> dict[str, Any]:
    """Run a `provider` with the model in `folder` on a `device`: with random weights of a `shape`, or the model in the
    package with `problems` (jsonl, `prompt` and `answer`). Return its timed `steps`, and how many warmed up."""
    options = SimpleNamespace(**DEFAULTS | given)
    options.work = (PackageModel(Path(options.problems), options.device) if options.problems
                    else RandomModel(loop_shape(options.shape, options.prompts)))
    options.folder, options.all_steps = Path(options.folder), options.steps + options.warm_up
    options.patience = Patience(options.time_limit)
    module, function, settings = RUNNERS[options.provider]
    watch = PhaseWatch(options.device)
    try:
        cap_memory(options.gib, options.device)
        with tempfile.TemporaryDirectory() as outputs:
            found = getattr(import_module(module), function)(options, watch, outputs, **settings)
    finally:
        watch.close()
    timed = watch.steps[options.warm_up :] or watch.steps  # all if there was no time for another step
    return {"steps": timed, "warm_up": len(watch.steps) - len(timed), "peak_bytes": watch.peak(), **found}
