"""Random numbers of rows and places: the same in whatever order they are asked for."""

import torch

from lowmem_grpo.engines.decoding import HELD, STEPS, RandomNumbers


def test_a_number_depends_on_its_row_and_its_place_only() -> None:
    rows = torch.tensor([0, 3, 4])
    places = torch.tensor([[0, STEPS], [5, 6], [STEPS - 1, 2 * STEPS]])
    numbers = RandomNumbers(7, 5, torch.device("cpu"))
    found = numbers.at(rows, places)
    for place in range(0, (HELD + 3) * STEPS, STEPS):  # the first blocks are dropped
        numbers.at(rows, torch.full((3, 1), place))
    for row in range(3):
        for step in range(2):
            again = numbers.at(rows[row : row + 1], places[row : row + 1, step : step + 1])
            assert found[row, step] == again
    assert len(numbers.blocks) <= HELD


def test_numbers_differ_between_seeds_rows_and_places() -> None:
    rows = torch.arange(8)
    drawn = torch.cat([RandomNumbers(seed, 8, torch.device("cpu")).at(rows, torch.tensor([[0, 1, STEPS]]).expand(8, 3))
                       for seed in (1, 2)])
    assert len(drawn.unique()) == drawn.numel()
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
