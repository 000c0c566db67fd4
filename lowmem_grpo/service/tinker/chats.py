"""`Chats`: what each user can talk to over OpenAI's routes: the base model, and the adapters that they saved."""

import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.histories import Histories
from lowmem_grpo.service.tinker.ledger import UnknownError
from lowmem_grpo.service.tinker.shelf import SAMPLING, TRAINING, Shelf
from lowmem_grpo.service.users import User

SCHEME = "tinker://"


class SavedModels(Mapping[str, Path | str | None]):
    """The models of a user by their names: that of the base model, and RUN@NAME of what was saved to sample with.

    What the protocol calls such weights, tinker://RUN/sampler_weights/NAME, is another name of the same. It reads what
    is on the shelf at each call.
    """

    def __init__(self, base: str, shelf: Shelf, owner: str) -> None:
        self.base, self.shelf, self.owner = base, shelf, owner

    def __getitem__(self, name: str) -> Path | None:
        """The folder of an adapter; None is the base model. ChatError for weights that were saved to train on."""
        if name == self.base:
            return None
        for kind in (SAMPLING, TRAINING):
            try:
                saved = self.shelf.find(path_of(name, kind), self.owner)
            except UnknownError:
                continue
            if saved.kind == TRAINING:
                raise ChatError(400, f"{name} was saved to train on; save_weights_for_sampler saves what to sample "
                                     "with", "model")
            return self.shelf.folder / saved.file
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield self.base
        for saved in self.shelf.all(self.owner):
            if saved.kind == SAMPLING:
                yield f"{saved.model}@{saved.path.rpartition('/')[2]}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Chats:
    """A Chat for each user, over one desk: nothing that one of them said is known to another."""

    def __init__(self, desk: Desk, shelf: Shelf, base: str) -> None:
        self.desk, self.shelf, self.base = desk, shelf, base
        self.lock, self.keys = threading.Lock(), itertools.count()  # a key for each conversation in the engine
        self.made: dict[str, Chat] = {}

    def __call__(self, user: User) -> Chat:
        with self.lock:
            if user.name not in self.made:
                tokenizer = self.desk.tokenizer
                self.made[user.name] = Chat(self.desk, tokenizer, lambda: SavedModels(self.base, self.shelf, user.name),
                                            histories=Histories(tokenizer, keys=self.keys))
            return self.made[user.name]


def path_of(name: str, kind: str) -> str:
    """Return the protocol's path of the weights behind a model's name."""
    if name.startswith(SCHEME):
        return name
    run, _, saved = name.rpartition("@")
    return f"{SCHEME}{run}/{kind}/{saved}"
