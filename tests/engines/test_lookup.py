"""Guesses by lookup: what is known of the ends of a text, and how sure a guess has to be."""

from lowmem_grpo.engines.lookup import LENGTHS, Chances, Guess, Lookup

TEXT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8]


def tokens(guesses: list[Guess]) -> list[int]:
    return [guess.token for guess in guesses]


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    lookup = Lookup()
    lookup.add(TEXT)
    assert tokens(lookup.guess([30, 8, 7, 6, 5], 1, Chances())) == [4]
    assert lookup.guess([30, 31], 3, Chances()) == []
    assert lookup.guess([8], 3, Chances()) == [], "one token is no end that is looked up"


def test_the_longest_known_end_decides() -> None:
    lookup = Lookup()
    for first, last in ((1, 50), (2, 60), (3, 60)):
        lookup.add([first, 10, 11, 12, last])
    assert lookup.guess([1, 10, 11, 12], 1, Chances()) == [Guess(50, 4)]
    assert lookup.guess([4, 10, 11, 12], 1, Chances()) == [Guess(60, 2)], "two of three"


def test_guesses_stop_where_too_many_different_tokens_followed() -> None:
    lookup = Lookup()
    for token in range(20, 30):
        lookup.add([1, 2, token])
    assert lookup.guess([1, 2], 4, Chances()) == []


def test_guesses_that_were_wrong_are_made_less_and_fade() -> None:
    lookup, chances = Lookup(), Chances()
    lookup.add([1, 2, 3])
    assert tokens(lookup.guess([1, 2], 1, chances)) == [3]
    for _ in range(20):
        chances.note(Guess(3, LENGTHS[-1]), right=False)
    assert lookup.guess([1, 2], 1, chances) == []
    for _ in range(5):
        chances.fade()
    assert tokens(lookup.guess([1, 2], 1, chances)) == [3]


def test_a_text_that_grows_is_counted_once() -> None:
    grown, whole = Lookup(), Lookup()
    for end in range(1, len(TEXT) + 1):
        grown.add(TEXT[:end], start=end - 1)
    whole.add(TEXT)
    assert grown.after == whole.after
