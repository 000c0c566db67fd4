"""One environment class, played in TRL 1.16 and here with the same scripted policy: the same ids, masks and rewards."""

import copy
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from small_models import random_model
from template_tokenizers import tokenizer_of
from trl_runs import PLAIN

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.engines.base import Conversation
from lowmem_grpo.types import Rollout

TEMPLATE = "qwen2_5"  # of which TRL knows how tool calls are written


@dataclass(frozen=True)
class Played:
    """An episode: all that followed the prompt, and which of it the policy drew."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]  # 1: drawn by the policy
    messages: list[dict[str, Any]]
    rewards: dict[str, float]


def call(name: str, **arguments: Any) -> str:
    """A tool call as the template's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sampled(text: str) -> list[int]:
    """The tokens that a policy draws to say this."""
    tokenizer = tokenizer_of(TEMPLATE)
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


class ScriptedTrainer(trl.GRPOTrainer):
    """TRL's trainer whose sampler says what is scripted: `scripts[row]`, turn by turn."""

    scripts: list[list[str]]  # what the policy says in each row, turn by turn
    drawn: dict[int, list[int]]  # of each row, its last prompt and what was drawn after it

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        answers, rows = [], []
        for ids in prompt_ids:
            row = self.row_of(ids, rows)
            rows.append(row)
            answer = sampled(self.scripts[row].pop(0))[: self.max_completion_length]
            answers.append(answer)
            self.drawn[row] = [*ids, *answer]
        return answers, None

    def row_of(self, ids: list[int], taken: list[int]) -> int:
        """The row whose last prompt and answer these ids continue; a new one in the first call."""
        if len(self.drawn) < len(self.scripts):
            return len(self.drawn)
        return next(row for row, held in self.drawn.items() if row not in taken and ids[: len(held)] == held)


def trl_episodes(
    rows: list[dict[str, Any]], scripts: list[list[str]], reward_funcs: Any = (), tools: Any = None,
    environment_factory: Any = None, rollout_func: Any = None, **settings: Any,
) -> list[Played]:
    """Each row is played twice, once for each of its scripts, side by side; a `rollout_func` needs no scripts."""
    seen: list[list[dict[str, Any]]] = []

    def keep(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    tokenizer = copy.deepcopy(tokenizer_of(TEMPLATE))  # TRL gives it a response template
    model = random_model("Llama")
    model.resize_token_embeddings(len(tokenizer))
    repeated = [dict(row) for row in rows for _ in range(2)]
    args = trl.GRPOConfig(**PLAIN | {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": len(repeated), "num_generations": 2,
        "beta": 0.0} | settings)
    trainer = ScriptedTrainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        reward_funcs=[keep, *reward_funcs], tools=tools, environment_factory=environment_factory,
        rollout_func=rollout_func)
    trainer.scripts, trainer.drawn = [list(script) for script in scripts], {}
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(repeated)
    return [played(batch, row, messages, trainer._logs["rewards"]) for row, messages in enumerate(seen)]


def played(batch: dict[str, Any], row: int, messages: list[dict[str, Any]], rewards: dict[str, Any]) -> Played:
    """One row of TRL's batch, without padding."""
    def real(name: str) -> list[int]:
        mask = batch[f"{name}_mask"][row].bool()
        return batch[f"{name}_ids"][row][mask].tolist()  # type: ignore[no-any-return]

    ids = real("completion")
    paid = {name: list(values)[row] for name, values in rewards.items() if name != "keep"}
    return Played(real("prompt"), ids, batch["tool_mask"][row][: len(ids)].tolist(), messages, paid)


class ScriptedEngine:
    """An engine whose every episode says `scripts[key]`, turn by turn."""

    name, kv_bytes, capabilities = "scripted", 0, frozenset({"converse"})

    def __init__(self, scripts: list[list[str]], tokenizer: Any) -> None:
        self.scripts, self.tokenizer = [list(script) for script in scripts], tokenizer

    def converse(self, conversation: Conversation, params: Any) -> None:
        while requests := conversation.next_requests(busy=False):
            for request in requests:
                conversation.add_rollout(request.key, self.drawn(self.scripts[request.key].pop(0), request.max_tokens))

    def drawn(self, text: str, most: int) -> Rollout:
        """The rollout of a text and the end token, cut to so many tokens."""
        ids = sampled(text)
        kept = ids[:most]
        return Rollout(kept, [-1.0] * len(kept), "stop" if kept == ids else "length",
                       self.tokenizer.decode(kept, skip_special_tokens=True))

    def nothing(self, *_: Any) -> None:
        """What an engine is told, and this one need not know."""

    generate = on_policy_update = sleep = wake = close = nothing


