"""`Ranks`: the processes of a run over torch.distributed. Each process has the whole model and a card, and samples,
scores and trains a share of a step's groups. Gradients are summed, so all processes hold the same state. The process
groups are made here because vLLM makes the default group for its own process alone, and destroys it."""

import hashlib
import json
import logging
import pickle
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lowmem_grpo import __version__
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.launcher import Place, balanced, this_place
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.models.card_check import LARGER
from lowmem_grpo.models.fp8_layers import form_in_fp8
from lowmem_grpo.runs.checkpoint_state import adapter_tensors, version
from lowmem_grpo.trainer.rendezvous import Heartbeat, RankError, find_others
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)
T = TypeVar("T")
CONNECT, FOREVER = timedelta(seconds=30), timedelta(days=365)  # limits; the heartbeat ends a transfer without a partner
PAUSE, WIDTH, NAME = 0.001, 2048, 100  # seconds between two polls; bytes of `meet`'s message, characters of its name
SLOW, STEPS = 1.5, 3  # a rank is slow if it takes SLOW times the other ranks' median, for STEPS steps in a row
PACKAGES = ("transformers", "peft", "bitsandbytes", "vllm", "triton")  # their versions must be the same in all ranks
OWN = ("card", "card_bytes", "processor")  # entries that may differ from rank to rank
ROWS = 8  # rows that are compared, spread from the first to the last


