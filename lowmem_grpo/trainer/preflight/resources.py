"""Checks of disk space, host memory and GPU memory, the estimated time, and a description of the machine."""

import math
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lowmem_grpo import __version__
from lowmem_grpo.memory.cards import in_8_bits
from lowmem_grpo.memory.layer_forms import BITS_16, NF4
from lowmem_grpo.memory.offload.pages import SPARE, available_host_bytes
from lowmem_grpo.memory.plan import COMPLETION_SHARE, OPTIMIZER_BYTES, Workload
from lowmem_grpo.models.card_check import has_managed_memory, is_bfloat16_supported
from lowmem_grpo.models.quantized_linear import form_of
from lowmem_grpo.models.trained_set import TrainedWeight
from lowmem_grpo.runs.checkpoint_state import adapter_tensors
from lowmem_grpo.runs.files import existing, folder_fault, free_bytes
from lowmem_grpo.runs.saved_adapter import list_checkpoints
from lowmem_grpo.trainer.preflight.subject import Subject
from lowmem_grpo.trainer.run_memory import PlannedTime
from lowmem_grpo.types import Finding
from lowmem_grpo.utils import size_text, time_text

# Bytes in completions.jsonl of a completion, and of each of its rewards, tokens, and turns.
LINE_BYTES, REWARD_BYTES, TOKEN_BYTES, TURN_BYTES = 300, 40, 5, 200


def unwritable(subject: Subject) -> Iterator[Finding]:
    """Find an `output_dir` that cannot be made or written to. The check itself writes nothing."""
    if fault := folder_fault(subject.run_dir):
        yield Finding("error", "", *fault)


def full_disk(subject: Subject) -> Iterator[Finding]:
    """Find a disk without room for the checkpoints and completions.jsonl. It is an error if not even one checkpoint
    fits."""
    place, free = existing(subject.run_dir), free_bytes(subject.run_dir)
    if not place.is_dir() or free is None:
        return
    each, copies, texts = checkpoint_bytes(subject), copies_to_come(subject), completion_bytes(subject)
    first, all_of_them, fix = "the adapter needs", "the adapter needs", "free some space, or choose another output_dir"
    if subject.args.save_strategy != "no":
        first, all_of_them = "one checkpoint needs", f"{copies} checkpoints need"
        fix += ", or lower save_total_limit"
    if free < each:
        yield Finding("error", "", f"{place} has {size_text(free)} free, but {first} {size_text(each)}", fix)
    elif free < copies * each + texts:
        yield Finding("warning", "", f"{place} has {size_text(free)} free; {all_of_them} {size_text(copies * each)}, "
                      f"and completions.jsonl up to {size_text(texts)}", fix)


def little_host_memory(subject: Subject) -> Iterator[Finding]:
    """Find a GPU run whose offloaded layer inputs and paged optimizer states may fill the host's memory."""
    on_card = subject.policy.device.type == "cuda"
    lora = [weight for weight in subject.policy.trained if not weight.group]  # whole matrices' states stay
    paged = optimizer_bytes(subject, lora) if "paged" in subject.args.optim and on_card else 0
    needed = paged if subject.plan is None else subject.plan.host  # in a plan, with the states that are paged
    available = available_host_bytes()
    if needed and available is not None and available - needed < SPARE:
        yield Finding("warning", "", f"the host has {size_text(available)} of free memory, and layer inputs and "
                      f"optimizer states may take {size_text(needed)} of it", "lower max_tokens_per_micro_batch, free "
                      'host memory, or set use_gradient_checkpointing=True or optim="adamw_8bit", which keep them on '
                      "the card")


def unshared_memory(subject: Subject) -> Iterator[Finding]:
    """Find a paged optimizer on a GPU without managed memory, where bitsandbytes would end the process."""
    device = subject.policy.device
    if "paged" in subject.args.optim and device.type == "cuda" and not has_managed_memory(device.index or 0):
        yield Finding("error", "", f"optim={subject.args.optim!r} needs managed memory, which host and card share, but "
                      "the driver here does not offer it (as in some WSL and on virtual GPUs)",
                      'use optim="adamw_8bit", which keeps the optimizer states on the card')


