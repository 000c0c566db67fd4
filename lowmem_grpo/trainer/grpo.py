"""The trainers of GRPO and RLOO, with TRL's constructor. The training loop is in loop.py."""

import inspect
import math
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from lowmem_grpo.config.from_trl import check_model, either, settings_of, taken_in
from lowmem_grpo.config.grpo import GRPOConfig, RLOOConfig
from lowmem_grpo.config.sampling import PARALLEL, SamplingParams
from lowmem_grpo.data.difficulty import DifficultyPools
from lowmem_grpo.data.harmony import message_reader
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource, check_dataset
from lowmem_grpo.data.stream import Stream, source_of
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.losses.advantages import GAE
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.reward_model import RewardModel
from lowmem_grpo.rollout.assessment import OF_LOSS, Evaluation
from lowmem_grpo.rollout.collector import Collector, SharedCollector
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring, rollout_metrics
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.model_setup import may_read_images
from lowmem_grpo.trainer.overlap import OverlappedTraining, check_overlap
from lowmem_grpo.trainer.parts import (
    PolicyParts,
    bring_model,
    first_engine,
    lengths,
    make_policy_parts,
    prompt_encoder,
    tokens_of_row,
)
from lowmem_grpo.trainer.play import EpisodeSetup
from lowmem_grpo.trainer.trl_api import TrlApi
from lowmem_grpo.types import OnGroup, Rollout, RolloutGroup

OF_EPISODES = ("turns", "episodes", "tools", "other", "tokens", "groups")  # metrics of episodes only