class Ranks:
    """The collective operations of a run's processes. All processes must call the same operations in the same order,
    or RankError is raised. With a single process nothing is exchanged."""

    def __init__(self, place: Place | None = None, store: Any = None, **pace: float) -> None:
        """`store` is torch's store, which all processes can reach; `pace` has the arguments of `Heartbeat`."""
        self.place = place or Place()
        self.rank, self.count, self.leads, self.here = self.place.rank, self.place.count, self.place.leads, 1
        self.slow: dict[int, int] = {}  # steps in a row in which a rank was slow
        self.waited = 0.0  # seconds spent waiting for other ranks, since the last step's metrics
        self.store, self.card_group = store, cast(Any, None)
        if self.count > 1:
            self.heartbeat = Heartbeat(store, self.place, **pace)
            self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("data", store), self.rank, self.count, CONNECT)
            self.group.set_timeout(FOREVER)
            machines = self.gather("the start", platform.node())
            self.here = machines.count(machines[self.rank])

    def mine(self, things: Sequence[T], cost: Callable[[T], float]) -> list[T]:
        """Return this rank's share of things that all ranks hold, in order; all shares cost about the same."""
        return list(things) if self.count == 1 else balanced(things, cost, self.count)[self.rank]

    def gather(self, what: str, own: T) -> list[T]:
        """Return the `own` of all processes in rank order (pickled for the transfer); errors call it `what`."""
        if self.count == 1:
            return [own]
        data = pickle.dumps(own)
        parts = self.exchange(what, data, max(self.meet(what, len(data))))
        return [own if rank == self.rank else pickle.loads(part)  # noqa: S301 - our own pickle; it ignores the padding
                for rank, part in enumerate(parts)]

    def first(self, what: str, make: Callable[[], T]) -> T:
        """Call `make` in the first process, and return its result in all of them."""
        return self.gather(what, make() if self.leads else None)[0]  # type: ignore[return-value] # it made one

    def meet(self, what: str, size: int = 0) -> list[int]:
        """Wait until all processes have reached `what`; return each one's `size`. A process may exit after this."""
        if self.count == 1:
            return [size]
        began, what = time.monotonic(), what[:NAME]
        words = self.exchange(what, json.dumps([what, size]).encode(), WIDTH)
        self.waited += time.monotonic() - began
        told = [json.loads(word.rstrip(b"\0")) for word in words]
        for rank, (name, _) in enumerate(told):
            if name != what:
                self.heartbeat.broken = (
                    f"rank {rank} has come to {name!r}, and rank {self.rank} to {what!r}: their programs do not do the "
                    "same; run one program with one set of settings in all of them")
                self.heartbeat.check(began)
        return [size for _, size in told]

    def exchange(self, what: str, data: bytes, size: int) -> list[bytes]:
        """Return the data of each process, padded to `size` bytes."""
        sent = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        held = [torch.empty_like(sent) for _ in range(self.count)]
        self.finish(what, self.group.allgather([held], [sent]))
        return [part.numpy().tobytes() for part in held]

    def finish(self, what: str, work: Any) -> None:
        """Wait for a transfer; raise RankError if it breaks off."""
        began = time.monotonic()
        try:
            while not work.is_completed():
                self.heartbeat.check(began)
                time.sleep(PAUSE)
            work.wait()
        except RuntimeError as error:
            for group in {self.group, self.card_group or self.group}:
                group.abort()  # else the process would wait for this transfer when it exits
            if isinstance(error, RankError):
                raise
            self.heartbeat.explain(what, error)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all processes, computed in fp32, or in fp64 if any parameter is fp64.
        A parameter that has a gradient in one process has a gradient in all processes afterwards."""
        if self.count == 1:
            return
        group, device = self.reducer(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        totals = self.meet("the gradients", sum(sizes))
        if len(set(totals)) > 1:
            raise RankError(f"the ranks train different numbers of parameters: {', '.join(map(str, totals))}; "
                            "give LoRA the same rank and the same modules in all of them")
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        flat = torch.zeros(totals[0] + len(sizes), dtype=dtype, device=device)  # at the end: which have a gradient
        *views, counts = flat.split([*sizes, len(sizes)])
        for place, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad.flatten())
                counts[place] = 1
        self.finish("the gradients", group.allreduce([flat]))
        for parameter, view, count in zip(parameters, views, counts.tolist(), strict=True):
            if count:
                parameter.grad = (torch.empty_like(parameter) if parameter.grad is None else parameter.grad).copy_(
                    view.view_as(parameter))

    def reducer(self, parameters: Sequence[nn.Parameter]) -> tuple[Any, torch.device]:
        """Return the group that sums gradients and its device: NCCL if each process has its own GPU, else Gloo."""
        device = parameters[0].device
        if self.card_group is None:
            cards = self.gather("their cards", card_of(device))
            self.card_group = self.group
            if dist.is_nccl_available() and None not in cards and len(set(cards)) == self.count:
                self.card_group = dist.ProcessGroupNCCL(
                    dist.PrefixStore("cards", self.store), self.rank, self.count, dist.ProcessGroupNCCL.Options())
                self.card_group.set_timeout(FOREVER)
        return self.card_group, torch.device("cpu") if self.card_group is self.group else device

    def metrics(self, step_time: float, own: dict[str, float]) -> dict[str, float]:
        """Return the step's `own` metrics of all ranks, and their waiting and busy seconds, named ranks/RANK/NAME."""
        if self.count == 1:
            return {}
        waited, self.waited = self.waited, 0.0
        told = self.gather("how a step went", own | {"waiting_s": waited, "busy_s": max(step_time - waited, 0.0)})
        self.warn_of_slow([measured["busy_s"] for measured in told])
        return {f"ranks/{rank}/{name}": value for rank, part in enumerate(told) for name, value in part.items()}

    def warn_of_slow(self, busy: list[float]) -> None:
        """Warn, once for each rank, of a rank that is slower than the others for several steps in a row."""
        for rank, seconds in enumerate(busy):
            others = median(busy[:rank] + busy[rank + 1 :])
            steps = self.slow.get(rank, 0)
            self.slow[rank] = steps + 1 if seconds > SLOW * others > 0 or steps >= STEPS else 0
            if self.slow[rank] == STEPS:
                logger.warning(
                    "rank %d takes %.1f times as long as the others, which wait for it in each step: its card or its "
                    "machine is slower, or busy with something else. All ranks get as many prompts, and train as many "
                    "tokens; with cards of one kind none waits", rank, seconds / others)

    def seed(self, seed: int, step: int) -> None:
        """Seed this process from seed, step and rank, so that checkpoints need not store every rank's random state."""
        if self.count > 1:
            own = random.Random(f"{seed}-{step}-{self.rank}").getrandbits(31)
            random.seed(own)
            np.random.seed(own)
            torch.manual_seed(own)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error raised in this context to the other processes, so that the run ends in all of them."""
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                self.heartbeat.fail(error)
            raise


def card_of(device: torch.device) -> str | None:
    """Return the UUID of a GPU; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def ranks() -> Ranks:
    """Return the ranks of this run. The first call joins them, and raises ValueError or RankError if that fails."""
    return joined(this_place())


@cache
def joined(place: Place) -> Ranks:
    return Ranks(place, find_others(place) if place.count > 1 else None)