def over_plan(subject: Subject) -> Iterator[Finding]:
    """Find a run whose estimated GPU memory is more than the run may use. The run may still work."""
    plan = subject.plan
    if plan is None or plan.fits:
        return
    phase = "train" if plan.train > plan.device.budget else "rollout"
    settings = subject.memory.advice.settings.get(phase, [])
    yield Finding("warning", "", f"the plan expects {size_text(plan.peak)} on the card, which is more than the "
                  f"{size_text(plan.device.budget)} that the run may use: {'; '.join(plan.advice)}. The run goes on, "
                  "since plans are estimates", f"try {'; '.join(settings) or 'a shorter context'}")


def emulated_dtype(subject: Subject) -> Iterator[Finding]:
    """Find a run that computes in bfloat16 on a GPU that only emulates bfloat16."""
    dtypes = (subject.policy.autocast_dtype, subject.policy.dtype)
    if subject.policy.device.type == "cuda" and torch.bfloat16 in dtypes and not is_bfloat16_supported():
        yield Finding("warning", "", "the run computes in bfloat16, which this card only emulates", "load the model "
                      "with dtype=None or torch.float16, which is trained with a loss scale")


def cache_in_8_bits(subject: Subject) -> Iterator[Finding]:
    """Find an 8-bit KV cache of vLLM whose effect on samples may stay uncorrected. It is corrected with
    `vllm_importance_sampling_correction=True`, and with None if `parity_steps` measures it."""
    if not in_8_bits(subject.cache_dtype):
        return
    args, name = subject.args, f"the key-value cache is in 8 bits ({subject.cache_dtype})"
    if args.vllm_importance_sampling_correction is False:
        yield Finding("warning", "", f"{name}, so the sampler's log-probabilities differ from the trainer's, and "
                      "vllm_importance_sampling_correction=False corrects nothing",
                      "leave that out (tokens are then weighted if the difference is large), or set it to True")
    elif args.vllm_importance_sampling_correction is None and not args.parity_steps:
        yield Finding("warning", "", f"{name}, and with parity_steps=0 the difference between the sampler's and the "
                      "trainer's log-probabilities is measured in training only, and not with LoRA dropout, so it may "
                      "stay uncorrected", "set parity_steps, or vllm_importance_sampling_correction=True")


def how_long(subject: Subject) -> str | None:
    """Return one line with the run's estimated time; None on the CPU, on an unknown card, and in fine-tuning."""
    args, lengths = subject.args, [looked.tokens for looked in subject.sample.fitting]
    if not subject.does_sampling or not lengths or subject.plan is None:
        return None
    longest, updates = args.max_completion_length, args.optimizer_steps_per_generation * args.num_iterations
    mean = max(1.0, COMPLETION_SHARE * longest)  # a guess
    time = PlannedTime(subject.plan, subject.policy.base.config).plan_step(Workload(
        args.prompts_per_generation, args.num_generations, max(1.0, fmean(lengths)), mean, longest,
        args.num_iterations, updates, subject.passes(updates)))
    if time is None or not time.step_seconds:
        return None
    generate, train = ((part or 0.0) / time.step_seconds for part in (time.generate_seconds, time.train_seconds))
    each, steps = time.step_seconds / updates, subject.state.max_steps - subject.state.global_step
    return (f"estimated, not measured: {time_text(each)} a step on {time.card} (sampling {generate:.0%}, training "
            f"{train:.0%}), so {time_text(each * steps)} for {steps} steps, if completions average {mean:.0f} of at "
            f"most {longest} tokens; after the second step the measured time follows")


