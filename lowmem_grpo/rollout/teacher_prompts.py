"""The prompts behind which a teacher reads completions: the student's, one in the teacher's own chat template, or one
that also tells what only the teacher is to know (TRL's SDFT and SDPO)."""

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from statistics import fmean
from typing import Any

import torch

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompt_inputs import text_ids
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.types import OnGroup, Rollout, RolloutGroup, Split

logger = logging.getLogger(__name__)
COLUMN = "privileged_context"  # TRL's name, in SDFT and SDPO
THINKING = re.compile("<think>.*?</think>", re.DOTALL)
PROBES = (  # texts that tokenizers split differently
    "It's 3,141.59 or 1e-05; 0123456789 and 12 345.", "  two  spaces\t\ttabs \r\n\n\n lines ",
    "def f(x):\n    return {x: [1, -2]}  # $x^2$ <b>&amp;</b>",
    "nai\u0308ve caf\u00e9 \ufb01 \u6771\u4eac \U0001f468\u200d\U0001f680")
EPISODES = ("the teacher is to read another prompt than the policy, and an episode has several turns or a prompt of "
            "its own. Leave out tools, environments and rollout_func, or take a teacher with the student's chat "
            "template that is told nothing more than the student (teacher= in GRPOTrainer)")
Told = dict[str, str]  # what only the teacher is to know about a completion, by its name in a template


@dataclass(frozen=True)
class Reprompt:
    """What a teacher reads before a completion."""

    ids: list[int] | None = None  # (P,) None: the group's own prompt
    taught: bool = True  # False: the completion is not distilled
    cut: bool = False  # True: there was room for a part only of what the teacher is told