class GRPOTrainer(TrlApi):
    """GRPO with TRL's constructor. `train()` repeats `rollout()` and `update(groups)`, and saves checkpoints."""

    args: GRPOConfig
    parts: PolicyParts
    settings: type[GRPOConfig] = GRPOConfig
    objective_class: type[GRPOObjective] = GRPOObjective
    does_sampling = True

    def __init__(
        self, model: Any = None, reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        args: Any = None, train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        reward_processing_classes: Any = None, callbacks: list[Any] | None = None, optimizers: Any = (None, None),
        quantization_config: Any = None, peft_config: Any = None, tools: Any = None, rollout_func: Any = None,
        environment_factory: Any = None, engine: Engine | None = None, tokenizer: Any = None, parse: Any = None,
        teacher: Any = None, **others: Any,
    ) -> None:
        """The parameters are TRL's, in TRL's order, and three of our own: `engine`, the caller's rollout engine,
        `parse`, a parser of tool calls in a format that is not built in (see `Toolbox`), and `teacher`, as in
        GRPOConfig or a loaded model. `tokenizer` is an older name of `processing_class`. `others` are fields of
        GRPOConfig; any other name is refused."""
        check_model(model, type(self))
        if teacher is not None:
            teacher = os.fspath(teacher) if isinstance(teacher, os.PathLike) else teacher
            others["teacher"] = teacher if isinstance(teacher, str) else name_of(teacher)
        config = taken_in(others, settings_of(args, self.settings), type(self))
        if config.needs_teacher and not config.teaching:
            raise ValueError(f"{type(config).__name__} needs a teacher and a distillation_weight: pass teacher_model, "
                             "a model, its name, or the folder of an adapter for the same base model; or set teacher")
        players = self.players = EpisodeSetup(config, tools, environment_factory, rollout_func, parse)
        overridden = type(self)._calculate_rewards is not GRPOTrainer._calculate_rewards
        self.scorer = RewardScorer(*players.paid(reward_funcs, reward_processing_classes), config.reward_limit,
                                   config.score_while_sampling, players.plays, late_columns=rollout_func is not None,
                                   override=self._calculate_rewards if overridden else None,
                                   may_be_empty=config.teaching)
        for name in ("dynamic_sampling_rounds", "difficulty_pools", "advantage_estimator"):
            if getattr(config, name) not in (0, False, GRPOConfig.advantage_estimator) and not self.scorer.funcs:
                raise ValueError(f"{name} is {getattr(config, name)!r}, which goes by rewards, and there are none; "
                                 "leave it out, or give reward_funcs")
        self.given_rows, self.given_eval_rows = train_dataset, eval_dataset
        players.images = not players.plays and rollout_func is None and may_read_images(model)
        rows = players.rows(train_dataset)
        if config.teaching:
            from lowmem_grpo.trainer.teaching import check_teacher, prompts_of

            prompts_of(config).check(rows, players.plays)
            check_teacher(config, None if isinstance(teacher, str) else teacher)
        if config.critic_adapter is not None:
            from lowmem_grpo.trainer.critic import adapter_folder

            adapter_folder(config.critic_adapter)
        trained = bring_model(model, config, either(processing_class, tokenizer), peft_config, quantization_config,
                              tokens_of_row(config))
        self.scorer.reads = message_reader(trained.tokenizer)
        reward_models = [func for func in self.scorer.funcs if isinstance(func, RewardModel)]
        for reward_model in reward_models:
            reward_model.load(trained.policy.device)
        adapters: list[Any] = [func for func in self.scorer.funcs if getattr(func, "on_policys_base", False)]
        for number, adapter in enumerate(adapters):
            adapter.join(trained, number, config.chat_template_kwargs)
        first = first_engine(trained, config, engine)
        longest, context = lengths(config, trained.context)
        encoder = players.encoder(prompt_encoder(trained, longest, config, players.images))
        self.turns, self.player = players.turns, players.player(self, context)
        self.teaching: Any = None
        self.taught: dict[str, float] = {}  # metrics of what the teacher read of the step's groups
        if config.teaching:
            from lowmem_grpo.trainer.teaching import Teaching

            self.teaching = Teaching(config, trained, encoder, None if isinstance(teacher, str) else teacher)
        beside: Any = self.teaching
        learner_class: type[Learner] = Learner
        if config.advantage_estimator == GAE:
            from lowmem_grpo.trainer.critic import Critic, CriticLearner

            beside, learner_class = Critic(config, trained.policy, self.scorer), CriticLearner
        parts = make_policy_parts(trained, config, prompt_source(config, rows, encoder), first, context, optimizers,
                                  [*reward_models, *adapters],
                                  objective_class=beside.objective if beside else self.objective_class,
                                  planned=beside and beside.planned, learner_class=learner_class)
        for adapter in adapters:
            adapter.learner = parts.learner
        self.parity = parts.parity
        self.sampler = Sampler(trained.model, trained.policy, trained.tokenizer, parts.memory, parts.state, parts.clock,
                               first, engine is not None, self.player)
        self.scoring = Scoring(self.scorer, config, parts.state, parts.clock, config)
        mode = config.train_while_sampling
        if mode:
            check_overlap(mode, parts.policy, first, self.scorer, self.player is not None)
        self.overlap = OverlappedTraining(parts.learner, self.scoring, config.max_completion_length, parts.peaks.plan,
                                          mode == PARALLEL) if mode else None
        shared = (config, config.draws, parts.source, parts.state, parts.objective, self.sampler, self.scoring,
                  self.parity, self.overlap)
        ranks = trained.ranks
        self.collector = SharedCollector(ranks, *shared) if ranks.count > 1 else Collector(*shared)
        super().__init__(parts, callbacks, eval_dataset,
                         dict(zip(self.scorer.names, self.scorer.weights, strict=True)), self.collector.replay)
        sets = self.eval_sets
        self.evaluation = Evaluation(ranks, ConcatDataset(sets.values()) if isinstance(sets, dict) else sets,
                                     config.sampling(config.seed, n=config.num_generations_eval),
                                     config.per_device_eval_batch_size, encoder, self.sampler, self.scoring)

    engine = property(attrgetter("sampler.engine"))  # the one that sampled last

    # The verbs, beside those of `Trainer`; each can be called on its own.

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[RolloutGroup]:
        """Return `params.n` unscored rollouts of each prompt; call `on_group` when a prompt's rollouts are complete."""
        return self.sampler.sample(prompts, params, on_group)

    def renew_engine(self) -> None:
        self.sampler.renew()

    def score(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Set rewards and advantages of the rollouts, and return the reward functions' metrics."""
        return self.collector.score(groups, self.scoring.start_batch(groups))

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Return the rewards (N, R) of N completions by R functions, in float32, with NaN for None; `inputs` are the
        rows. A subclass's override is called once per step, in place of the functions."""
        paid = self.scorer.call_rows(inputs, prompts, completions, completion_ids_list, self.state)
        columns = [[math.nan if reward is None else reward for reward in column] for column in paid]
        return torch.tensor(columns, dtype=torch.float32, device=self.policy.device).T

    def rollout(self) -> list[RolloutGroup]:
        """Sample and score the next prompts; return groups with rewards and advantages, selected by `Collector`."""
        groups = self.collector.collect()
        self.taught.update(self.read_by_teacher(groups))
        return groups

    def read_by_teacher(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Give the teacher, if there is one, what it needs to read scored groups; return metrics of that."""
        return {} if self.teaching is None else self.teaching.read(groups)

    def split_steps(self, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
        size = self.args.prompts_per_step
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def next_groups(self) -> list[RolloutGroup]:
        return self.rollout()

    @property
    def sampled(self) -> list[RolloutGroup]:
        """The groups sampled for the last update; some may not have been trained on."""
        return self.collector.sampled

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Return the sampled groups' rewards, lengths and speed, measured and planned seconds, and memory use."""
        return {**self.collector.metrics(groups, self.parts.clock.seconds["generate"]), **self.taught,
                **super().measured(before, groups, timing)}

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> Any:
        """Return rows with prompts. If `dataset` is an int, return that many held-out seeds of an environment."""
        rows = self.players.evaluation_rows(dataset if isinstance(dataset, int) else super().evaluation_rows(
            dataset, parameter))
        check_dataset(rows)
        return rows

    def measure_evaluation(self, rows: Any) -> dict[str, float]:
        """Sample completions as in training; return their mean rewards, and the loss of one step on all of them."""
        return self.evaluation.run(rows, self.measure_loss)

    def measure_loss(self, groups: list[RolloutGroup]) -> dict[str, float]:
        self.read_by_teacher(groups)
        return {name: value for name, value in self.learner.measure(groups).items()
                if name.partition("/")[0] in OF_LOSS}

    def evaluation_names(self) -> set[str]:
        names = self.scorer.names
        rollout = Rollout([0], [0.0], "stop", rewards=dict.fromkeys(names, 0.0), reward=0.0 if names else None)
        sure = {*rollout_metrics([RolloutGroup({}, [0], [rollout])], names), "loss", "entropy"}
        return super().evaluation_names() | sure | ({"kl"} if self.args.kl_weight else set())

    def may_measure(self, name: str) -> bool:
        return (super().may_measure(name) or name.partition("/")[0] in {*OF_LOSS, *OF_EPISODES} - {"kl"}
                or any(logs(function) for function in self.scorer.funcs))

    @property
    def entropy_coef(self) -> float:
        """The current weight of the entropy bonus."""
        entropy = self.parts.objective.entropy
        return 0.0 if entropy is None else entropy.coef

    tools = property(attrgetter("players.functions"))  # those of environments included
    reward_funcs = property(lambda self: list(self.scorer.funcs))
    reward_func_names = property(lambda self: list(self.scorer.names))

    @property
    def reward_weights(self) -> torch.Tensor:
        """The weights of the reward functions (R,)."""
        return torch.tensor(self.scorer.weights)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """One entry for each reward: the tokenizer of a reward model, or None for a function."""
        return [getattr(func, "tokenizer", None) for func in self.scorer.funcs]


class RLOOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the settings of RLOO: args is an RLOOConfig."""

    settings = RLOOConfig


def name_of(model: Any) -> str:
    """Return the name of a loaded model, or the address of a served one, for records."""
    loaded = getattr(model, "loaded", None)
    return str(getattr(loaded, "name", None) or getattr(model, "url", "")
               or getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)


def logs(function: Any) -> bool:
    """Return whether a reward function takes `log_metric` or `log_extra`; True for a callable that is no function."""
    named = inspect.signature(function).parameters if inspect.isfunction(function) else ["log_metric"]
    return "log_metric" in named or "log_extra" in named


def prompt_source(config: GRPOConfig, rows: Any, encoder: PromptEncoder) -> PromptSource:
    """Return the source of a run's prompts. ValueError for a replay buffer if the rows are a stream."""
    if config.replay_buffer_size and isinstance(rows, Stream):
        raise ValueError("replay_buffer_size is set, and the rows are a stream, in which a kept row cannot be "
                         "found again after a resume; leave it out, or pass a datasets.Dataset")
    pools = DifficultyPools() if config.difficulty_pools else None
    runs_on = config.difficulty_pools or config.dynamic_sampling_rounds  # then nobody knows how many rows a step takes
    return source_of(rows, encoder, config.order_seed, config.shuffle_dataset, pools,
                     None if runs_on else config.whole_prompts,
                     horizon=max(0, config.max_steps * config.prompts_per_step // config.num_iterations))