def scripted_trainer(
    folder: Path, rows: list[dict[str, Any]] | None, scripts: list[list[str]], reward_funcs: Any = (),
    settings: dict[str, Any] | None = None, **given: Any,
) -> GRPOTrainer:
    """Our trainer, whose next rollout plays the scripts; `given` are its other parameters."""
    tokenizer, model = tokenizer_of(TEMPLATE), random_model("Llama")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    bare, loaded = FastLanguageModel.from_pretrained(str(folder), max_seq_length=4096, load_in_4bit=False)
    args = GRPOConfig(**{
        "output_dir": str(folder / "run"), "num_generations": 2, "shuffle_dataset": False,
        "per_device_train_batch_size": len(scripts), "max_steps": 1, "parity_steps": 0, "disable_tqdm": True,
        "save_strategy": "no"} | (settings or {}))
    return GRPOTrainer(
        FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False), list(reward_funcs), args, rows,
        processing_class=loaded, engine=ScriptedEngine(scripts, loaded), **given)


class Counter:
    """An environment as TRL takes it: public methods are tools, and it owns its reward."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.total, self.row = start, row
        return f" It begins at {start}."

    def add(self, amount: int) -> str:
        """Add to the total.

        Args:
            amount: How much.

        Returns:
            The new total.
        """
        self.total += amount
        return f"total {self.total}"

    def show(self, times: int = 1) -> str:
        """Show the total.

        Args:
            times: How often.

        Returns:
            The total.
        """
        return f"{self.total} " * times

    def get_reward(self) -> float:
        return float(self.total)


ROWS = [{"prompt": [{"role": "user", "content": f"Count, {n}."}], "start": 10 * n} for n in range(4)]
SCRIPTS = [
    ["nothing to do"], [call("add", amount=3), "13"],
    [call("add", amount=1) + "\n" + call("show"), "11"], ["I add." + call("add", amount=1), call("add", amount=2), "3"],
    [call("show", times=400), "never"], [call("add", amount=1), call("show", times=400), "never"],
    [call("add", amount=1), call("add", amount=2), call("add", amount=4), "never"], ["6"],
]
SETTINGS: dict[str, Any] = {"max_completion_length": 300, "max_tool_calling_iterations": 2}


class Notes:
    """Another environment, which is asynchronous, says nothing at first and pays nothing."""

    def reset(self, **row: Any) -> None:
        assert "environment" not in row
        self.noted: list[str] = []

    async def note(self, text: str) -> str:
        """Note a text.

        Args:
            text: What to note.
        """
        self.noted.append(text)
        return f"noted {len(self.noted)}"


def twice(text: str) -> str:
    """Say a text twice.

    Args:
        text: What to say.
    """
    return text + text


def noted(environments: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
    """How much was noted, in the environments that note."""
    return [float(len(one.noted)) if isinstance(one, Notes) else None for one in environments]


def asked(prompts: list[Any], **_: Any) -> list[float]:
    """The letters of the prompt's last message, with what the environment added."""
    return [float(len(prompt[-1]["content"])) for prompt in prompts]


@pytest.fixture(scope="module")
def theirs() -> list[Played]:
    return trl_episodes(ROWS, SCRIPTS, environment_factory=Counter, **SETTINGS)


def test_trl_plays_what_the_script_says(theirs: list[Played]) -> None:
    turns = [sum(message["role"] == "assistant" for message in one.messages) for one in theirs]
    assert turns == [1, 2, 2, 3, 1, 2, 3, 1]
    assert [one.rewards["Counter"] for one in theirs] == [0.0, 3.0, 11.0, 13.0, 20.0, 21.0, 33.0, 30.0]
    for one, script in zip(theirs, SCRIPTS, strict=True):
        own = [id for id, mine in zip(one.completion_ids, one.mask, strict=True) if mine]
        assert own == [id for text in script[: len([m for m in one.messages if m["role"] == "assistant"])]
                       for id in sampled(text)]