def check_settings(config: Any, count: int, samples: bool = True) -> None:
    """Raise ValueError for settings that need a single process, or for a step with fewer prompts than ranks."""
    if count > 1 and (mode := getattr(config, "train_while_sampling", None)):
        raise ValueError(f"train_while_sampling is {mode!r}, and the run has {count} processes: a rank trains other "
                         "groups than it has sampled; leave it out")
    prompts = config.prompts_per_generation if isinstance(config, GRPOConfig) else config.batch_size
    if samples and prompts < count > 1:
        raise ValueError(f"a step has {prompts} prompts, and the run has {count} processes, each of which takes whole "
                         "prompts: raise per_device_train_batch_size or gradient_accumulation_steps, or start fewer")


def check_ranks_agree(trainer: Any) -> None:
    """Raise ValueError if the processes differ in settings, data or versions, or if two local ranks share a GPU."""
    if trainer.ranks.count == 1:
        return
    told = trainer.ranks.gather("what the ranks are", described(trainer))
    device = trainer.policy.device
    cards = trainer.ranks.gather("their cards", (card_of(device), trainer.ranks.place.local,
                                                 describe_machine(trainer.model, device)["card_bytes"] or 0))
    sizes = [size for *_, size in cards]
    if trainer.ranks.place.leads and max(sizes) > LARGER * min(sizes):
        logger.warning("the ranks have cards of different size (%s): each plans its own memory, but all get as many "
                       "prompts and wait for the slowest. Cards of one kind would not wait; CUDA_VISIBLE_DEVICES names "
                       "those to use", ", ".join(map(size_text, sizes)))
    for card in {card for card, *_ in cards if card is not None}:
        on_it = {rank: local for rank, (other, local, _) in enumerate(cards) if other == card}
        if len(set(on_it.values())) > 1:
            raise ValueError(f"the ranks {' and '.join(map(str, on_it))} are on one card ({card}), and each takes a "
                             "card of its own: start them with `torchrun --nproc-per-node N -m lowmem_grpo run "
                             "RECIPE`, or let each see only its card (CUDA_VISIBLE_DEVICES) before torch is imported")
    if differing := [name for name in told[0] if len({str(each[name]) for each in told}) > 1]:
        lines = "; ".join(f"{name} is " + " and ".join(
            f"{value} (rank {', '.join(str(rank) for rank, each in enumerate(told) if str(each[name]) == value)})"
            for value in dict.fromkeys(str(each[name]) for each in told)) for name in differing)
        raise ValueError(f"the ranks are not alike: {lines}. Start all of them with the same program, versions, "
                         "settings, model and rows")


def described(trainer: Any) -> dict[str, Any]:
    """Return, as plain values, the properties of a run that must be the same in all processes."""
    model, rows = trainer.model, trainer.source.dataset
    known = describe_machine(model, trainer.policy.device)
    return {
        **{f"the version of {name}": version(name) for name in PACKAGES},
        **{f"the setting {name}": value for name, value in trainer.args.to_dict().items()},
        **{name.replace("_", " "): value for name, value in known.items() if name not in OWN},
        "the device": trainer.policy.device.type, "the model": model.loaded.name,
        "the model's config": digest(model.get_base_model().config.to_json_string().encode()),
        "the adapter's weights": digest(*(held.detach().cpu().float().numpy().tobytes()
                                          for held in adapter_tensors(model).values())),
        "the rows": digest_of_rows(rows),
        "the rewards": list(trainer.rewards),
    }


def digest_of_rows(rows: Any) -> str:
    """Return the number of rows and a short hash of some of them; "a stream" for a stream."""
    if isinstance(rows, Stream) or not len(rows):
        return "a stream" if isinstance(rows, Stream) else "none"
    some = [rows[place] for place in sorted({n * (len(rows) - 1) // (ROWS - 1) for n in range(ROWS)})]
    return f"{len(rows)} ({digest(json.dumps(some, default=str).encode())})"


def digest(*parts: bytes) -> str:
    """Return a short hash of the bytes."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def describe_machine(model: Any, device: torch.device) -> dict[str, Any]:
    """Return a PEFT model's numbers of parameters, the GPU and its bytes, the processor, and the versions."""
    trainable, whole = model.get_nb_trainable_parameters()  # peft counts each weight in packed 4-bit tensors
    on_card, base = device.type == "cuda", model.get_base_model()
    dtype = str(base.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return {"parameters": whole - trainable, "trainable_parameters": trainable,
            "weights": "4-bit" if getattr(base, "is_loaded_in_4bit", False) else "FP8" if form_in_fp8(base) else dtype,
            "card": torch.cuda.get_device_name(device) if on_card else None,
            "card_bytes": torch.cuda.get_device_properties(device).total_memory if on_card else None,
            "processor": cpu_model(), "version": __version__, "torch": torch.__version__}


def cpu_model() -> str:
    """Return the processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
