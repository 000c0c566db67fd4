"""How completions are drawn, under vLLM's names."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one generation call, with vLLM's field names, meanings and defaults (`max_tokens` aside: 512 here).

    temperature 0 is greedy. top_k <= 0 and top_p = 1 keep every token. A completion ends at an end-of-sequence token
    (unless `ignore_eos`), at a token of `stop_token_ids`, at a string of `stop`, or after `max_tokens` tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 or above"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= -1, "-1 or 0 (off), or above"),
            "min_p": (0 <= (self.min_p or 0) <= 1, "in [0, 1]"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
        }
        for name, (allowed, rule) in checks.items():
            if not allowed:
                raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; it must be {rule}")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off before sampling, which breaks the importance-sampling identity."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
