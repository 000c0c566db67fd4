"""GRPO: the four verbs sample, score, forward_backward, optim_step; `rollout` and `update`; the loop is in loop.py."""

import inspect
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from lowmem_grpo.config.from_trl import settings_of
from lowmem_grpo.config.grpo import TRLS_SHARE, GRPOConfig, RLOOConfig, longest_prompt
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.config.strategies import PARALLEL
from lowmem_grpo.data.prompts import DifficultyPools, Prompt, PromptEncoder, check_dataset
from lowmem_grpo.data.stream import Stream, source_of
from lowmem_grpo.engines.base import Engine, OnGroup, check_own_engine
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.memory.cards import AUTO
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.models.routes import say_unrouted
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.reward_model import RewardModel
from lowmem_grpo.rollout.assessment import Evaluation
from lowmem_grpo.rollout.collector import Collector, SharedCollector
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.parity import ParityGate
from lowmem_grpo.rollout.sampler import Sampler
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.clock import mean_of
from lowmem_grpo.trainer.episode_setup import EpisodeSetup
from lowmem_grpo.trainer.evaluator import OF_LOSS
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.loop import Trainer
from lowmem_grpo.trainer.overlap import OverlappedTraining, check_overlap
from lowmem_grpo.trainer.parameters import check_model, either, taken_in
from lowmem_grpo.trainer.preflight.first_steps import PlannedTime
from lowmem_grpo.trainer.run_memory import plan_memory
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)
OF_EPISODES = ("turns", "episodes", "tools", "other", "tokens", "groups")  # metrics of episodes only