def compare(
    folder: Path, theirs: list[Played], rows: list[dict[str, Any]] | None, scripts: list[list[str]], **given: Any
) -> None:
    """Play the same here, and hold every episode against TRL's."""
    seen: list[Any] = []

    def keep(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(list(one) for one in completions)
        return [0.0] * len(completions)

    functions = [keep, *given.pop("reward_funcs", ())]
    groups = scripted_trainer(folder, rows, scripts, reward_funcs=functions, **given).rollout()
    rollouts = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    for (prompt_ids, rollout), messages, one in zip(rollouts, seen, theirs, strict=True):
        assert prompt_ids == one.prompt_ids and rollout.completion_ids == one.completion_ids
        assert [int(drawn) for drawn in rollout.trained or [True] * len(one.mask)] == one.mask
        paid = {name: value for name, value in rollout.rewards.items() if name != "keep" and value is not None}
        assert paid == {name: value for name, value in one.rewards.items() if not math.isnan(value)}
        assert messages == one.messages


def test_the_same_class_gives_the_same_ids_masks_rewards_and_messages_here(
    theirs: list[Played], tmp_path: Path
) -> None:
    compare(tmp_path, theirs, ROWS, SCRIPTS, settings=SETTINGS, environment_factory=Counter)


def test_several_environments_with_common_tools_are_played_alike(tmp_path: Path) -> None:
    rows = [row | {"environment": name} for row, name in zip(ROWS, ("counter", "notes"), strict=False)]
    scripts = [[call("twice", text="ab") + call("add", amount=2), "2"], ["no"],
               [call("note", text="x"), call("note", text="y") + call("note", text="z"), "3"],
               [call("twice", text="c"), "cc"]]
    given = {"environment_factory": {"counter": Counter, "notes": Notes}, "tools": [twice],
             "reward_funcs": [noted, asked]}
    theirs = trl_episodes(rows, scripts, max_completion_length=300, **given)
    assert [one.rewards["Counter"] for one in theirs[:2]] == [2.0, 0.0] and theirs[2].rewards["noted"] == 3.0
    compare(tmp_path, theirs, rows, scripts, settings={"max_completion_length": 300}, **given)


def test_an_environment_without_a_dataset_is_asked_with_its_observation_alone(tmp_path: Path) -> None:
    class Asking(Counter):
        def reset(self, **row: Any) -> str:
            self.total = 0
            return "Count to 3."

    scripts = [[call("add", amount=3), "3"], ["3"]]
    settings = {"max_completion_length": 300, "max_steps": 1}
    theirs = trl_episodes([{"prompt": [{"role": "user", "content": ""}]}], scripts, environment_factory=Asking,
                          **settings)
    compare(tmp_path, theirs, None, scripts, settings=settings, environment_factory=Asking)


def test_a_rollout_func_is_called_and_read_as_there(tmp_path: Path) -> None:
    said: list[Any] = []

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        said.append([prompt[-1]["content"] for prompt in prompts])
        drawn = [sampled(f"row {place}") for place in range(len(prompts))]
        ids = [[*one, *sampled("context"), *one] for one in drawn]
        return {
            "prompt_ids": [sampled(text) for text in said[-1]], "completion_ids": ids,
            "env_mask": [[int(not len(one) <= at < len(all_) - len(one)) for at in range(len(all_))]
                         for one, all_ in zip(drawn, ids, strict=True)],
            "logprobs": [[-1.0] * len(one) for one in ids], "won": [*range(len(prompts))], "level": 2, "start": [7] * 4,
        }

    def pays(completions: list[Any], won: list[int], level: list[int], start: list[int], **_: Any) -> list[float]:
        return [100.0 * level[place] + 10 * start[place] + each for place, each in enumerate(won)]

    theirs = trl_episodes(ROWS[:2], [], rollout_func=play, reward_funcs=[pays])
    assert [one.rewards["pays"] for one in theirs] == [270.0, 271.0, 272.0, 273.0]
    compare(tmp_path, theirs, ROWS[:2], [[]] * 4, rollout_func=play, reward_funcs=[pays])
    assert said[0] == said[1]
