"""What a key may have, as it is written down."""

import pytest
from tables import every_row

from lowmem_grpo.service.allowance import Allowance, Allowances
from lowmem_grpo.units import GIB, MIB


def test_words_change_what_they_name_and_nothing_else() -> None:
    found = Allowance().but(["requests=7", "bodies=3MiB", "storage=2GiB"])
    assert found == Allowance(requests=7, bodies=3 * MIB, storage=2 * GIB, models=Allowance().models)
    assert found.but(["bodies=123"]).bodies == 123 and Allowance().but([]) == Allowance()


@every_row("word", ["requests", "requests=", "requests=-1", "requests=1MiB", "storage=2TB", "disk=1",
                                  "storage=1.5GiB", "RANGES=1", "=1"])
def test_a_word_that_is_no_limit_is_named(word: str) -> None:
    with pytest.raises(ValueError, match="is no limit; write requests=4096"):
        Allowance().but([word])


def test_a_limit_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="models is 0; it must be a whole number, at least 1"):
        Allowance().but(["models=0"])


def test_a_user_without_limits_of_their_own_has_the_usual_ones() -> None:
    allowances = Allowances(Allowance(models=2), {"ann": Allowance(models=9)})
    assert [allowances.of(name).models for name in ("ann", "bob")] == [9, 2]