class GRPOTrainer(Trainer):
    """GRPO with TRL's constructor; `train()` loops over `rollout()` and `update(groups)`, records and saves."""

    args: GRPOConfig
    settings: type[GRPOConfig] = GRPOConfig
    scorer: RewardScorer
    objective: GRPOObjective
    samples = True

    def __init__(
        self, model: Any = None, reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        args: Any = None, train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        reward_processing_classes: Any = None, callbacks: list[Any] | None = None, optimizers: Any = (None, None),
        quantization_config: Any = None, peft_config: Any = None, tools: Any = None, rollout_func: Any = None,
        environment_factory: Any = None, engine: Engine | None = None, tokenizer: Any = None, parse: Any = None,
        **others: Any,
    ) -> None:
        """TRL's parameters, in its order; `engine`, which is the caller's own; and `parse`, which reads the tool calls
        of a form that is not known here (see `Toolbox`). `tokenizer` is an older name of `processing_class`; `others`
        are refused, or options of the settings."""
        check_model(model, type(self))
        config = taken_in(others, settings_of(args, self.settings), GRPOTrainer)
        players = self.players = EpisodeSetup(config, tools, environment_factory, rollout_func, parse)
        overridden = type(self)._calculate_rewards is not GRPOTrainer._calculate_rewards
        self.scorer = RewardScorer(*players.paid(reward_funcs, reward_processing_classes), config.reward_limit,
                                   config.score_while_sampling, players.plays, late_columns=rollout_func is not None,
                                   override=self._calculate_rewards if overridden else None)
        self.given_rows, self.given_eval_rows = train_dataset, eval_dataset
        rows = players.rows(train_dataset)
        super().__init__(model, config, either(processing_class, tokenizer), peft_config, quantization_config,
                         optimizers,
                         (config.max_prompt_length or config.max_completion_length) + config.max_completion_length)
        model, self.said_unrouted = self.model, False
        reward_models = [func for func in self.scorer.funcs if isinstance(func, RewardModel)]
        for reward_model in reward_models:
            reward_model.load(self.policy.device)
        first = self.first_engine(engine)
        longest, context = self.lengths(model.loaded.max_seq_length)
        if config.kl_reference == "start" and (config.beta or not self.takes_prompts):  # steps may have a beta then
            self.policy.keep_reference(config.sync_ref_model)
        memory, peaks = plan_memory(model, config, self.policy, context, "max_completion_length", self.ranks, first,
                                    reward_models)
        self.planned_time = PlannedTime(peaks.plan, model.config)
        encoder = players.encoder(
            PromptEncoder(self.tokenizer, longest, config.chat_template_kwargs, config.truncate_prompts))
        self.turns = players.turns
        pools = DifficultyPools() if config.difficulty_pools else None
        source = source_of(rows, encoder, config.order_seed, config.shuffle_dataset, pools)
        if config.replay_buffer_size and isinstance(rows, Stream):
            raise ValueError("replay_buffer_size is set, and the rows are a stream, in which a kept row cannot be "
                             "found again after a resume; leave it out, or pass a datasets.Dataset")
        self.learn(source, GRPOObjective(config, exact=not self.policy.drops), memory, peaks)
        self.player = players.player(self, context)
        self.eval_sets = self.evaluation_sets(eval_dataset)
        self.sample_with(first, engine is not None, encoder, peaks.plan)
        alarms = Alarms(self.state, config.nothing_to_learn_steps)
        self.write(callbacks, alarms, self.collector.replay)
        if note := config.rounding():
            logger.warning(note)
        for doubt in config.doubts():
            logger.warning(doubt)
        if config.sampling(0).truncates:
            logger.warning("top_p, top_k or min_p cut tokens off: sampled log-probabilities are not the policy's own")

    def lengths(self, context: int) -> tuple[int, int]:
        """(tokens that a prompt may have, tokens that a prompt and what follows it may have), of a model's context."""
        config = self.args
        if (bound := config.vllm_max_model_length or context) > context:
            raise ValueError(f"vllm_max_model_length is {bound}, and the model was loaded with a context of {context} "
                             "tokens; lower it, or load with a larger max_seq_length")
        longest = longest_prompt(config.max_prompt_length, config.max_completion_length, bound)
        return longest, longest + config.max_completion_length

    def first_engine(self, own: Engine | None) -> Engine:
        """The caller's engine, or the model's own; TypeError where it lacks something, ValueError where `use_vllm` asks
        for another."""
        prompts = len(self.ranks.place.share(self.args.prompts_per_generation)) or 1
        self.model.loaded.keeper.expect(prompts * self.args.num_generations)
        if own is not None:
            check_own_engine(own)
        engine = own or self.model.engine(self.policy, self.tokenizer)
        if self.args.use_vllm and engine.name != "vllm":
            raise ValueError(f'use_vllm=True, and the engine is {engine.name}: load the model with '
                             'fast_inference="vllm"')
        share, loaded = self.args.vllm_gpu_memory_utilization, self.model.loaded.keeper.settings.gpu_memory_utilization
        if engine.name == "vllm" and share not in (None, TRLS_SHARE, loaded):
            raise ValueError(f"vllm_gpu_memory_utilization is {share}, and the model was loaded with "
                             f"gpu_memory_utilization={loaded}; set it there, or leave it out")
        return engine

    def sample_with(self, first: Engine, is_callers: bool, encoder: PromptEncoder, plan: MemoryPlan | None) -> None:
        """Make what this trainer samples and scores with; `is_callers` says that the engine is the caller's own."""
        config = self.args
        self.sampler = Sampler(self.model, self.policy, self.tokenizer, self.memory, self.state, self.clock, first,
                               is_callers, self.player)
        self.scoring = Scoring(self.scorer, config, self.state, self.clock, config)
        self.parity = ParityGate(self.policy, config.sampling(None), config.parity_steps, config.parity_bound,
                                 state=self.state, stride=config.steps_per_rollout, memory=self.memory.train,
                                 mismatch=self.objective.mismatch, clock=self.clock,
                                 cache_dtype=getattr(first, "cache_dtype", AUTO),
                                 correction=config.vllm_importance_sampling_correction)
        sets = self.eval_sets
        self.evaluation = Evaluation(self.ranks, ConcatDataset(sets.values()) if isinstance(sets, dict) else sets,
                                     config.sampling(config.seed, n=config.num_generations_eval),
                                     config.per_device_eval_batch_size, encoder, self.sampler, self.scoring)
        self.overlap: OverlappedTraining | None = None
        if mode := config.train_while_sampling:
            check_overlap(mode, self.policy, first, self.scorer, self.player is not None)
            self.overlap = OverlappedTraining(self.learner, self.scoring, config.max_completion_length, plan,
                                              mode == PARALLEL)
        parts = (config, config.draws, self.source, self.state, self.objective, self.sampler, self.scoring, self.parity,
                 self.overlap)
        self.collector = SharedCollector(self.ranks, *parts) if self.ranks.count > 1 else Collector(*parts)

    @property
    def engine(self) -> Engine:
        """The engine that sampled last."""
        return self.sampler.engine

    # The verbs, beside those of `Trainer`; each can be used by itself.

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[RolloutGroup]:
        """Return `params.n` unscored rollouts of each prompt; `on_group` gets those of each prompt as they finish."""
        return self.sampler.sample(prompts, params, on_group)

    def renew_engine(self) -> None:
        """Take the model's engine again, where another model may have sampled since."""
        self.sampler.renew()

    def begin_scoring(self, prompts: list[Prompt]) -> RewardBatch:
        """Return the scorer of these prompts' groups while others are sampled: give its `on_group` to `sample`."""
        return self.scoring.start_batch(prompts)

    def score(self, groups: list[RolloutGroup], scoring: RewardBatch | None = None) -> dict[str, float]:
        """Set rewards, their weighted sum and the advantage of every rollout; returns what functions logged."""
        return self.collector.score(groups, scoring or self.scoring.start_batch(groups))

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Return what each reward function pays for each completion, (N, R) in float32, NaN for None. It has TRL's name
        and arguments (`inputs` are the rows, one for each completion) for a subclass, whose own is called in place of
        the functions, on all completions of a step together."""
        paid = self.scorer.call_rows(inputs, prompts, completions, completion_ids_list, self.state)
        columns = [[math.nan if reward is None else reward for reward in column] for column in paid]
        return torch.tensor(columns, dtype=torch.float32, device=self.policy.device).T

    def rollout(self) -> list[RolloutGroup]:
        """Sample and score the next prompts: groups with rewards and advantages, chosen as `Collector` says."""
        return self.collector.collect()

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        """Train on scored groups: at most `at_most` of the optimizer steps that the settings ask for."""
        if self.policy.routed_layers and not self.said_unrouted:
            self.said_unrouted = say_unrouted([rollout for group in groups for rollout in group.rollouts])
        overlap = self.overlap
        with self.clock.phase("train"), nullcontext() if overlap is None else overlap.gradient(groups) as partial:
            parts = self.parts(groups)
            order = (parts * self.args.num_iterations)[:at_most]
            rest = groups if partial is None else [group for group in groups if not partial.holds(group)]
            self.learner.prepare(rest, len(order), self.state.policy_version)
            # dapo and its kin count the tokens of the generation, bnpo those of the optimizer step
            shared = LOSS_TYPES[self.args.loss_type].counts_generation
            tokens = self.learner.num_tokens(groups) / len(parts) if shared else None
            steps = [self.learner.forward_backward(part, tokens, partial) | self.optim_step() for part in order]
        early = {} if overlap is None else overlap.metrics(partial, groups)
        return mean_of(steps) | self.learner.guard.over(steps) | early

    def parts(self, groups: list[RolloutGroup]) -> list[list[RolloutGroup]]:
        """The groups of each optimizer step that one generation is used for."""
        size = self.args.prompts_per_step
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def next_groups(self) -> list[RolloutGroup]:
        return self.rollout()

    @property
    def sampled(self) -> list[RolloutGroup]:
        """The groups sampled for the last update; some may not have been trained on."""
        return self.collector.sampled

    def optim_step(self) -> dict[str, float]:
        """Also moves the reference toward the policy, where the settings say so and when."""
        metrics = super().optim_step()
        if self.args.sync_ref_model and self.state.global_step % self.args.ref_model_sync_steps == 0:
            self.policy.move_reference(self.args.ref_model_mixup_alpha)
        return metrics

    def weights_changed(self) -> None:
        self.engine.on_policy_update(self.state.policy_version)

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Rewards, lengths and speed of what was sampled, seconds measured and planned, and memory."""
        updates = self.state.global_step - before
        planned = self.planned_time.metrics(self.sampled, groups, updates, self.args.num_iterations,
                                            self.objective.needed_before(updates))
        return {**self.collector.metrics(groups, self.clock.seconds["generate"]), **timing, **planned,
                "memory/kv_bytes": self.engine.kv_bytes, **self.memory.metrics(),
                "policy_version": self.state.policy_version}

    def evaluation_rows(self, dataset: Any, parameter: str = "eval_dataset") -> Any:
        """Rows with prompts; a number asks for so many held-out seeds of an environment."""
        rows = self.players.evaluation_rows(dataset if isinstance(dataset, int) else super().evaluation_rows(
            dataset, parameter))
        check_dataset(rows)
        return rows

    def measure_evaluation(self, rows: Any) -> dict[str, float]:
        """Mean rewards, sampled as in training, and the loss of what was sampled, as of one step on all of it."""
        return self.evaluation.run(rows, self.measure_loss)

    def measure_loss(self, groups: list[RolloutGroup]) -> dict[str, float]:
        return {name: value for name, value in self.learner.measure(groups).items()
                if name.partition("/")[0] in OF_LOSS}

    def evaluation_names(self) -> set[str]:
        names = self.scorer.names
        rollout = Rollout([0], [0.0], "stop", rewards=dict.fromkeys(names, 0.0), reward=0.0)
        sure = {*rollout_metrics([RolloutGroup({}, [0], [rollout])], names), "loss", "entropy"}
        return super().evaluation_names() | sure | ({"kl"} if self.args.beta else set())

    def may_measure(self, name: str) -> bool:
        """Also what only some losses, environments, or functions that can log have."""
        return (super().may_measure(name) or name.partition("/")[0] in {*OF_LOSS, *OF_EPISODES} - {"kl"}
                or any(logs(function) for function in self.scorer.funcs))

    entropy_coef = property(attrgetter("objective.entropy.coef"))  # the weight of the entropy bonus as it is now
    tools = property(attrgetter("players.functions"))  # that the policy may call, those of environments among them
    reward_funcs = property(lambda self: list(self.scorer.funcs))
    reward_func_names = property(lambda self: list(self.scorer.names))

    @property
    def reward_weights(self) -> torch.Tensor:
        """The weights of the rewards (R,), in order."""
        return torch.tensor(self.scorer.weights)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizers of the reward models; None for each function."""
        return [getattr(func, "tokenizer", None) for func in self.scorer.funcs]


class RLOOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the settings of RLOO: args is an RLOOConfig."""

    settings = RLOOConfig


def logs(function: Any) -> bool:
    """Return whether a reward function says that it logs metrics of its own, or is an object that may."""
    named = inspect.signature(function).parameters if inspect.isfunction(function) else ["log_metric"]
    return "log_metric" in named or "log_extra" in named
