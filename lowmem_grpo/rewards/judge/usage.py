"""How many tokens a request took: what the server says, if it can be true, and otherwise a guess from the texts."""

from dataclasses import dataclass

MOST_ADDED = 4096  # tokens that a chat template adds to a question
MOST_SAID = 1_000_000  # tokens of a reply to a request without a limit; thinking that is not shown counts too
BYTES_OF_A_TOKEN = 4  # on average, for a guess
MOST_BYTES_OF_A_TOKEN = 128  # on average, in the longest tokens that there are


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `doubt` says why a count of the server was not taken; it is empty if all were."""

    prompt: int = 0
    completion: int = 0
    doubt: str = ""


NOTHING = Usage()


def usage_of(given: object, taken: object, asked_bytes: int, said_bytes: int, limit: object) -> Usage:
    """What a server says that it read and wrote, checked by the sizes of both texts (UTF-8) and the request's limit.

    A count that is missing, or no positive whole number, counts as 0.
    """
    most = limit if isinstance(limit, int) and limit > 0 else MOST_SAID
    prompt, doubt = checked("prompt", given, asked_bytes, asked_bytes + MOST_ADDED)
    completion, other = checked("completion", taken, said_bytes, most)
    return Usage(prompt, completion, doubt or other)


def checked(name: str, count: object, size: int, most: int) -> tuple[int, str]:
    """The count and no doubt, or a guess and the doubt."""
    if isinstance(count, bool) or not isinstance(count, int) or count <= 0:
        return 0, ""
    least = size // MOST_BYTES_OF_A_TOKEN
    if least <= count <= most:
        return count, ""
    shown = count if count < 10**15 else "more than 10^15"
    guess = min(size // BYTES_OF_A_TOKEN, most)
    return guess, f"it says that {shown} {name} tokens are in {size} bytes; counted as {guess}"
