"""What judging took: calls, tokens, cost."""

from dataclasses import dataclass, fields


@dataclass
class Meter:
    """Counts of a judge, since it was made or of one call; add one to another with `add`."""

    calls: int = 0  # questions put to the judge, each once however often it was asked again
    cached: int = 0  # questions whose answer was known
    retried: int = 0  # requests beyond one a question: after an error, or after a reply without scores
    failed: int = 0  # questions that have no answer
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: "Meter") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True)
class Prices:
    """Of a million tokens, in any currency; None: not known, and then no cost is shown."""

    prompt: float | None = None
    completion: float | None = None

    def __post_init__(self) -> None:
        for name, price in (("price_prompt", self.prompt), ("price_completion", self.completion)):
            if price is not None and not (isinstance(price, int | float) and 0 <= price < float("inf")):
                raise ValueError(f"{name} is {price!r}; it is what a million tokens cost, 0 or above")

    def cost(self, meter: Meter) -> float | None:
        """Of the meter's tokens; None where no price is known."""
        if self.prompt is None and self.completion is None:
            return None
        paid = meter.prompt_tokens * (self.prompt or 0.0) + meter.completion_tokens * (self.completion or 0.0)
        return paid / 1e6


def summary(name: str, meter: Meter, cost: float | None) -> str:
    """All of a meter in one line."""
    paid = "" if cost is None else f", cost {cost:.4f}"
    return (f"judge {name}: {meter.calls:,} calls ({meter.cached:,} more from the cache), {meter.retried:,} retried, "
            f"{meter.failed:,} failed; {meter.prompt_tokens:,} prompt and {meter.completion_tokens:,} completion "
            f"tokens{paid}")
