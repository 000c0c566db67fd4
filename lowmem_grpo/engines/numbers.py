"""The random numbers of a call of the transformers engine: one for each place of each of its rows."""

import random
from collections import OrderedDict

import torch
from torch import Tensor

STEPS = 256  # places whose numbers are made at once
HELD = 4  # such blocks that are held; one that was dropped is made again, and is the same


class Numbers:
    """Numbers from [0, 1) that depend on a seed, the row and the place, and on nothing that happened before. So a
    completion is the same however its row was batched or interrupted."""

    def __init__(self, seed: int, rows: int, device: torch.device, part: tuple[int, int] | None = None) -> None:
        """`part` (F, N) says that these are the rows from F on of N; their numbers are as in a call with all N."""
        self.seed, self.rows, self.device = seed, rows, device
        self.first, self.whole = part or (0, rows)
        self.blocks: OrderedDict[int, Tensor] = OrderedDict()

    def at(self, rows: Tensor, place: int) -> Tensor:
        """Those of rows (B,) at one place: (B, 1) fp64."""
        return self.block(place // STEPS)[rows, place % STEPS, None]

    def at_each(self, rows: Tensor, places: Tensor) -> Tensor:
        """Those of rows (B,) at places (B, S): (B, S) fp64."""
        found = torch.empty(places.shape, dtype=torch.float64, device=self.device)
        for index in (places // STEPS).unique().tolist():
            here = self.block(index)[rows[:, None], places % STEPS]
            found = torch.where(places // STEPS == index, here, found)
        return found

    def block(self, index: int) -> Tensor:
        """(R, STEPS) fp64: the numbers of all rows in a block of places."""
        if index not in self.blocks:
            seed = random.Random(f"{self.seed}-{index}").getrandbits(62)
            generator = torch.Generator(self.device).manual_seed(seed)
            made = torch.rand(self.whole, STEPS, dtype=torch.float64, device=self.device, generator=generator)
            self.blocks[index] = made[self.first : self.first + self.rows]
        self.blocks.move_to_end(index)
        while len(self.blocks) > HELD:
            self.blocks.popitem(last=False)
        return self.blocks[index]
