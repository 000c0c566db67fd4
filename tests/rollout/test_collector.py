"""Which groups an update is made of, without a model: dynamic sampling, replay and baselines."""

from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from tables import every_row
from template_tokenizers import CharTokenizer

from lowmem_grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptEncoder, PromptSource
from lowmem_grpo.engines.base import Pace
from lowmem_grpo.rewards import Reward, RewardScorer
from lowmem_grpo.rollout.collector import Collector
from lowmem_grpo.rollout.scoring import Scoring
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.types import Rollout, RolloutGroup

REWARDS: dict[str, list[float | None]] = {  # of the four completions of a row, and of its greedy one
    "mixed": [0, 1, 0, 1, 0.25], "rare": [0, 0, 0, 1, 1], "wide": [0, 4, 0, 4, 1], "solved": [1, 1, 1, 1, 1],
    "failed": [0, 0, 0, 0, 0], "silent": [None] * 5, "all but greedy": [0, 1, 0, 1, None], "lost": [None] * 5,
    "played": [0, 1, 0, 1, 0.25],
}
ENDINGS = {"lost": "timeout", "played": "done"}  # of episodes
GREEDY = 4


def table(completions: list[str], kind: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float | None]:
    """The reward that REWARDS has for a completion, which is its number."""
    log_metric("greedy", fmean(int(text) == GREEDY for text in completions))
    log_extra("number", completions)
    return [REWARDS[k][int(text)] for k, text in zip(kind, completions, strict=True)]


class Loop:
    """A collector of four groups of four, without a model: rows come in order, and their kind decides the rewards."""

    def __init__(self, *kinds: str, **settings: Any) -> None:
        self.config = GRPOConfig(**({"num_generations": 4, "per_device_train_batch_size": 16} | settings))
        rows = [{"prompt": f"row {index}", "kind": kind, "index": index} for index, kind in enumerate(kinds)]
        self.source = PromptSource(rows, PromptEncoder(CharTokenizer(), 20), 0, shuffle=False)  # type: ignore[arg-type]
        self.state, self.calls, self.watched = TrainerState(), [], []  # type: ignore[var-annotated]
        self.scoring = Scoring(RewardScorer(table), self.config, self.state)
        self.collector = Collector(
            self.config, self.config.draws, self.source, self.state, GRPOObjective(self.config),
            self, self.scoring, self,  # type: ignore[arg-type]
        )

    def sample(self, prompts: list[Prompt], params: SamplingParams, on_group: Any = None,
               until: Any = None) -> list[RolloutGroup]:
        self.calls.append((len(prompts), params))
        numbers = [GREEDY] if params.temperature == 0 else range(params.n)
        return [RolloutGroup(prompt.row, prompt.ids, [
            Rollout([1, 2, 3], [-1.0] * 3, "stop" if number % 2 == 0 else "length", str(number),
                    self.state.policy_version, ending=ENDINGS.get(prompt.row["kind"]))
            for number in numbers], row_index=prompt.index) for prompt in prompts]

    def pace(self) -> Pace:
        """Of one call, in which four sequences ran."""
        found = Pace()
        found.read(40)
        for running in (4, 4):
            found.step(running)
        return found

    def watch(self, groups: list[RolloutGroup]) -> dict[str, float]:
        self.watched.append(rows_of(groups))
        return {"watched": len(groups)}

    def step(self) -> list[RolloutGroup]:
        """One rollout, and what an update does to the state."""
        groups = self.collector.collect()
        self.state.global_step += 1
        self.state.policy_version += 1
        return groups

    def counts(self, *names: str) -> list[float]:
        return [self.collector.counts[f"sampling/{name}"] for name in names]


def rows_of(groups: list[RolloutGroup]) -> list[int]:
    return [group.row["index"] for group in groups]


def advantages(groups: list[RolloutGroup]) -> list[list[float]]:
    return [[rollout.advantage for rollout in group.rollouts] for group in groups]


# A required function


