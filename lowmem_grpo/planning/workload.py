"""What a step is made of: how many prompts and completions, and how long they are."""

from dataclasses import dataclass

# Where lengths are not given: shares that problems of GSM8K have of a context of 640 tokens (128, 205 and 512).
PROMPT_SHARE, COMPLETION_SHARE = 1 / 5, 2 / 5  # of the context; of the longest completion
PROMPTS = 8
TAIL = 0.25  # of the most sequences that ran together in a call: while fewer do, token steps are the tail's


@dataclass(frozen=True)
class Workload:
    """P prompts with G completions each. Lengths are in tokens; those of prompt and completion are means."""

    prompts: int
    generations: int
    prompt_length: float
    completion_length: float
    longest: int  # completion of the step
    iterations: int = 1  # passes of training over the completions
    updates: int = 1  # optimizer steps
    forward_only: int = 0  # passes that only compute log-probabilities: of the old policy, of the reference

    def __post_init__(self) -> None:
        for name in ("prompts", "generations", "prompt_length", "completion_length", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.completion_length > self.longest:
            raise ValueError(f"completion_length is {self.completion_length:g}, the mean, and the longest completion "
                             f"has {self.longest} tokens; give a mean of at most {self.longest}, or a larger "
                             "max_completion_length")

    @classmethod
    def within(
        cls, context: int, prompts: int | None, generations: int, prompt_length: int | None,
        completion_length: int | None, longest: int | None,
    ) -> "Workload":
        """Of a context in tokens, with the shares that GSM8K has where a length is left out.

        ValueError where prompt and longest completion do not fit the context together.
        """
        share = int(context * PROMPT_SHARE)
        prompt = max(1, min(share, context - (longest or 1))) if prompt_length is None else prompt_length
        limit = max(1, min(context - share, context - prompt)) if longest is None else longest
        given = prompt_length is not None or longest is not None
        if given and prompt + limit > context:
            raise ValueError(f"a prompt of {prompt} tokens and a completion of {limit} do not fit a context of "
                             f"{context}; raise --context, or lower --prompt-length or --max-completion-length")
        mean = max(1, round(COMPLETION_SHARE * limit)) if completion_length is None else completion_length
        return cls(PROMPTS if prompts is None else prompts, generations, prompt, mean, limit)

    @property
    def sequences(self) -> int:
        """P G."""
        return self.prompts * self.generations

    @property
    def trained(self) -> float:
        """Completion tokens: what log-probabilities are computed of."""
        return self.sequences * self.completion_length

    @property
    def places(self) -> float:
        """Tokens of all micro-batches: each prompt once, up to its last token, and each completion."""
        return self.prompts * (self.prompt_length - 1) + self.trained

    def lengths(self) -> list[float]:
        """Of the completions of one prompt, longest first: quantiles of the law that `squared_length` names."""
        shorter = self.longest - self.completion_length
        if not shorter:
            return [float(self.longest)] * self.generations
        shares = [(number + 0.5) / self.generations for number in range(self.generations)]
        return [self.longest * (1 - share ** (self.completion_length / shorter)) for share in shares]

    @property
    def tail_steps(self) -> float:
        """Tokens at the end of the longest completion that fewer than `TAIL` of the sequences reach, by the same law:
        all but that share have ended after L (1 - TAIL^(1 / k)) tokens."""
        shorter = self.longest / self.completion_length - 1
        return self.longest * TAIL ** (1 / shorter) if shorter > 0 else 0.0

    @property
    def squared_length(self) -> float:
        """The mean of (prompt + completion)^2, which attention costs.

        Lengths of completions are taken to follow a Beta(1, k) law of mean m up to the longest one, L: k = L / m - 1,
        so that the mean square is 2 m^2 L / (L + m). That is m^2 where all have the same length, and near 2 m^2, that
        of an exponential law, where the longest is far from the mean.
        """
        mean, longest = self.completion_length, self.longest
        square = 2 * mean**2 * longest / (longest + mean)
        return self.prompt_length**2 + 2 * self.prompt_length * mean + square
