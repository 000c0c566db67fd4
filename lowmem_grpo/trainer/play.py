"""Episodes of several turns: their setup in a trainer, and `Play`, which plays them without training."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import EpisodeSettings, SamplingParams
from lowmem_grpo.config.teacher import STORED
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder
from lowmem_grpo.data.stream import Stream, rows_of
from lowmem_grpo.engines.request_output import as_request
from lowmem_grpo.environments.env_spec import EnvSpecs, EpisodeEncoder, Factories, WithPrompts, seeded_rows
from lowmem_grpo.environments.episode import EpisodeBounds
from lowmem_grpo.environments.protocol import short, tools_of
from lowmem_grpo.environments.tools.bodies import python_calls
from lowmem_grpo.fast_model import adapter_for
from lowmem_grpo.rewards.reward_model import with_models
from lowmem_grpo.rollout.assessment import TOGETHER, Right, in_rows, judge, parts, seeded
from lowmem_grpo.rollout.episodes import Episodes
from lowmem_grpo.rollout.rollout_func import RolloutFunction
from lowmem_grpo.rollout.sampler import Player
from lowmem_grpo.rollout.scoring import EnvironmentReward, episode_metrics
from lowmem_grpo.rollout.speakers import HumanEngine, Tell, Watched
from lowmem_grpo.rollout.stored_completions import StoredCompletions
from lowmem_grpo.rollout.teacher_prompts import TeacherSampling
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.trainer.grpo_objective import refuse_states
from lowmem_grpo.trainer.model_setup import loading_options
from lowmem_grpo.trainer.preflight.subject import Turns
from lowmem_grpo.types import Rollout, RolloutGroup, ToolCall, Turn

Function = Callable[..., Any]
TYPED = re.compile(r"[A-Za-z_]\w*\(.*\)")  # a tool call as a person types it


def takes_two(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that says nothing of its arguments
        pass
    return not inspect.iscoroutinefunction(function)


class EpisodeSetup:
    """Checks the tools, environments or rollout function, and makes the trainer's encoder, rewards and player."""

    def __init__(
        self, config: GRPOConfig, tools: Any, environment_factory: Any, rollout_func: Any, parse: Any = None
    ) -> None:
        functions = [] if tools is None else list(tools) if isinstance(tools, (list, tuple)) else [tools]
        for function in functions:
            if not callable(function):
                raise TypeError(f"tools holds {short(function)}; each tool is a function with type hints and a "
                                "docstring")
        self.config, self.parse = config, parse
        self.tools: Sequence[Function] = functions
        self.factories = None if environment_factory is None else Factories(environment_factory)
        if self.factories and any(hasattr(made, "state_key") for made in self.factories.examples.values()):
            refuse_states(config)
        self.rollout_func = rollout_func
        self.specs: EnvSpecs | None = None
        self.images = False  # whether rows may have images
        if rollout_func is not None and not takes_two(rollout_func):
            raise TypeError(f"rollout_func is {short(rollout_func)}; it must be a function of (prompts, trainer), as "
                            "in TRL 1.16, and not async: asyncio.run may run what is, inside of it")
        if rollout_func is not None and (self.tools or self.factories):
            raise ValueError("rollout_func makes the rollouts itself; leave tools and environment_factory out")
        if config.off_policy and (self.plays or rollout_func is not None):
            raise ValueError("teacher='stored' and generate_from_teacher=True say where completions are from; leave "
                             "them, or tools, environment_factory and rollout_func out")

    @property
    def plays(self) -> bool:
        """True if a prompt is answered in several turns."""
        return bool(self.tools) or self.factories is not None

    @property
    def functions(self) -> list[Function]:
        examples = [] if self.factories is None else self.factories.examples.values()
        return [*self.tools, *(tool for sample in examples for tool in tools_of(sample))]

    def paid(self, reward_funcs: Any, processing_classes: Any = None) -> tuple[list[Function], list[float] | None]:
        """Return the reward functions and their weights, including environments' rewards (weight 1, as in TRL)."""
        if reward_funcs is None and self.factories is None and not self.config.teaching:
            raise ValueError("No reward source provided: GRPOTrainer needs reward_funcs, which is a function, a reward "
                             "model, or a list of these, or a teacher")
        rewards = [] if reward_funcs is None else reward_funcs
        functions = list(rewards) if isinstance(rewards, (list, tuple)) else [rewards]
        init = loading_options(self.config.model_init_kwargs or {})
        functions = with_models(functions, processing_classes, init, self.config.chat_template_kwargs)
        weights = self.config.reward_weights
        if self.factories is not None:
            own = [EnvironmentReward(kind) for kind in self.factories.paying]
            if not functions and not own:
                names = ", ".join(sorted({type(sample).__name__ for sample in self.factories.examples.values()}))
                raise ValueError(f"reward_funcs is empty, and {names} has neither step nor get_reward: nothing pays")
            functions = [*functions, *own]
            weights = None if weights is None else [*weights, *[1.0] * len(own)]
        return functions, weights

    def rows(self, dataset: Any) -> Any:
        """Return the training rows; without a dataset, seeds from which an environment makes its tasks."""
        if self.factories is None:
            return rows_of(dataset, images=self.images)
        if dataset is not None:
            return with_prompts(rows_of(dataset))
        if self.factories.several:
            raise ValueError("environment_factory is a dict, which requires a `train_dataset`: each row must say in "
                             "its column `environment` which one it needs")
        if self.config.max_steps < 1:
            raise ValueError("there is no train_dataset, so nothing says how long to train; set max_steps")
        return seeded_rows(self.config.max_steps * self.config.prompts_per_step, self.config.seed)

    def evaluation_rows(self, dataset: Any) -> Any:
        """Return the rows to evaluate on; an int asks for that many held-out seeds."""
        if self.factories is None or dataset is None:
            return dataset
        if isinstance(dataset, int):
            return seeded_rows(dataset, self.config.seed, held_out=True)
        return with_prompts(rows_of(dataset, "eval_dataset"))

    def encoder(self, inner: PromptEncoder) -> PromptEncoder:
        """Return the encoder of rows to prompts; with tools, it refuses a chat template that does not render tools."""
        if not self.plays:
            return inner
        self.specs = EnvSpecs(inner.tokenizer, self.tools, self.factories, self.config.max_tool_tokens,
                         self.config.chat_template_kwargs or {}, self.parse)
        return EpisodeEncoder(inner, self.specs)

    @property
    def turns(self) -> Turns | None:
        """The tools and replies that the policy gets in episodes, for preflight; None without episodes."""
        if self.specs is None:
            return None
        examples = [] if self.factories is None else list(self.factories.examples.values())
        replies = any(callable(getattr(sample, "step", None)) for sample in examples)
        return Turns(self.specs.schemas, replies, bool(examples))

    def player(self, trainer: Any, context: int) -> Player | None:
        """Return the player of episodes or of the rollout function; None if each rollout is a single completion."""
        if self.rollout_func is not None:
            return RolloutFunction(self.rollout_func, trainer)
        if self.config.teacher == STORED:
            return StoredCompletions(trainer)
        if getattr(self.config, "generate_from_teacher", False):
            return TeacherSampling(trainer)
        if self.specs is None:
            return None
        config = self.config
        bounds = EpisodeBounds(config.turn_limit, config.max_completion_length, context, config.max_turn_tokens,
                        config.environment_timeout, config.episode_timeout, config.history == "append")
        return Episodes(self.specs, bounds, lambda: trainer is not None and trainer.interrupt.requested)


