"""Recipe `inbox`: answer questions by searching mails, with tools to search, to read and to answer.

    lowmem-grpo run inbox                           # the embedded model of the inbox, in minutes on two CPU cores
    lowmem-grpo run inbox gpu=24                    # the large mailbox, and a model from the hub
    lowmem-grpo run inbox reward=ruler judge=http://127.0.0.1:8000/v1 judge_model=NAME judge_key=local    # no labels
    lowmem-grpo eval runs/inbox --recipe inbox

Exactly one of the generated mails answers each question. With reward=ruler, a judge that does not see the right answer
compares the episodes of a group, and the reward by rules is only logged (`rewards/earned/mean`).
"""

from dataclasses import dataclass, replace

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam, won
from lowmem_grpo.recipes.judge import SELF, JudgeOptions, teach_judged
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import take
from lowmem_grpo.recipes.tasks.inbox import UNKNOWN, WRONG, Inbox, baselines, earned
from lowmem_grpo.recipes.tasks.mail_database import check_sqlite
from lowmem_grpo.recipes.tasks.mailbox import WORLDS, mailbox
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.utils import at_least, one_of

DEFAULTS = USUAL | {
    "output_dir": "runs/inbox", "max_steps": 100, "learning_rate": 5e-6, "max_completion_length": 3072,
    "max_turns": 12, "max_turn_tokens": 256, "max_tool_tokens": 512,
}
PRESETS: Presets = {
    "cpu": Preset("tiny-inbox", 320, 16, 32, {
        "max_steps": 48, "learning_rate": 2e-3, "max_completion_length": 256, "max_turns": 6, "max_turn_tokens": 24,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "save_steps": 16,
    }),
} | on_cards(4096)
SMALL, LARGE = WORLDS
DOUBT = {SMALL: WRONG, LARGE: UNKNOWN}  # reward of "unknown"; the embedded model would learn to say only that
SYSTEM = """\
You answer questions about the mails of a company. Search them with the tool search, read those that may help with the
tool read, and hand in the answer with the tool answer: a few words, and the ids of the mails that say so. A search
finds mails that have all of its words, so use few. Where mails contradict each other, the newest one is right. If you
cannot find the answer, hand in "unknown". You may make {calls} calls of tools in all, the last one included."""
RUBRIC = """\
- An answer that was handed in with the tool, and that a mail which was read supports, scores highest; say by the mails
  in the episode whether it does. Fewer calls are better among such answers.
- An answer that no mail in the episode supports is a guess and scores low, lower than an honest "unknown".
- An episode that ends without an answer, or with calls that failed, scores lowest; searches that came nearer to the
  question score a little above others."""


@dataclass
class InboxOptions(JudgeOptions):
    mailbox: str | None = None
    """The mailbox: "small" (500 mails of one line each) or "large" (more than 4,000 longer mails). None: small for an
    embedded model, large for a hub model."""
    calls: int | None = None
    """The most tool calls in an episode. None: 4 in the small mailbox, 10 in the large mailbox."""
    reward: str = "rules"
    """The main reward: "rules" (the reward `earned`) or "ruler" (a judge compares episodes)."""
    train_size: int = 400
    """The number of training questions."""
    eval_problems: int = 64
    """The number of held-out questions in each evaluation."""

    RANGES = JudgeOptions.RANGES | {
        "mailbox": one_of("small", "large"), "reward": one_of("rules", "ruler"),
        "calls": at_least(2),  # a search, and an answer
    }

    def __post_init__(self) -> None:
        judged = [name for name in ("judge_model", "judge_key") if getattr(self, name) is not None]
        if self.reward != "ruler" and (self.judge != SELF or judged):
            raise ValueError(f"{(judged or ['judge'])[0]} is for a judge: give reward=ruler with it")

    def world(self, tiny: bool) -> str:
        """Return the mailbox for an embedded (`tiny`) or another model."""
        return self.mailbox or (SMALL if tiny else LARGE)


OPTIONS = InboxOptions


def make_dataset(split: str, size: int, seed: int = 0, name: str = LARGE, calls: int | None = None) -> Dataset:
    """Return `size` different questions of a split about a seed's mailbox, with the arguments of `Inbox.reset`."""
    questions, most = mailbox(name, seed).of_split(split), calls or WORLDS[name].calls
    if size > len(questions):
        raise ValueError(f"the mailbox {name!r} of seed {seed} has {len(questions)} questions to {split}, and {size} "
                         "are asked for; ask for fewer")
    told = [{"role": "system", "content": SYSTEM.format(calls=most)}] if name == LARGE else []
    return Dataset.from_list([
        {"prompt": [*told, {"role": "user", "content": question.text}], "mailbox": name, "mail_seed": seed,
         "answer": question.answer, "source": question.source, "calls": most, "unknown": DOUBT[name]}
        for question in take(iter(questions), size)
    ])


EXAM = Exam(
    lambda size, seed, source: make_dataset("test", size, seed), won, max_tokens=3072, size=64,
    play=Play(Inbox, settings={"max_turns": DEFAULTS["max_turns"], "max_tool_tokens": DEFAULTS["max_tool_tokens"]}),
    of_tiny=lambda size, seed, source: make_dataset("test", size, seed, SMALL), tiny_max_tokens=256,
    of_options=lambda options, tiny: {"problems": lambda size, seed, source: make_dataset(
        "test", size, seed, options.world(tiny), options.calls)},
)


def run(options: InboxOptions) -> None:
    """Train on the questions of the mailboxes; ValueError if `max_turns` leaves no turn for the answer."""
    check_sqlite()
    judged = options.reward == "ruler"
    setup = prepare(options, DEFAULTS | ({"reward_weights": [1.0, 0.0]} if judged else {}), PRESETS)
    name = options.world(setup.is_tiny)
    calls, turns = options.calls or WORLDS[name].calls, setup.config.max_turns
    if turns is not None and turns <= calls:
        raise ValueError(f"max_turns is {turns}, but an episode has {calls} calls; give max_turns={calls + 1} or more, "
                         "or fewer calls")
    train, test = (make_dataset(split, size, setup.config.seed, name, options.calls)
                   for split, size in (("train", options.train_size), ("test", options.eval_problems)))
    lesson = Lesson("inbox", train, [earned], test, won, play=Play(Inbox),
                    facts={"mailbox": name, "baselines": baselines(test.to_list())})
    if judged:
        teach_judged(options, setup, replace(lesson, note=setup.tiny_note("cannot judge")), RUBRIC, [earned])
    else:
        teach(setup, lesson)
