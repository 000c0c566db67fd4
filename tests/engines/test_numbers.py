"""Random numbers of rows and places: the same in whatever order they are asked for."""

import torch

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import draw
from lowmem_grpo.engines.generation_state import HELD, STEPS, RandomNumbers


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


def test_a_hundred_thousand_tokens_after_right_and_wrong_guesses_follow_the_models_distribution() -> None:
    rows, logits = 100_000, torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 2.0])
    places = torch.arange(3).expand(rows, 3)
    uniforms = RandomNumbers(11, rows, torch.device("cpu")).at(torch.arange(rows), places)
    tokens, _ = draw(logits.expand(3 * rows, -1).clone(), SamplingParams(), uniforms.reshape(-1, 1))
    first, second, _ = tokens.view(rows, 3).T
    for guess in (5, 1):  # the likeliest token, and another
        after = second[first == guess]
        for seen in (first, after):
            expected = logits.softmax(-1).double() * len(seen)
            chi = ((torch.bincount(seen, minlength=6) - expected) ** 2 / expected).sum()
            assert chi < 20.5, "5 degrees of freedom: one of a thousand tries is above"