def with_prompts(rows: Any) -> Any:
    """Return the rows, each with a prompt (empty if it had none); DataError for a stream."""
    if isinstance(rows, Stream):
        raise DataError("the rows are a stream, which episodes do not take yet; pass list(stream.take(1000))")
    return WithPrompts(rows)


@dataclass(frozen=True)
class Play:
    """The environment, tools and settings with which episodes are played."""

    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    """As `environment_factory` of the trainer."""
    tools: Sequence[Callable[..., Any]] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # fields of GRPOConfig, such as max_turns

    def answers(
        self, model: Any, rows: list[dict[str, Any]], functions: list[Right], params: SamplingParams,
        adapter: Any = None, together: int = TOGETHER, settings: Mapping[str, Any] | None = None,
    ) -> Answers:
        """Play `params.n` episodes of each row; return answers and verdicts. `settings` override `self.settings`."""
        groups: list[RolloutGroup] = []
        player = self.player(model, params, settings or {})
        with adapter_for(model.inner, as_request(adapter)):
            for part, seed in parts(rows, params, together):
                prompts = [Prompt(row, [], "") for row in part]
                played = player.play(model.engine(), prompts, seeded(params, seed))
                groups += [RolloutGroup(prompt.row, prompt.ids, rollouts)
                           for prompt, rollouts in zip(prompts, played, strict=True)]
        verdicts, metrics = judge(functions, groups, episodes=True)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return Answers(in_rows([as_text(rollout.turns) for rollout in rollouts], params.n),
                       in_rows([bool(verdict) for verdict in verdicts], params.n), verdicts.count(None),
                       sum(rollout.num_trained for rollout in rollouts),
                       sum(rollout.finish_reason == "length" for rollout in rollouts), metrics,
                       episode_metrics(rollouts))

    def episode(
        self, model: Any, row: dict[str, Any], right: Right, params: SamplingParams, tell: Tell, adapter: Any = None,
        ask: Callable[[], str] | None = None, settings: Mapping[str, Any] | None = None,
    ) -> tuple[Rollout, bool | None]:
        """Play one episode; return it with its verdict. `tell` is called with each turn; with `ask`, a person plays."""
        player = self.player(model, params, settings or {}, typed_calls if ask else None)
        engine = Watched(HumanEngine(model.loaded.tokenizer, ask), tell, base=model.engine) if ask \
            else Watched(model.engine(), tell, "model")
        prompt = Prompt(row, [], "")
        with adapter_for(model.inner, as_request(adapter)):
            ((rollout,),) = player.play(engine, [prompt], params)
        (verdict,), _ = judge([right], [RolloutGroup(row, prompt.ids, [rollout])], episodes=True)
        return rollout, verdict

    def player(
        self, model: Any, params: SamplingParams, settings: Mapping[str, Any], parse: Callable[..., Any] | None = None
    ) -> Any:
        """Return a player of episodes for the model; `parse` as in `GRPOTrainer`."""
        config = GRPOConfig(**{**self.settings, **settings, "max_completion_length": params.max_tokens})
        context = model.loaded.max_seq_length
        players = EpisodeSetup(config, list(self.tools), self.environment, None, parse)
        players.encoder(PromptEncoder(model.loaded.tokenizer, context, config.chat_template_kwargs))
        return players.player(None, context)


def episode_settings(config: GRPOConfig) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(EpisodeSettings)} | {
        "chat_template_kwargs": config.chat_template_kwargs}


def typed_calls(text: str) -> list[ToolCall]:
    """Return the tool calls in a person's text, one per line, `name(key=value)`; a text without calls is an answer."""
    lines = [line.strip() for line in text.splitlines()]
    return [call for line in lines if TYPED.fullmatch(line) for call in python_calls(line, {})]


def as_text(turns: list[Turn]) -> str:
    """Return an episode as text for people: the policy's completions, and the replies to them."""
    lines = [(turn.text, [reply.get("content", "") for reply in turn.replies]) for turn in turns]
    return "\n".join(line for said, replies in lines for line in (f"> {said}", *replies))
