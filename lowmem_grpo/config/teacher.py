"""The settings of a teacher, which tells the policy about every token: fields of GRPOConfig."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.utils import COUNT, POSITIVE, SHARE, TRUTH, Rule, one_of

BASE, EMA, LIVE = "base", "ema", "live"  # teachers that are the trained model itself
OF_MODEL = (BASE, EMA, LIVE)
STORED = "stored"  # the dataset has completions, and what a teacher said about them
SAMPLED, TOP_K, FULL = "sampled_token", "topk_logits", "full_logits"
NAMED: Rule = ('"base", "ema", "live", "stored", a folder with an adapter, the name or folder of a model, or a URL',
               lambda value: isinstance(value, str) and bool(value.strip()))


def is_url(teacher: str) -> bool:
    return teacher.lower().startswith(("http://", "https://"))


@dataclass(kw_only=True)
class TeacherSettings:
    """Fields of GRPOConfig about a teacher, under the names of TRL 1.16's SDPOConfig, where it has them."""

    teacher: str | None = None
    """Not in TRL's GRPO: "base" (the model without its adapter), "ema" (an average of the adapter over the steps),
    "live" (the model as it is), a folder with an adapter for the same base model, the name or folder of a model with
    the same tokens, the URL of a server, or "stored": the rows have completions with a teacher's likeliest tokens
    (docs/distillation.md). None: there is no teacher."""
    distillation_weight: float = 0.5
    """With a teacher the loss is (1 - distillation_weight) * policy loss + distillation_weight * distillation loss."""
    distillation_mode: str = SAMPLED
    """What is compared at each token: "sampled_token" (the teacher's log-probability of the sampled token only),
    "topk_logits" (those of `distillation_topk` tokens) or "full_logits" (of the whole vocabulary, without logits)."""
    distillation_topk: int | None = None
    """Tokens of "topk_logits": the student's likeliest, or the teacher's own if the teacher is stored or a server."""
    distillation_add_tail: bool = False
    """True compares the mass of all other tokens too, as one more token; False takes the k tokens for the whole."""
    distillation_alpha: float = 1.0
    """0: forward KL(teacher || student); 1: reverse KL(student || teacher); between: the generalised Jensen-Shannon
    divergence of arXiv 2306.13649. "sampled_token" is always the reverse KL."""
    distillation_is_clip: float | None = 2.0
    """With several optimizer steps for each generation, a token's loss is multiplied by the ratio of its probability
    now to that at the generation, at most this number; None: by 1."""
    teacher_update_rate: float = 0.05
    """Teacher "ema": every `teacher_sync_steps` steps it becomes rate * policy + (1 - rate) * teacher."""
    teacher_sync_steps: int = 1
    max_reprompt_len: int = 10_240
    """Maximum tokens of a prompt with a demonstration that the teacher reads. What is longer loses the end of its
    demonstration."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "teacher": NAMED, "distillation_weight": SHARE, "distillation_mode": one_of(SAMPLED, TOP_K, FULL),
        "distillation_topk": COUNT, "distillation_add_tail": TRUTH, "distillation_alpha": SHARE,
        "distillation_is_clip": POSITIVE, "teacher_update_rate": SHARE, "teacher_sync_steps": COUNT,
        "max_reprompt_len": COUNT,
    }
    privileged: ClassVar[bool] = False  # whether the teacher reads more than the student
    by_sequence: ClassVar[bool] = False  # whether the distillation loss is a mean of means of sequences, not of tokens
    needs_teacher: ClassVar[bool] = False

    @property
    def teaching(self) -> bool:
        """True if the loss has a distillation term."""
        return self.teacher is not None and self.distillation_weight > 0

    @property
    def is_served(self) -> bool:
        """True if the teacher answers at a URL."""
        return self.teacher is not None and is_url(self.teacher)

    @property
    def off_policy(self) -> bool:
        """True if completions are not the policy's behind its own prompt, so the sampler tells nothing to compare."""
        return self.teacher == STORED or getattr(self, "generate_from_teacher", False)

    @property
    def divergence(self) -> float:
        """Which divergence is learnt: `distillation_alpha`, or DistillationConfig's `beta`."""
        return self.distillation_alpha

    def check_teacher(self, config: Any) -> None:
        """Raise ValueError for settings of the teacher that contradict each other or the other settings `config`."""
        mode = self.distillation_mode
        if mode == SAMPLED and self.divergence != 1:
            name = "beta" if self.distillation_alpha == 1 else "distillation_alpha"
            raise ValueError(f"distillation_mode is {SAMPLED!r} and {name} is {self.divergence}; one token gives the "
                             f"reverse KL only: set {name}=1.0, or the mode {TOP_K!r} or {FULL!r}")
        if mode == TOP_K and self.distillation_topk is None:
            raise ValueError(f"distillation_mode is {TOP_K!r}; set distillation_topk, such as 100")
        if self.teacher == STORED and (mode != TOP_K or self.distillation_weight < 1 or config.num_generations != 1
                                       or config.temperature != 1):
            raise ValueError(f"teacher is {STORED!r}: each row has one completion with a teacher's likeliest tokens at "
                             f"temperature 1, and no policy sampled it. Set distillation_mode={TOP_K!r}, "
                             "distillation_weight=1.0 and num_generations=1, as DistillationConfig has them, and "
                             "temperature=1.0")
        if not self.teaching:
            return
        if self.teacher == LIVE and not self.privileged:
            raise ValueError("teacher is 'live', the policy itself, which reads what the policy reads: nothing "
                             "differs. Take 'ema' or 'base', or SDPOTrainer or SDFTTrainer, whose teacher reads more")
        if self.is_served and "@" in str(self.teacher).split("/")[2]:
            raise ValueError("the teacher's URL has a name or password, which the records of the run would keep: pass "
                             "ServedTeacher(URL, ...) as the trainer's teacher instead")
        if self.is_served and (mode == FULL or config.temperature != 1):
            raise ValueError(f"teacher is {self.teacher!r}, which tells the likeliest tokens at temperature 1: set "
                             f"distillation_mode to {SAMPLED!r} or {TOP_K!r}, and temperature=1.0")
        alone = self.distillation_weight == 1
        if self.teacher == EMA and alone and not self.privileged:
            raise ValueError("teacher is 'ema', which begins as the policy: nothing is learnt from it alone. Set a "
                             "distillation_weight below 1, with rewards, or take SDPOTrainer or SDFTTrainer")
        idle = {"beta": config.kl_weight, "entropy_coef": config.entropy_coef,
                "use_adaptive_entropy": config.use_adaptive_entropy,
                "top_entropy_quantile": config.top_entropy_quantile < 1}
        if alone and (named := [name for name, given in idle.items() if given]):
            raise ValueError(f"distillation_weight is 1.0: there is no policy loss, which {', '.join(named)} changes; "
                             "leave it out, or set a smaller distillation_weight")
        for name, off in {"train_while_sampling": False, "replay_buffer_size": 0}.items():
            if getattr(config, name):
                raise ValueError(f"{name} is {getattr(config, name)!r}, and the teacher {self.teacher!r} reads each "
                                 f"update's completions once they are sampled; leave {name} out ({off!r})")
