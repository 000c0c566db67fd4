"""Answers in several turns, where nothing is trained: to measure a model, and for `lowmem-grpo eval`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lowmem_grpo.config.episodes import EpisodeSettings
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptEncoder
from lowmem_grpo.fast_model import adapter_for, as_request
from lowmem_grpo.rollout.assessment import TOGETHER, Right, in_rows, judge_episodes, parts, seeded
from lowmem_grpo.runs.accuracy import Answers
from lowmem_grpo.train.players import Players
from lowmem_grpo.types import RolloutGroup, Turn


@dataclass(frozen=True)
class Play:
    """What an episode is played with."""

    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    """As `environment_factory` of the trainer."""
    tools: Sequence[Callable[..., Any]] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of GRPOConfig, such as max_turns."""

    def answers(
        self, model: Any, rows: list[dict[str, Any]], functions: list[Right], params: SamplingParams,
        adapter: Any = None, together: int = TOGETHER, settings: Mapping[str, Any] | None = None,
    ) -> Answers:
        """`rollout.assessment.answer` for episodes: `params.n` of each row, which `params.max_tokens` bounds.

        `settings` win over the own ones."""
        groups: list[RolloutGroup] = []
        player = self.player(model, params, settings or {})
        with adapter_for(model.inner, as_request(adapter)):
            for part, seed in parts(rows, params, together):
                prompts = [Prompt(row, [], "") for row in part]
                played = player.play(model.engine(), prompts, seeded(params, seed))
                groups += [RolloutGroup(prompt.row, prompt.ids, rollouts)
                           for prompt, rollouts in zip(prompts, played, strict=True)]
        verdicts, metrics = judge_episodes(functions, groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return Answers(
            in_rows([told(rollout.turns) for rollout in rollouts], params.n),
            in_rows([bool(verdict) for verdict in verdicts], params.n), verdicts.count(None),
            sum(rollout.num_trained for rollout in rollouts),
            sum(rollout.finish_reason == "length" for rollout in rollouts), metrics,
        )

    def player(self, model: Any, params: SamplingParams, settings: Mapping[str, Any]) -> Any:
        """What plays with the model's engine."""
        config = GRPOConfig(**{**self.settings, **settings, "max_completion_length": params.max_tokens})
        context = model.loaded.max_seq_length
        players = Players(config, list(self.tools), self.environment, None)
        players.encoder(PromptEncoder(model.loaded.tokenizer, context, config.chat_template_kwargs))
        return players.player(None, context)


def episode_settings(config: GRPOConfig) -> dict[str, Any]:
    """The settings of a run that say how episodes are played."""
    return {entry.name: getattr(config, entry.name) for entry in fields(EpisodeSettings)} | {
        "chat_template_kwargs": config.chat_template_kwargs}


def told(turns: list[Turn]) -> str:
    """An episode as people read it: what the policy said, and what it was told."""
    lines = [(turn.text, [reply.get("content", "") for reply in turn.replies]) for turn in turns]
    return "\n".join(line for said, replies in lines for line in (f"> {said}", *replies))
