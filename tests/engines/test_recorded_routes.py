"""The transformers engine records routes: of every token that ran, those it ran with, in calls and in conversations."""

from typing import Any

import pytest
import torch
from episodes import Interrupted, Talk
from families import loaded
from memory import failing
from mixtures import LAYERS, SIZES, K, mixture_folder
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.generation_state import PrefixCache
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.routes import RouteRecorder
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 45))]
PARAMS = SamplingParams(n=3, max_tokens=20, seed=1, stop_token_ids=list(range(40)))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    kind = getattr(request, "param", "qwen3_moe")
    model, tokenizer = loaded(mixture_folder(tmp_path_factory.mktemp("mixture"), kind))
    return TransformersEngine(Policy(model.double()), tokenizer, 256)


@pytest.fixture(autouse=True)
def as_new(engine: TransformersEngine) -> None:
    engine.bound, engine.kept = RunMemory().rollout, PrefixCache()


def live_routes(policy: Policy, ids: list[int]) -> Tensor:
    """(tokens, layers, k): what the routers choose where the tokens run alone."""
    recorder = policy.recorder()
    assert isinstance(recorder, RouteRecorder)
    with torch.no_grad():
        policy.backbone(input_ids=torch.tensor([ids]), use_cache=False, routes=recorder)
    return recorder.taken(1)[0]


def assert_recorded(policy: Policy, prompt: list[int], rollout: Rollout) -> None:
    """All tokens have routes but the last, in order the same as where they run alone."""
    ran = [*prompt, *rollout.completion_ids[:-1]]
    recorded = torch.cat(rollout.routes.parts)
    assert recorded.dtype == torch.uint8 and recorded.shape == (len(ran), LAYERS, K)
    assert torch.equal(recorded, live_routes(policy, ran))


def groups_of(engine: TransformersEngine) -> list[RolloutGroup]:
    found = engine.generate(PROMPTS, PARAMS)
    return [RolloutGroup({}, *pair) for pair in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("engine", SIZES, indirect=True)
def test_every_token_that_ran_has_its_routes_and_a_prompt_is_held_once(engine: TransformersEngine) -> None:
    groups = groups_of(engine)
    assert len({len(one.completion_ids) for group in groups for one in group.rollouts}) > 1
    for group in groups:
        for rollout in group.rollouts:
            assert_recorded(engine.policy, group.prompt_ids, rollout)
        assert len({one.routes.parts[0].data_ptr() for one in group.rollouts}) == 1
    (batch,) = pack(groups)
    assert batch.routes is not None and batch.routed is None
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for group in groups for one in group.rollouts for part in one.routes.parts}
    ran = sum(len(group.prompt_ids) + sum(len(one.completion_ids) - 1 for one in group.rollouts) for group in groups)
    assert sum(held.values()) == ran * LAYERS * K


def test_rows_that_are_resumed_after_a_shortage_keep_their_routes(engine: TransformersEngine) -> None:
    expected = groups_of(engine)
    engine.bound = RunMemory().rollout
    with failing(engine, 4) as hook:
        again = groups_of(engine)
    assert hook.raised
    for group, before in zip(again, expected, strict=True):
        for rollout, one in zip(group.rollouts, before.rollouts, strict=True):
            assert rollout.completion_ids[:3] == one.completion_ids[:3]
            assert_recorded(engine.policy, group.prompt_ids, rollout)


def test_turns_that_go_on_from_kept_rows_have_the_routes_of_their_whole_history(engine: TransformersEngine) -> None:
    talk = Talk(PROMPTS, max_tokens=lambda key, turn: 4 + (3 * key + turn) % 5)
    engine.converse(talk, SamplingParams(temperature=1.3))
    kept = 0
    for key, rollouts in talk.drawn.items():
        asked = [request.ids for request in talk.asked if request.key == key]
        turns: list[Any] = []
        for ids, rollout in zip(asked, rollouts, strict=True):
            assert_recorded(engine.policy, ids, rollout)
            kept += rollout.cached_tokens
            turns.append(Turn(ids, rollout.completion_ids, rollout.rollout_logprobs, "stop", routes=rollout.routes))
        first = {turn.routes.parts[0].data_ptr() for turn in turns}
        assert len(first) == 1  # a history is in memory once
    assert kept


def test_turns_that_were_interrupted_have_the_routes_of_all_their_tokens(engine: TransformersEngine) -> None:
    for kept in (None, 0):
        engine.kept.most, talk = kept, Interrupted(PROMPTS, turns=2)
        engine.converse(talk, SamplingParams(temperature=1.3))
        for key, rollouts in talk.drawn.items():
            asked = [request.ids for request in talk.asked if request.key == key and request.begun is None]
            for ids, rollout in zip(asked, rollouts, strict=True):
                assert_recorded(engine.policy, ids, rollout)
