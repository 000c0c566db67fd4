"""Prompts whose answers were long come first, and without such knowledge the order is as given."""

from lowmem_grpo.engines.base import ExpectedLengths


def test_the_longest_expected_come_first_and_unknown_prompts_in_the_middle() -> None:
    expected = ExpectedLengths()
    assert expected.order([[1], [2], [3]]) == [0, 1, 2]
    expected.note([1], [10, 20])
    expected.note([2], [100, 50])
    assert expected.order([[1], [3], [2], [4]]) == [2, 1, 3, 0]
    expected.note([1], [500])  # the newest answers count
    assert expected.order([[1], [3], [2]]) == [0, 1, 2]


def test_only_so_many_prompts_are_remembered() -> None:
    expected = ExpectedLengths(most=2)
    for number in range(4):
        expected.note([number], [number])
    assert list(expected.known.values()) == [2, 3]
    expected.note([2], [7])
    expected.note([9], [9])
    assert list(expected.known.values()) == [7, 9]
