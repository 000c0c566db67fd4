"""GRPOTrainer with environments, tools and seeds, from its constructor to the records of a run."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from scripted import Hang
from trainer_runs import ROWS, SMALL, adapter, load, make, same

from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.environments.env_spec import seeded_rows
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer.play import EpisodeSetup
from lowmem_grpo.trainer.preflight.checks import PreflightError

PLAY: dict[str, Any] = {"max_completion_length": 96, "max_turn_tokens": 8, "max_turns": 3, "report_to": "none"}


class Digits:
    """Pays the digits that are said, more the earlier they come; a seed makes the task."""

    closed = 0

    def reset(self, seed: int = 0) -> str:
        self.wanted, self.left = random.Random(seed).randrange(10), 2
        return f"Say {self.wanted}."

    def step(self, reply: str) -> tuple[str, float, bool]:
        self.left -= 1
        return f"{self.left} left", float(sum(letter.isdigit() for letter in reply)), self.left == 0

    def close(self) -> None:
        Digits.closed += 1


class EngineWorker:
    """TRL's kind: one tool, and a reward that the environment owns."""

    def reset(self, **row: Any) -> None:
        self.asked = 0

    def look(self, drawer: int) -> str:
        """Look into a drawer.

        Args:
            drawer: its number
        """
        self.asked += 1
        return "nothing"

    def get_reward(self) -> float:
        return 0.5 + self.asked


