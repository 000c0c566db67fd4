"""How work is divided among ranks."""

from tables import every_row

from lowmem_grpo.parallel.shares import balanced, share


@every_row("count", [0, 1, 2, 5, 8, 13])
@every_row("ranks", [1, 2, 3, 4])
def test_every_prompt_belongs_to_one_rank_in_order_and_no_rank_has_two_more_than_another(
    count: int, ranks: int
) -> None:
    parts = [share(count, rank, ranks) for rank in range(ranks)]
    assert [place for part in parts for place in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_groups_are_divided_by_their_tokens_and_keep_their_order() -> None:
    costs = [900, 10, 20, 30, 40, 800, 50]
    parts = balanced(costs, float, 2)
    assert sorted(cost for part in parts for cost in part) == sorted(costs)
    assert max(map(sum, parts)) <= 4 / 3 * 925  # the best division: 930 and 920
    assert all([cost for cost in costs if cost in part] == part for part in parts)
    assert balanced([], float, 3) == [[], [], []]
    assert balanced([7], float, 2) == [[7], []]


def test_equal_groups_are_dealt_out_the_same_way_in_every_process() -> None:
    assert balanced(list(range(5)), lambda _: 1.0, 2) == [[0, 2, 4], [1, 3]]
