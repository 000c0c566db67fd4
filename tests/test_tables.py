"""The tables that other tests are written in: a table that tries nothing, or hides a wrong row, proves nothing."""

import pytest
from tables import every_row, in_short_lane, not_refused, pairwise


def test_every_row_is_tried_and_each_wrong_one_is_named(tmp_path: object) -> None:
    tried = []

    @every_row("number, even", [(1, True), (2, True), (3, False), (4, False)])
    def halves(number: int, even: bool, folder: object) -> None:
        tried.append((number, folder))
        assert (number % 2 == 0) == even
        if number == 2:
            pytest.fail("two")

    with pytest.raises(AssertionError, match=r"(?s)3 of 4 rows:.*'number': 1.*'number': 2.*two.*'number': 4"):
        halves(folder=tmp_path)
    assert tried == [(number, tmp_path) for number in (1, 2, 3, 4)]


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="tries nothing"):
        every_row("number", [])


def test_what_is_not_refused_is_named_with_what_was_said() -> None:
    table = [("1", "invalid"), ("x", "invalid literal"), ("y", "other words")]
    assert not_refused(int, table) == [
        ("1", "invalid", "<accepted>"), ("y", "other words", "invalid literal for int() with base 10: 'y'")]


def test_each_pair_of_values_of_two_axes_is_in_some_case() -> None:
    _, cases = pairwise(a=[1, 2, 3], b="xyz", c=[False, True])
    found = [case.values for case in cases]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        axes = ([1, 2, 3], "xyz", [False, True])
        assert {(one[left], one[right]) for one in found} == {(a, b) for a in axes[left] for b in axes[right]}
    assert len(found) < 18


def test_one_of_so_many_cases_is_in_the_short_lane_and_no_value_of_a_parameter_is_always_left_out() -> None:
    for step in (2, 3, 4):
        short = [number for number in range(12 * step) if in_short_lane("tests/test_it.py::test_it", number, step)]
        assert [number // step for number in short] == list(range(12))
        assert {number % step for number in short} == set(range(step))
