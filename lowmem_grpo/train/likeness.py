"""Before a run in several processes: whether all of them have the same versions, settings, model and rows."""

import hashlib
import json
from typing import Any

import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.runs.checkpoint_state import adapter_tensors, version
from lowmem_grpo.runs.summary import facts

PACKAGES = ("lowmem_grpo", "torch", "transformers", "peft", "bitsandbytes", "vllm", "triton")
SHARED = ("the ranks {ranks} are on one card ({card}), and each takes a card of its own: start them with `torchrun "
          "--nproc-per-node N -m lowmem_grpo run RECIPE`, or let each see only its card (CUDA_VISIBLE_DEVICES) before "
          "torch is imported")
OWN = ("card", "card_bytes", "processor")  # of each machine, and free to differ
ROWS = 8  # that are compared, from the first to the last
ONE_PROCESS = {  # settings that need one process, and what to do
    "train_while_sampling": "a rank trains other groups than it has sampled; leave it out",
}


def check_alike(trainer: Any) -> None:
    """ValueError where the processes of a run would not do the same, or could not share its work. In one process
    nothing is looked at."""
    if trainer.ranks.count == 1:
        return
    told = trainer.ranks.gather("what the ranks are", described(trainer))
    check_cards(trainer.ranks.gather("their cards", card_of(trainer.policy.device, trainer.ranks.place.local)))
    different = [name for name in told[0] if any(one[name] != told[0][name] for one in told)]
    if different:
        lines = "; ".join(line(name, [one[name] for one in told]) for name in different)
        raise ValueError(f"the ranks are not alike: {lines}. Start all of them with the same program, versions, "
                         "settings, model and rows")


def check_settings(config: Any, count: int, samples: bool = True) -> None:
    """ValueError for settings that need one process, and for a step with fewer prompts than there are ranks, where the
    trainer takes prompts."""
    if count == 1:
        return
    for name, why in ONE_PROCESS.items():
        if getattr(config, name, None):
            raise ValueError(f"{name} is {getattr(config, name)!r}, and the run has {count} processes: {why}")
    prompts = config.prompts_per_generation if isinstance(config, GRPOConfig) else config.batch_size
    if samples and prompts < count:
        raise ValueError(f"a step has {prompts} prompts, and the run has {count} processes, each of which takes whole "
                         "prompts: raise per_device_train_batch_size or gradient_accumulation_steps, or start fewer")


def card_of(device: torch.device, local: int) -> tuple[str, int] | None:
    """The identity of this process's card, and its place on its machine; None on a processor."""
    return (str(torch.cuda.get_device_properties(device).uuid), local) if device.type == "cuda" else None


def check_cards(cards: list[tuple[str, int] | None]) -> None:
    """ValueError where processes with different places on a machine are on one card: only those that were told to have
    the same place share one."""
    for rank, card in enumerate(cards):
        others = [other for other, same in enumerate(cards[:rank]) if card and same and same[0] == card[0]
                  and same[1] != card[1]]
        if card and others:
            raise ValueError(SHARED.format(ranks=f"{others[0]} and {rank}", card=card[0]))


def described(trainer: Any) -> dict[str, Any]:
    """What must be the same in all processes, in plain values."""
    model = trainer.model
    found = facts(model, trainer.policy.device)
    return {
        **{f"the version of {name}": version(name) for name in PACKAGES},
        **{f"the setting {name}": value for name, value in trainer.args.to_dict().items()},
        **{name.replace("_", " "): value for name, value in found.items() if name not in OWN},
        "the device": trainer.policy.device.type, "the model": model.loaded.name,
        "the model's config": digest(model.get_base_model().config.to_json_string()),
        "the adapter's weights": digest(*(held.detach().cpu().float().numpy().tobytes()
                                          for held in adapter_tensors(model).values())),
        "the rows": rows_of(trainer.source.dataset),
        "the rewards": [] if trainer.scorer is None else trainer.scorer.names,
    }


def rows_of(dataset: Any) -> str:
    """The number of rows, and a sum over some of them; of a stream, which cannot be looked at, only that it is one."""
    if isinstance(dataset, Stream):
        return "a stream"
    places = sorted({place * (len(dataset) - 1) // (ROWS - 1) for place in range(ROWS)})
    return f"{len(dataset)} ({digest(json.dumps([dataset[place] for place in places], default=str))})"


def digest(*parts: Any) -> str:
    """A short sum over texts and bytes."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:12]


def line(name: str, values: list[Any]) -> str:
    """A difference in words: each value, and which ranks have it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    return f"{name} is " + " and ".join(f"{value} (rank {', '.join(which)})" for value, which in ranks.items())