def trainer_of(folder: Path, model: Any = None, reward_funcs: Any = None, rows: Any = None, eval_dataset: Any = None,
               factory: Any = Digits, tools: Any = None, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(output_dir=str(folder), **(SMALL | PLAY | settings))
    return GRPOTrainer(model or load(), reward_funcs, config, rows, eval_dataset, environment_factory=factory,
                       tools=tools)


def test_an_environment_that_makes_its_tasks_and_pays_needs_no_rows_and_no_reward(tmp_path: Path) -> None:
    Digits.closed = 0
    trainer = trainer_of(tmp_path, eval_dataset=3, eval_strategy="steps", eval_steps=1)
    before = adapter(trainer)
    trainer.train()
    assert not same(before, adapter(trainer))
    measured = read_lines(tmp_path / "metrics.jsonl")
    step = measured[0]
    assert step["rewards/Digits/mean"] > 0 and step["turns/mean"] == 2 and step["sampling/parity/mean"] < 1e-3
    assert sum("eval_rewards/Digits/mean" in line for line in measured) == 2
    episodes = read_lines(tmp_path / "completions.jsonl")
    assert len(episodes) == 16 and {one["ending"] for one in episodes} <= {"done", "context", "max_tokens"}
    sampled = 16 + 3 * 2 * trainer.args.num_generations
    assert Digits.closed == sampled + 1, "each environment is closed once, that which was tried at the start too"
    assert all(len(one["turns"]) == one["num_turns"] for one in episodes)


def test_two_runs_of_one_seed_are_the_same_and_the_held_out_seeds_are_others(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        trainer = trainer_of(tmp_path / name)
        trainer.train()
        found.append(adapter(trainer))
    assert same(*found)
    seeds = {row["seed"] for row in seeded_rows(500, 7)}
    assert not seeds & {row["seed"] for row in seeded_rows(500, 7, held_out=True)} and len(seeds) == 500


def test_trls_class_runs_unchanged_beside_a_reward_function(tmp_path: Path) -> None:
    seen: list[Any] = []

    def count(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
        seen.extend(environments)
        return [float(len(each[0]["content"])) for each in completions]

    model = load(max_seq_length=512)
    model.loaded.tokenizer.chat_template = TOOLS
    trainer = trainer_of(tmp_path, model, [count], ROWS, factory=EngineWorker)
    trainer.train()
    assert all(isinstance(one, EngineWorker) for one in seen) and len(seen) == 16
    [first, *_] = read_lines(tmp_path / "completions.jsonl")
    assert set(first["rewards"]) == {"count", "EngineWorker"} and first["rewards"]["EngineWorker"] >= 0.5


class Task:
    """TRL's kind without a tool: it only makes the task."""

    said: str | None = "Say 7."

    def reset(self, **row: Any) -> str | None:
        return self.said


class Silent(Task):
    said = None


@pytest.mark.parametrize("factory", [Task, Silent])
def test_an_environment_may_have_only_a_reset_which_may_return_nothing(
    factory: type[Task], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, None, [lambda completions, **_: list(range(len(completions)))], factory=factory)
    trainer.train()
    asked = [{"role": "user", "content": factory.said or ""}]  # TRL's placeholder, with what reset returned
    expected = trainer.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert {tuple(group.prompt_ids) for group in trainer.sampled} == {tuple(expected)}
    assert {one["num_turns"] for one in read_lines(tmp_path / "completions.jsonl")} == {1}
    told = [record for record in caplog.records if "reads an empty message of the user, as in TRL" in record.message]
    assert len(told) == (factory is Silent)


TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class NoReward:
    def reset(self, **_: Any) -> None: ...

    def look(self) -> str:
        """Look."""
        return ""


@pytest.mark.parametrize(("given", "error", "said"), [
    ({"factory": NoReward, "reward_funcs": []}, ValueError, "NoReward has neither step nor get_reward: nothing pays"),
    ({"factory": None}, ValueError, "No reward source provided: GRPOTrainer needs reward_funcs"),
    ({"factory": 3}, TypeError, "environment_factory is 3; pass a class"),
    ({"factory": {"a": Digits}}, ValueError, "requires a `train_dataset`: each row must say in its column"),
    ({"max_steps": -1}, ValueError, "there is no train_dataset, so nothing says how long to train; set max_steps"),
    ({"tools": "look"}, TypeError, "tools holds 'look'; each tool is a function"),
    ({"max_turns": 3, "max_tool_calling_iterations": 3}, ValueError, "that many calls are 4 turns; give one of them"),
    ({"max_turns": 0}, ValueError, "max_turns is 0; it must be"),
    ({"history": "trim"}, ValueError, "history is 'trim'"),
    ({"turn_discount": 1.5}, ValueError, "turn_discount is 1.5; it must be in [0, 1]"),
    ({"truncate_prompts": True}, ValueError, "truncate_prompts=True would cut off"),
])
def test_what_cannot_be_played_is_refused_before_anything_is_sampled(
    given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        trainer_of(tmp_path, **given)
    assert said in str(raised.value)


def test_a_row_that_names_no_environment_is_refused_before_step_one(tmp_path: Path) -> None:
    rows = [{"prompt": ROWS[0]["prompt"], "environment": "b"}]
    with pytest.raises(PreflightError, match=r"'b', which is not among the environments\. .*environment_factory has a"):
        trainer_of(tmp_path, factory={"a": Digits}, rows=rows).train()


def test_a_template_without_tools_is_refused_before_step_one_with_a_family_that_has_them(tmp_path: Path) -> None:
    with pytest.raises((PreflightError, ValueError), match="Qwen"):
        trainer_of(tmp_path, factory=EngineWorker, rows=ROWS).train()


def test_single_turns_know_nothing_of_episodes(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    assert trainer.player is None and trainer.sampler.player is None and trainer.turns is None
    trainer.train()
    [step] = read_lines(tmp_path / "metrics.jsonl")
    assert not [name for name in step if name.startswith(("turns/", "episodes/", "tools/"))]
    assert set(read_lines(tmp_path / "completions.jsonl")[0]) == {
        "step", "prompt", "role", "completion", "rewards", "reward", "advantage", "tokens", "finish_reason"}


class Slow(Digits):
    """Hangs in every game but the first four that begin."""

    games = itertools.count()
    hang: Any = None

    def reset(self, seed: int = 0) -> str:
        self.hangs = next(self.games) >= 4
        return super().reset(seed)

    def step(self, reply: str) -> tuple[str, float, bool]:
        if self.hangs:
            Slow.hang()
        return super().step(reply)


def test_an_environment_that_hangs_costs_its_groups_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = Hang(monkeypatch)
    monkeypatch.setattr(Slow, "hang", hang)
    monkeypatch.setattr(Slow, "games", itertools.count())
    trainer_of(tmp_path, factory=Slow, environment_timeout=61, max_steps=1).train()
    hang.end()
    assert "Slow.step took more than 61 s" in caplog.text
    [step] = read_lines(tmp_path / "metrics.jsonl")
    assert step["episodes/timeout"] == 0.5


def test_a_trainer_shows_the_tools_that_the_policy_may_call_as_trl_does() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    players = EpisodeSetup(GRPOConfig(), [add], EngineWorker, None)
    assert [tool.__name__ for tool in players.functions] == ["add", "look"]  # get_reward and reset are no tools


async def play_async(prompts: Any, trainer: Any) -> None: ...


@pytest.mark.parametrize("function", ["play", lambda prompts: {}, lambda prompts, args, tokenizer: {}, play_async])
def test_a_rollout_func_that_could_not_be_called_is_refused_before_anything_is_loaded(function: Any) -> None:
    with pytest.raises(TypeError, match=r"rollout_func is .*; it must be a function of \(prompts, trainer\)"):
        EpisodeSetup(GRPOConfig(), None, None, function)
    assert EpisodeSetup(GRPOConfig(), None, None, lambda prompts, trainer, more=3: {}).rollout_func