def beside_lora(subject: Subject) -> str | None:
    """Return one line with what is trained of embedding and head, and the bytes that it takes; None for LoRA alone."""
    trained = subject.policy.trained
    beside = [weight for weight in trained if weight.group]
    sizes = sum(weight.parameter.nbytes for weight in beside), optimizer_bytes(subject, beside), adapter_bytes(subject)
    size, states, file = map(size_text, sizes)
    return (f"trained beside LoRA: {' and '.join(trained.modules)}, with {size} of weights, as much of gradients, and "
            f"{states} of optimizer states; the adapter's file takes {file}") if beside else None


def optimizer_bytes(subject: Subject, some: Iterable[TrainedWeight] | None = None) -> int:
    """Return the bytes of the optimizer's states, of all or of some weights."""
    numbers = sum(weight.parameter.numel() for weight in (subject.policy.trained if some is None else some))
    return int(numbers * OPTIMIZER_BYTES[subject.args.optim])


def adapter_bytes(subject: Subject) -> int:
    """Return the bytes of the adapter's file, where PEFT writes a tied matrix under both of its names."""
    model: Any = subject.policy.model
    return sum(int(tensor.nbytes) for tensor in adapter_tensors(model).values())


def checkpoint_bytes(subject: Subject) -> int:
    """Return the bytes of a checkpoint (adapters and optimizer), or of the adapter alone if none are saved."""
    adapter = adapter_bytes(subject)
    if subject.args.save_strategy == "no":
        return adapter
    kept = (value.nbytes for values in subject.policy.kept_adapters.values() for value in values.values())
    return adapter + sum(kept) + optimizer_bytes(subject)


def copies_to_come(subject: Subject) -> int:
    """Return how many checkpoints may be added to those on disk. The disk may hold two more than `save_total_limit`: a
    new one is written before the oldest is deleted, and the best is kept."""
    if subject.args.save_strategy == "no":
        return 1
    left = max(subject.state.max_steps - subject.state.global_step, 0)
    by_epoch = subject.args.save_strategy == "epoch"
    to_come = subject.state.num_train_epochs if by_epoch else math.ceil(left / subject.args.save_steps)
    if subject.args.save_total_limit is None:
        return to_come
    kept = subject.args.save_total_limit + 2 - len(list_checkpoints(subject.run_dir))
    return max(1, min(to_come, kept))


def completion_bytes(subject: Subject) -> int:
    """Return the bytes of completions.jsonl if every completion has `max_completion_length` tokens."""
    if not subject.does_sampling:
        return 0
    args, prompts = subject.args, [len(looked.prompt.text) for looked in subject.sample.usable if looked.prompt]
    rollouts = max(subject.state.max_steps - subject.state.global_step, 0) / args.steps_per_rollout
    count = math.ceil(rollouts) * args.prompts_per_generation * args.num_generations
    line = LINE_BYTES + REWARD_BYTES * len(subject.rewards) + TOKEN_BYTES * args.max_completion_length
    line += TURN_BYTES * (args.turn_limit or 0)
    return int(count * (line + sum(prompts) / max(len(prompts), 1)))


def describe_machine(model: Any, device: torch.device) -> dict[str, Any]:
    """Return a PEFT model's numbers of parameters, the GPU and its bytes, the processor, and the versions."""
    trainable, whole = model.get_nb_trainable_parameters()  # peft counts each weight in packed 4-bit tensors
    base, card = model.get_base_model(), torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    embedding = base.get_input_embeddings()
    dtype = str(getattr(embedding, "original_module", embedding).weight.dtype).removeprefix("torch.")
    return {"parameters": whole - trainable, "trainable_parameters": trainable,
            "weights": {NF4: "4-bit", BITS_16: dtype}.get(form_of(base), form_of(base).upper()),
            "card": card and card.name, "card_bytes": card and card.total_memory,
            "processor": cpu_model(), "version": __version__, "torch": torch.__version__}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:(.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    return name[1].strip() if name else platform.processor()
