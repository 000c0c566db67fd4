"""Episodes of several turns without training: to evaluate a model, and for `lowmem-grpo eval`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import EpisodeSettings, SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptEncoder
from lowmem_grpo.environments.tools.bodies import python_calls
from lowmem_grpo.fast_model import adapter_for, as_request
from lowmem_grpo.rollout.assessment import TOGETHER, Right, in_rows, judge, parts, seeded
from lowmem_grpo.rollout.scoring import episode_metrics
from lowmem_grpo.rollout.speakers import HumanEngine, Tell, Watched
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.trainer.episode_setup import EpisodeSetup
from lowmem_grpo.types import Rollout, RolloutGroup, ToolCall, Turn

TYPED = re.compile(r"[A-Za-z_]\w*\(.*\)")  # a tool call as a person types it


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
        """Answer rows by playing episodes, as `assessment.answer` does; `settings` override those of the object."""
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
        """Play one episode and return it with its verdict; `tell` gets each turn, and with `ask` a person plays."""
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
    """Return the settings of a run that concern episodes."""
    return {entry.name: getattr(config, entry.name) for entry in fields(EpisodeSettings)} | {
        "chat_template_kwargs": config.chat_template_kwargs}


def typed_calls(text: str) -> list[ToolCall]:
    """Return the tool calls in a person's text, one per line, `name(key=value)`; text without any is an answer."""
    lines = [line.strip() for line in text.splitlines()]
    return [call for line in lines if TYPED.fullmatch(line) for call in python_calls(line, {})]


def as_text(turns: list[Turn]) -> str:
    """Return an episode as text for people: the policy's completions, and the replies to them."""
    lines = [(turn.text, [reply.get("content", "") for reply in turn.replies]) for turn in turns]
    return "\n".join(line for said, replies in lines for line in (f"> {said}", *replies))
