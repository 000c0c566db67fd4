"""`Usage`: what each user has of the server now, against what their key may have."""

import threading
from collections import Counter, defaultdict
from pathlib import Path

from lowmem_grpo.service.tinker.ledger import PASS, REFUSED, Ledger, ModelRequest, StoredModel
from lowmem_grpo.service.tinker.shelf import Shelf, size_of
from lowmem_grpo.service.users import Allowance, Allowances
from lowmem_grpo.units import size_text

SMALL = 16 * 1024  # bytes of a step or a save, which is taken where bodies are at their limit: it may make room


class BusyError(Exception):
    """Too much waits for its answer; the same request is taken later."""


class Usage:
    """Any thread may use it."""

    def __init__(self, allowances: Allowances | None, ledger: Ledger, shelf: Shelf, folder: Path) -> None:
        """`folder` has the models' states, and the snapshots that samplers name."""
        self.ledger, self.shelf, self.folder = ledger, shelf, folder
        self.allowances = defaultdict(Allowance) if allowances is None else allowances
        self.lock, self.samples = threading.Lock(), Counter[str]()

    def taken(self, asked: ModelRequest, model: StoredModel) -> ModelRequest:
        """Return a request as it is kept; above a limit as one that fails in its turn, or BusyError if room is to
        come."""
        (requests, bodies, is_next), may = self.ledger.open_of(model.owner), self.allowances[model.owner]
        requests += self.samples[model.owner]
        if requests >= may.requests and asked.seq > model.done + 1:
            told = too_many(requests, may.requests)
        elif bodies + len(asked.body) > may.bodies and (asked.kind == PASS or len(asked.body) > SMALL):
            told = (f"bodies: {size_text(bodies)} of this key's requests are kept, and this one has "
                    f"{size_text(len(asked.body))}; at most {size_text(may.bodies)} are: call optim_step, which frees "
                    "them, or send fewer or shorter sequences for a step")
        else:
            return asked
        if is_next:
            raise BusyError(told)
        return ModelRequest(asked.model, asked.seq, REFUSED, told.encode())

    def begin_sample(self, owner: str) -> None:
        """BusyError where no more may wait. Each is to be ended."""
        may = self.allowances[owner].requests
        with self.lock:
            requests = self.ledger.open_of(owner)[0] + self.samples[owner]
            if requests >= may:
                raise BusyError(too_many(requests, may))
            self.samples[owner] += 1

    def end_sample(self, owner: str) -> None:
        with self.lock:
            self.samples[owner] -= 1

    def check_model(self, model: str, owner: str) -> None:
        """ValueError where a user has as many models as they may, and this is another one."""
        have, may = {each.id for each in self.ledger.models(owner)}, self.allowances[owner].models
        if model not in have and len(have) >= may:
            raise ValueError(f"models: this key has {len(have)}, and may have {may}: unload those that are done "
                             "(list_training_runs names them, and POST unload_model unloads one), or close their "
                             "clients, and they make room by themselves")

    def check_storage(self, owner: str, more: int) -> None:
        """ValueError where so many bytes more are not to be written for a user."""
        have, may = self.stored(owner), self.allowances[owner].storage
        if have + more > may:
            raise ValueError(f"storage: this key has {size_text(have)} on the disk, this takes {size_text(more)} more, "
                             f"and {size_text(may)} is the most: delete saved weights (list_user_checkpoints names "
                             "them), or unload models that are done")

    def stored(self, owner: str) -> int:
        states = [self.folder / model.state for model in self.ledger.models(owner) if model.state is not None]
        snapshots = [self.folder / name for name in self.ledger.snapshots(owner)]
        saved = [self.shelf.folder / entry.file for entry in self.shelf.all(owner)]
        return sum(size_of(path) for path in {*states, *snapshots, *saved})


def too_many(requests: int, most: int) -> str:
    return (f"requests: {requests} of this key are not answered, and at most {most} may be: wait for some of them "
            "before you send more")