class Judge(Reward):
    """What REWARDS says, None for the completion "2" of a "mute" row; or another number in each group."""

    required = True

    def __init__(self) -> None:
        super().__init__("judge", ("kind", "index"))

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        return [None if (kind, text) == ("mute", "2") else 1e3 if kind == "mute" else REWARDS[kind][int(text)] + index
                for text, kind, index in zip(texts, columns["kind"], columns["index"], strict=True)]


def judged_loop(*kinds: str, weights: list[float] | None = None, **settings: Any) -> Loop:
    loop = Loop(*kinds, per_device_train_batch_size=4 * min(4, len(kinds)), **settings)
    loop.config.reward_weights = weights
    loop.scoring.scorer = RewardScorer([Judge(), ones], weights)
    return loop


def ones(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@every_row("settings", [
    {}, {"scale_rewards": "batch"}, {"advantage_estimator": "rloo"}, {"advantage_estimator": "passk"},
    {"advantage_estimator": "reinforce++"}, {"advantage_estimator": "reinforce++_baseline"},
    {"multi_objective_aggregation": "normalize_then_sum"}, {"advantage_estimator": "remax"},
])
def test_a_group_that_a_required_function_cannot_judge_has_no_advantage_and_changes_no_other(
    settings: dict[str, Any],
) -> None:
    loop = judged_loop("mixed", "mute", "rare", **settings)
    groups = loop.step()
    without = judged_loop("mixed", "rare", **settings)
    without.source.dataset[1]["index"] = 2
    expected = without.step()
    assert advantages([groups[0], groups[2]]) == advantages(expected)
    assert advantages([groups[1]]) == [[0.0] * 4] and any(advantages(expected)[0])
    assert [group.unjudged for group in groups] == [False, True, False]
    assert [rollout.reward for rollout in groups[1].rollouts] == [None] * 4
    assert [rollout.rewards["judge"] for rollout in groups[1].rollouts] == [1e3, 1e3, None, 1e3]
    measured = loop.collector.metrics(groups, 1.0)
    assert measured["rewards/judge/unjudged"] == 1 and "rewards/ones/unjudged" not in measured
    assert (measured["groups/with_signal"], measured["reward"]) == (2, without.collector.metrics(expected, 1)["reward"])


def test_a_required_function_of_weight_0_takes_no_group_out() -> None:
    loop = judged_loop("mute", weights=[0.0, 1.0])
    groups = loop.step()
    assert not groups[0].unjudged and [rollout.reward for rollout in groups[0].rollouts] == [1.0] * 4
    assert "rewards/judge/unjudged" not in loop.collector.metrics(groups, 1.0)


def test_dynamic_sampling_replaces_unjudged_groups_and_adds_up_the_counts_of_its_rounds() -> None:
    loop = judged_loop("mixed", "mute", "mute", "mixed", "mixed", "rare", "mixed", "mixed", dynamic_sampling_rounds=2)
    groups = loop.step()
    assert rows_of(groups) == [0, 4, 5, 3]
    assert loop.collector.metrics(groups, 1.0)["rewards/judge/unjudged"] == 2


def test_there_is_no_baseline_where_the_required_function_has_no_opinion() -> None:
    class Silent(Judge):
        def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
            return [None if int(text) == GREEDY else float(text) for text in texts]

    loop = judged_loop("mixed", advantage_estimator="remax")
    loop.scoring.scorer = RewardScorer([Silent(), ones])
    groups = loop.step()
    assert groups[0].baseline is None and not groups[0].unjudged
    assert advantages(groups) == [[0.0] * 4]


# Dynamic sampling


def test_without_a_strategy_the_next_prompts_are_trained_on() -> None:
    loop = Loop("mixed", "solved", "failed", "mixed", "mixed")
    groups = loop.step()
    assert (rows_of(groups), len(loop.calls), loop.source.position) == ([0, 1, 2, 3], 1, 4)
    assert loop.collector.counts == {}
    measured = loop.collector.metrics(groups, 2.0)
    assert (measured["groups/total"], measured["groups/with_signal"], measured["watched"]) == (4, 2, 4)
    assert (loop.state.num_tokens, measured["num_tokens"], measured["tokens_per_second"]) == (128, 128, 24)


def test_groups_without_signal_are_replaced_and_the_others_keep_their_places() -> None:
    loop = Loop("mixed", "solved", "mixed", "silent", "mixed", "failed", "rare", "mixed", dynamic_sampling_rounds=3)
    assert rows_of(loop.step()) == [0, 4, 2, 6]
    assert [count for count, _ in loop.calls] == [4, 4]  # half of the groups had signal: twice as many as are missing
    names = ("rounds", "resampled_groups", "surplus_groups", "dropped_groups")
    assert loop.counts(*names) == [1, 4, 1, 4]
    assert loop.watched == [[0, 1, 2, 3]]


def test_a_group_lost_to_its_environment_is_counted_although_another_takes_its_place() -> None:
    loop = Loop("played", "lost", "played", "played", "played", dynamic_sampling_rounds=1)
    groups = loop.step()
    assert (rows_of(groups), loop.collector.metrics(groups, 1.0)["groups/lost"]) == ([0, 4, 2, 3], 1)


def test_rounds_end_with_every_place_filled_or_at_their_number_and_the_number_of_groups_stays() -> None:
    loop = Loop(*["mixed"] * 4, *["failed"] * 4, dynamic_sampling_rounds=3)
    loop.step()
    assert (len(loop.calls), loop.counts("rounds", "dropped_groups")) == (1, [0, 0])
    loop = Loop(*["failed"] * 5, "mixed", *["solved"] * 6, dynamic_sampling_rounds=2)
    groups = loop.step()
    assert (rows_of(groups), len(loop.calls)) == ([5, 1, 2, 3], 3)
    assert loop.counts("rounds", "resampled_groups", "dropped_groups") == [2, 8, 8]
    assert loop.collector.metrics(groups, 1.0)["groups/with_signal"] == 1


def test_as_many_prompts_are_sampled_as_the_share_of_signal_asks_for_but_no_more_than_a_generation() -> None:
    loop = Loop("mixed", "mixed", "mixed", "failed", *["failed"] * 20, dynamic_sampling_rounds=3)
    loop.step()
    assert [count for count, _ in loop.calls] == [4, 2, 2, 3]  # ceil(1 * 4 / 3), 6 / 3, 8 / 3


def test_each_step_and_each_round_has_its_own_seed_and_a_run_can_be_repeated() -> None:
    def seeds() -> list[int]:
        loop = Loop(*["failed"] * 4, dynamic_sampling_rounds=2)
        loop.step()
        loop.step()
        return [params.seed for _, params in loop.calls]

    assert len(set(seeds())) == 6
    assert seeds() == seeds()
    assert seeds()[::3] == [GRPOConfig().draws.for_step(step).seed for step in range(2)]  # as without extra rounds


def test_what_was_sampled_and_dropped_counts_in_rewards_and_tokens() -> None:
    loop = Loop("mixed", "solved", "solved", "solved", "mixed", "wide", "mixed", "failed", dynamic_sampling_rounds=1)
    groups = loop.step()
    measured = loop.collector.metrics(groups, 1.0)
    everything = [0.5, 1, 1, 1, 0.5, 2, 0.5, 0]
    assert measured["reward"] == measured["rewards/table/mean"] == pytest.approx(fmean(everything))
    assert measured["frac_reward_zero_std"] == 0.5
    assert (measured["groups/total"], measured["groups/with_signal"]) == (4, 4)
    assert (measured["num_tokens"], measured["tokens_per_second"]) == (8 * 4 * 8, 8 * 4 * 3)
    assert measured["rewards/table/invalid"] == 0
    loop.scoring.scorer = RewardScorer(lambda completions, **_: [float("inf")] * len(completions))
    loop.scoring.scorer.names[0] = "table"
    assert loop.collector.metrics(loop.step(), 1.0)["rewards/table/invalid"] == 32  # of both rounds


@pytest.mark.parametrize(("settings", "divisor"), [
    ({"scale_rewards": "batch"}, "rewards"), ({"advantage_estimator": "reinforce++_baseline"}, "centered"),
])
def test_advantages_are_those_within_the_groups_that_are_trained_on(settings: dict[str, Any], divisor: str) -> None:
    loop = Loop("mixed", "solved", "wide", "failed", "failed", "rare", "rare", "solved",
                dynamic_sampling_rounds=1, **settings)
    groups = loop.step()
    assert rows_of(groups) == [0, 5, 2, 6]
    rewards = [[float(value or 0) for value in REWARDS[kind][:4]] for kind in ("mixed", "rare", "wide", "rare")]
    centered = [[value - fmean(row) for value in row] for row in rewards]
    std = stdev(value for row in (rewards if divisor == "rewards" else centered) for value in row)
    expected = [[value / (std + 1e-4) for value in row] for row in centered]
    torch.testing.assert_close(torch.tensor(advantages(groups)), torch.tensor(expected))


def test_a_group_that_differs_only_from_the_batch_has_signal() -> None:
    """REINFORCE++ learns from a group without spread too, where others did better or worse."""
    loop = Loop(*["failed"] * 4, "solved", "mixed", "failed", "failed", advantage_estimator="reinforce++",
                dynamic_sampling_rounds=5)
    groups = loop.step()
    assert rows_of(groups) == [4, 5, 6, 7]
    mean, std = fmean([1] * 4 + [0, 1, 0, 1] + [0] * 8), stdev([1] * 4 + [0, 1, 0, 1] + [0] * 8)
    assert advantages(groups)[0] == pytest.approx([(1 - mean) / (std + 1e-4)] * 4)
    assert len(loop.calls) == 2


def test_a_group_whose_signal_is_all_in_masked_completions_is_replaced() -> None:
    settings = {"mask_truncated_completions": True, "advantage_estimator": "remax", "dynamic_sampling_rounds": 1}
    loop = Loop("rare", "solved", "mixed", "mixed", *["mixed"] * 4, **settings)
    REWARDS["only truncated"] = [1, 0, 1, 0, 1]
    assert rows_of(loop.step()) == [0, 4, 2, 3]  # of "rare" completion 0 counts: 0 - 1
    loop = Loop("only truncated", *["mixed"] * 7, **settings)
    assert rows_of(loop.step()) == [4, 1, 2, 3]


# Replay


def test_kept_groups_replace_groups_without_signal_and_each_is_used_once() -> None:
    loop = Loop("mixed", "wide", "rare", "failed", "failed", "mixed", "failed", "solved", "failed", "failed", "failed",
                "mixed", replay_buffer_size=8)
    first = loop.step()
    assert (rows_of(first), loop.counts("replayed_groups", "replay_size")) == ([0, 1, 2, 3], [0, 3])
    second = loop.step()
    assert rows_of(second) == [1, 5, 0, 2]  # the largest spread first
    assert [group.replayed for group in second] == [True, False, True, True]
    assert loop.counts("replayed_groups", "replay_size", "replay_age") == [3, 1, 1]
    assert [r.policy_version for group in second for r in group.rollouts[:1]] == [0, 1, 0, 0]
    third = loop.step()
    assert rows_of(third) == [5, 9, 10, 11]  # of row 5 alone there was one left; none is used a third time
    assert loop.counts("replayed_groups", "replay_size", "replay_age") == [1, 1, 1]
    measured = loop.collector.metrics(third, 1.0)
    assert (measured["reward"], measured["groups/with_signal"]) == (0.125, 2)  # of what was sampled; of what is used


def test_replay_comes_after_dynamic_sampling_and_keeps_its_surplus() -> None:
    loop = Loop("mixed", "mixed", "failed", "failed", "wide", "wide", "mixed", "rare",
                "mixed", "failed", "failed", "failed", "failed", "failed", "mixed", "failed",
                dynamic_sampling_rounds=1, replay_buffer_size=8)
    assert rows_of(loop.step()) == [0, 1, 4, 5]
    assert loop.counts("surplus_groups", "replay_size", "dropped_groups") == [2, 6, 4]
    second = loop.step()
    assert rows_of(second) == [8, 14, 5, 4]
    assert loop.counts("rounds", "resampled_groups", "replayed_groups", "dropped_groups") == [1, 4, 2, 6]


def test_groups_beyond_the_greatest_age_are_not_replayed() -> None:
    loop = Loop(*["wide"] * 4, *["mixed"] * 4, *["failed"] * 4, replay_buffer_size=16, replay_max_age=1)
    assert [rows_of(loop.step()) for _ in range(3)][2] == [7, 6, 5, 4]


def test_advantages_of_a_replayed_group_are_those_of_its_first_batch() -> None:
    loop = Loop("wide", *["failed"] * 7, scale_rewards="batch", replay_buffer_size=4)
    before = advantages(loop.step())[0]
    after = advantages(loop.step())[0]
    assert before == pytest.approx(after)  # one "wide" among three "failed" in both
    rewards = [0, 4, 0, 4] + [0] * 12
    assert after == pytest.approx([(value - 2) / (stdev(rewards) + 1e-4) for value in [0, 4, 0, 4]])


# ReMax


def test_the_baseline_is_the_weighted_reward_of_the_greedy_completion() -> None:
    loop = Loop("mixed", "rare", "silent", "all but greedy", advantage_estimator="remax")
    groups = loop.step()
    assert [group.baseline for group in groups] == [0.25, 1, None, None]
    expected = [[-0.25, 0.75, -0.25, 0.75], [-1, -1, -1, 0], [0] * 4, [0] * 4]
    assert advantages(groups) == expected
    (_, sampled), (count, params) = loop.calls
    assert (count, params.n, params.temperature, params.max_tokens) == (4, 1, 0, sampled.max_tokens)
    loop = Loop("mixed", "rare", "wide", "failed", advantage_estimator="remax", reward_weights=[3.0])
    loop.scoring.scorer = RewardScorer(table, [3.0])
    assert [group.baseline for group in loop.step()] == [0.75, 3, 3, 0]


def test_the_greedy_completion_counts_only_as_tokens() -> None:
    loop, plain = (Loop("mixed", "rare", "solved", "failed", **settings) for settings in (
        {"advantage_estimator": "remax"}, {}))
    groups, others = loop.step(), plain.step()
    assert [len(group.rollouts) for group in groups] == [4] * 4
    measured, expected = loop.collector.metrics(groups, 1.0), plain.collector.metrics(others, 1.0)
    assert measured["greedy"] == expected["greedy"] == 0
    changed = {name for name in expected if measured[name] != expected[name] and "sampling/" not in name}
    assert changed - {"tokens_per_second/prefill", "tokens_per_second/full"} == {"num_tokens", "tokens_per_second"}
    assert measured["num_tokens"] - expected["num_tokens"] == 4 * (5 + 3)  # a prompt and its greedy completion
    assert [r.extras for group in groups for r in group.rollouts] == [{"number": str(n)} for n in range(4)] * 4


def test_a_replayed_group_keeps_its_baseline_and_is_not_sampled_for_again() -> None:
    loop = Loop("mixed", *["failed"] * 7, advantage_estimator="remax", replay_buffer_size=4)
    loop.step()
    replayed = loop.step()[0]
    assert (replayed.replayed, replayed.baseline) == (True, 0.25)
    assert [rollout.advantage for rollout in replayed.rollouts] == [-0.25, 0.75, -0.25, 0.75]
    assert [count for count, _ in loop.calls] == [4, 4, 4, 4]


# Settings


@every_row(("settings", "message"), [
    ({"dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds is -1; it must be a whole number, at least 0"),
    ({"dynamic_sampling_rounds": 1.5}, "dynamic_sampling_rounds is 1.5"),
    ({"dynamic_sampling_rounds": None}, "dynamic_sampling_rounds is None"),
    ({"replay_buffer_size": True}, "replay_buffer_size is True"), ({"replay_buffer_size": -4}, "at least 0"),
    ({"replay_buffer_size": 4, "replay_max_age": 0}, "replay_max_age is 0; it must be a whole number, at least 1"),
    ({"replay_max_age": 3}, "nothing is replayed: set replay_buffer_size"),
    ({"difficulty_pools": 2}, "difficulty_pools is 2; it must be True or False"),
    ({"replay_buffer_size": 4, "vllm_importance_sampling_correction": False}, "replayed completions are of an older"),
])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)