class TeacherPrompts:
    """Gives each rollout the prompt of its teacher: what the student is told, in the teacher's own chat template."""

    columns: tuple[str, ...] = ()  # needed in the dataset
    tells = False  # whether the teacher is told more than the student

    def __init__(
        self, config: Any, student: PromptEncoder, teacher: PromptEncoder | None = None, longest: int | None = None,
    ) -> None:
        """`config` is a GRPOConfig with the templates of the class. `teacher` encodes prompts for another model (None:
        the teacher has the student's tokenizer), which takes prompts of at most `longest` tokens."""
        self.config, self.encoder = config, teacher or student
        self.same = teacher is None or forms_of(teacher.tokenizer) == forms_of(student.tokenizer)
        self.limit = min(config.max_reprompt_len, longest or config.max_reprompt_len)
        self.warned: set[str] = set()

    @classmethod
    def check(cls, dataset: Any, plays: bool = False) -> None:
        """Raise DataError if the dataset lacks a column that the teacher is to read, and ValueError if the policy plays
        episodes and the teacher is told more."""
        if plays and cls.tells:
            raise ValueError(EPISODES)
        for column in cls.columns:
            check_dataset(dataset, column)

    def refused(self, row: Mapping[str, Any]) -> str:
        """Return the reason to leave a row out; "" if there is none."""
        prompt: Any = row.get("prompt")
        if self.tells and isinstance(prompt, list) and prompt and prompt[-1].get("role") != "user":
            return (f"prompt ends with a message of the role {prompt[-1].get('role')!r}; what only the teacher is told "
                    "needs a last message of the user")
        empty = [column for column in self.columns if not as_text(row.get(column)).strip()]
        return f"`{empty[0]}` must not be None or empty, as the teacher is to read it" if empty else ""

    def lengths(self, row: dict[str, Any]) -> tuple[int, int]:
        """Return the tokens of a row's prompt with all that is told, and with its first character only. Which success
        will be shown is not known beforehand: "." stands for it."""
        told = {name: as_text(row.get(name)) for name in self.columns} or ({"solution": "."} if self.tells else {})
        first = {name: text[:1] for name, text in told.items()}
        return len(self.encoded(row, told)), len(self.encoded(row, first))

    def assign(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Set `teacher_prompt` and the field `teacher_mask` of all rollouts of scored groups; return the metrics.
        ValueError for an episode, unless the teacher reads what the policy read."""
        told, made = [own for group in groups for own in self.told(group)], list[Reprompt]()
        for group in groups:
            known: dict[tuple[Any, ...], Reprompt] = {}
            for rollout in group.rollouts:
                self.check_single(rollout)
                key = tuple(told[len(made)].items())
                known[key] = prompt = known.get(key) or self.prompt_of(group, dict(key))
                rollout.teacher_prompt, rollout.fields["teacher_mask"] = prompt.ids, torch.tensor(float(prompt.taught))
                made.append(prompt)
        return self.measured(groups, told, made)

    def check_single(self, rollout: Rollout) -> None:
        if (self.tells or not self.same) and (rollout.turns or rollout.splits):
            raise ValueError(EPISODES)

    def told(self, group: RolloutGroup) -> list[Told]:
        """Return what the teacher is told beside the prompt, for each rollout."""
        return [{} for _ in group.rollouts]

    def fill(self, question: str, told: Told) -> str:
        """Return the question with what the teacher is told, by the templates of the settings."""
        return question

    def prompt_of(self, group: RolloutGroup, told: Told) -> Reprompt:
        """Return the prompt with what is told. If it is too long, each of the texts told is cut to the same number of
        characters, the most for which there is room; without any room, the completion is not distilled."""
        if not told and (self.same or self.tells):
            return Reprompt(taught=not self.tells)
        if why := self.refused(group.row):
            raise DataError(f"row {group.row_index}: {why}; fill it in, or leave the row out")

        def ids(size: int) -> list[int]:
            return self.encoded(group.row, {name: text[:size] for name, text in told.items()})

        size = max(map(len, told.values()), default=0)
        if len(whole := ids(size)) <= self.limit:
            return Reprompt(None if whole == group.prompt_ids else whole)
        kept = bisect_right(range(1, size), self.limit, key=lambda size: len(ids(size)))
        return Reprompt(ids(kept), cut=True) if kept else Reprompt(taught=False)

    def composed(self, row: dict[str, Any], told: Told) -> Any:
        """Return a row's prompt, a text or messages, whose text or last message also has what the teacher is told."""
        prompt: Any = row["prompt"]
        if not told or isinstance(prompt, str):
            return self.fill(prompt, told) if told else prompt
        content = prompt[-1]["content"]
        said: Any = self.fill(as_text(content, " "), told)
        if isinstance(content, list):
            said = [*(part for part in content if part.get("type") != "text"), {"type": "text", "text": said}]
        return [*prompt[:-1], {**prompt[-1], "content": said}]

    def encoded(self, row: dict[str, Any], told: Told) -> list[int]:
        """Return the ids of what is `composed`."""
        made = self.encoder.of_any_length({**row, "prompt": self.composed(row, told)})
        if isinstance(made, str):
            raise DataError(f"no prompt of the teacher can be made: {made}")
        return made.ids

    def measured(self, groups: list[RolloutGroup], told: list[Told], made: list[Reprompt]) -> dict[str, float]:
        """Return the metrics of rollouts, given what is told and the prompt of each; {} if all read their group's."""
        if self.same and not self.tells:
            return {}
        late = [not prompt.taught and bool(own or not self.tells) for own, prompt in zip(told, made, strict=True)]
        if any(late):
            self.warn(f"prompts of the teacher are longer than {self.limit} tokens without all that it is told; their "
                      "completions are not distilled. Raise max_reprompt_len, or the context of the model")
        lengths = [len(prompt.ids) for prompt in made if prompt.ids is not None] or [0]
        return {"self_distillation/reprompt_sample_fraction": share(prompt.taught for prompt in made),
                "self_distillation/cut_fraction": share(prompt.cut for prompt in made),
                "self_distillation/too_long_fraction": share(late),
                "self_distillation/mean_prompt_length": fmean(lengths),
                "self_distillation/max_prompt_length": max(lengths)}

    def warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self.warned:
            logger.warning(text)
        self.warned.add(text)


class PrivilegedPrompts(TeacherPrompts):
    """Prompts with the row's `privileged_context`, as in TRL's SDFT."""

    columns, tells = (COLUMN,), True

    def told(self, group: RolloutGroup) -> list[Told]:
        return [{COLUMN: as_text(group.row.get(COLUMN))} for _ in group.rollouts]

    def fill(self, question: str, told: Told) -> str:
        return str(self.config.teacher_prompt_template.format(prompt=question, **told))


class TeacherSampling:
    """A `Player` whose completions are sampled behind the prompts of their teachers (TRL's `generate_from_teacher`)."""

    waited = 0.0  # always 0, as only the engine works

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def play(
        self, engine: Any, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Return `params.n` rollouts of each prompt, and call TRL's hook of callbacks."""
        groups = [RolloutGroup(prompt.row, prompt.ids, [Rollout([], [], "stop")], row_index=prompt.index)
                  for prompt in prompts]
        source: TeacherPrompts = self.trainer.teaching.prompts
        source.assign(groups)
        self.trainer.tell("on_generation_prompts_selected", generation_prompt_text=None, generation_prompts=[
            source.composed(group.row, *source.told(group)) for group in groups])
        ids = [group.rollouts[0].teacher_prompt or group.prompt_ids for group in groups]
        made = list(engine.generate(ids, params.of_call(len(ids)), *([on_group] if on_group is not None else [])))
        for rollout in (rollout for rollouts in made for rollout in rollouts):
            rollout.routes = None  # of tokens behind another prompt than that of the policy
        return made


class SuccessPrompts(TeacherPrompts):
    """Prompts with a successful completion of the group, or with feedback, as in TRL's SDPO. `privileged_context` is
    the feedback: the row's, or a completion's own from a `rollout_func` or from a reward function's `log_extra`."""

    tells = True

    def told(self, group: RolloutGroup) -> list[Told]:
        config = self.config
        successes = self.successes(group) if config.use_successful_as_teacher else []
        told = list[Told]()
        for rollout, feedback in zip(group.rollouts, self.feedback(group), strict=True):
            shown = [each for each in successes if each is not rollout or not config.dont_reprompt_on_self_success]
            told.append({"solution": self.shown(shown[0])} if shown else {})
            alone = shown and config.environment_feedback_only_without_solution
            if config.include_environment_feedback and feedback and not alone:
                told[-1]["feedback"] = feedback
        return told

    def successes(self, group: RolloutGroup) -> list[Rollout]:
        least = self.config.success_reward_threshold  # which a weighted sum may miss by its rounding
        return [rollout for rollout in group.rollouts if rollout.reward is not None and not group.unjudged
                and (rollout.reward >= least or isclose(rollout.reward, least, rel_tol=1e-6))]

    def feedback(self, group: RolloutGroup) -> list[str]:
        rows = ({**group.row, **rollout.columns, **rollout.extras} for rollout in group.rollouts)
        texts = [as_text(row.get(COLUMN)) for row in rows]
        return [text if text.strip() else "" for text in texts]

    def shown(self, rollout: Rollout) -> str:
        """Return the text of a completion, if the settings say so without its thinking, which a prompt may begin."""
        if not self.config.remove_thinking_from_demonstration:
            return rollout.text
        return THINKING.sub("", rollout.text).rpartition("</think>")[2].strip()

    def fill(self, question: str, told: Told) -> str:
        config, parts = self.config, {"solution": "", "feedback": ""}
        if "solution" in told:
            parts["solution"] = config.solution_template.format(successful_previous_attempt=told["solution"])
        if "feedback" in told:
            parts["feedback"] = config.feedback_template.format(feedback_raw=told["feedback"])
        return str(config.reprompt_template.format(prompt=question, **parts))

    def measured(self, groups: list[RolloutGroup], told: list[Told], made: list[Reprompt]) -> dict[str, float]:
        available = [bool(text) for group in groups for text in self.feedback(group)]
        if any(available) and not self.config.include_environment_feedback:
            self.warn(f"rows have feedback in {COLUMN}, and no teacher reads it: set include_environment_feedback=True")
        return {"self_distillation/success_group_fraction": share(bool(self.successes(group)) for group in groups),
                "self_distillation/success_sample_fraction": share("solution" in own for own in told),
                "self_distillation/feedback_available_fraction": share(available),
                "self_distillation/feedback_used_fraction": share("feedback" in own for own in told),
                **super().measured(groups, told, made)}


def share(holds: Iterable[bool]) -> float:
    return fmean([*map(float, holds)] or [0.0])


def as_text(value: Any, joint: str = "\n") -> str:
    """Return a text, the texts of messages (one a line) or those of a message's parts; "" for None or NaN."""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        return joint.join(filter(None, (as_text(part.get("content", part.get("text")), " ") for part in value)))
    return "" if value is None or value != value else str(value)


def behind(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Return groups with copies of the rollouts, in order, behind the prompts of their teachers. A copy has neither the
    experts that the sampler chose for the student, nor other `fields`."""
    return [replace(group, rollouts=[replace(
        rollout, routes=None, turns=[replace(turn, routes=None) for turn in rollout.turns], fields={},
        splits=rollout.splits if rollout.teacher_prompt is None else [Split(0, rollout.teacher_prompt)])
        for rollout in group.rollouts]) for group in groups]


def forms_of(tokenizer: Any) -> tuple[Any, ...]:
    """Return what decides how a prompt is written in tokens, if tokenizers have the same tokens."""
    return tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token, text_ids(tokenizer, "a")


def check_same_tokens(student: Any, teacher: Any) -> None:
    """Raise ValueError if the tokenizers encode texts differently. One may have tokens that the other lacks."""
    if why := difference(student, teacher):
        sizes = f"vocab_size {teacher.vocab_size} and {student.vocab_size}"
        raise ValueError(f"the teacher's tokens are not the student's ({sizes}): {why}. It reads the student's tokens: "
                         "take one of the student's family, or train on its answers with SFTTrainer")


def difference(student: Any, teacher: Any) -> str:
    """Return the first difference found between two tokenizers: a token with two ids, an id with two tokens, or a text
    with two encodings; "" if none is found. Tokens that only one of them has do not count."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    names = {number: token for token, number in theirs.items()}
    for token, number in ours.items():
        if theirs.get(token, number) != number:
            return f"{token!r} is the student's token {number} and the teacher's {theirs[token]}"
        if names.get(number, token) != token:
            return f"token {number} is the student's {token!r} and the teacher's {names[number]!r}"
    special = [f"x{token} y" for token in student.all_special_tokens if token in theirs]
    for text in (*PROBES, *special):
        mine, other = (list(each(text, add_special_tokens=False).input_ids) for each in (student, teacher))
        if mine != other:
            return f"{text!r} is {mine} to the student and {other} to the teacher"
    return ""
