"""How episodes of several turns run: what ends them, how the next prompt is made, and who is paid for what."""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo.utils import COUNT, POSITIVE, ZERO_OR_MORE, Rule, number, one_of

HISTORIES = ("append", "template")


@dataclass(kw_only=True)
class EpisodeSettings:
    """Fields of GRPOConfig that only runs with tools or an environment use. TRL has none of them but
    `max_tool_calling_iterations`. `max_completion_length` bounds all turns and all that comes between them together."""

    max_turns: int | None = None
    """Turns of the policy in an episode; None leaves the tokens as the only bound."""
    max_tool_calling_iterations: int | None = None
    """TRL's: how many times tools may be called; the same as `max_turns` less one."""
    max_turn_tokens: int | None = None
    """Tokens that the policy may draw in one turn; None: all that are left."""
    history: str = "append"
    """"append": the next prompt is the tokens so far and what came after them. "template": the chat template renders
    the whole conversation anew for each turn; where it rewrites what was sampled, another sequence begins."""
    environment_timeout: float = 60.0
    """Seconds that one call of a tool or of an environment may take."""
    episode_timeout: float = 600.0
    """Seconds that the calls of one episode may take together."""
    max_tool_tokens: int = 1024
    """Tokens of what one tool or one step of an environment returns; more is cut out of its middle."""
    turn_discount: float | None = None
    """None: each token of an episode gets the advantage of the whole. A number from 0 to 1: a turn's advantage is its
    discounted reward to go, less the group's mean at that turn, divided as `scale_rewards` says. Rewards that no turn
    was paid are the last turn's."""
    state_weight: float = 1.0
    """Weight of the comparison of turns that acted in the same state (GiGPO, arXiv 2505.10978, equation 8), where the
    environment has a `state_key`; 0 turns it off. What is compared is the reward to go, with `turn_discount`, or
    undiscounted where that is None."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "max_turns": COUNT, "max_tool_calling_iterations": ZERO_OR_MORE, "max_turn_tokens": COUNT,
        "history": one_of(*HISTORIES), "environment_timeout": POSITIVE, "episode_timeout": POSITIVE,
        "max_tool_tokens": COUNT, "turn_discount": number("in [0, 1]", lambda value: 0 <= value <= 1),
        "state_weight": ZERO_OR_MORE,
    }

    @property
    def turn_limit(self) -> int | None:
        """Turns of the policy, by either name; ValueError where the two contradict each other."""
        tools = self.max_tool_calling_iterations
        if self.max_turns is not None and tools is not None and self.max_turns != tools + 1:
            raise ValueError(f"max_turns is {self.max_turns} and max_tool_calling_iterations is {tools}: that many "
                             f"calls are {tools + 1} turns; give one of them")
        return self.max_turns if tools is None else int(tools) + 1
