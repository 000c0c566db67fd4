"""Routes: what the sampler recorded is what the trainer computes with, in every pass and however tokens are packed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import LAYERS, SIZES, K, by_rollout, groups_with_routes, mixture_folder, policy_and_twin, replayed_alone
from packed_problem import gradients
from torch import Tensor

from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.routes import Replay, RouteRecorder, Routes, dtype_of, give_routes, one_prompt, routes_of
from lowmem_grpo.types import Rollout, RolloutGroup, Split, Turn

EXACT, NEAR = 1e-10, 1e-5  # in float64 and float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_folder(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> tuple[Policy, Any]:
    """A policy in float64, and plain transformers."""
    return policy_and_twin(folder, torch.float64)


def learned(
    model: Any, groups: list[RolloutGroup], compute: Callable[[], dict[int, Tensor]]
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Log-probabilities of each rollout, and every LoRA gradient."""
    found = compute()
    tokens = torch.cat([found[id(rollout)] for group in groups for rollout in group.rollouts])
    return {key: own.detach() for key, own in found.items()}, gradients(model, tokens)


def assert_near(found: Any, expected: Any, near: float) -> None:
    """Log-probabilities absolutely, gradients as a part of the largest of their tensor."""
    for key, own in expected[0].items():
        assert (found[0][key] - own).abs().max() <= near
    for name, grad in expected[1].items():
        assert grad.any(), name
        assert (found[1][name] - grad).abs().max() <= near * grad.abs().max(), name


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, EXACT), (torch.float32, NEAR)])
@pytest.mark.every(2)
def test_with_routes_no_logprob_and_no_gradient_depends_on_how_tokens_are_packed(
    dtype: torch.dtype, near: float, folder: Path
) -> None:
    policy, groups = policy_and_twin(folder, dtype)[0], groups_with_routes()
    alone = learned(policy.model, groups, lambda: by_rollout(policy, pack(groups, max_sequences=1)))
    for limits in ({}, {"max_tokens": 25}, {"max_sequences": 3}):
        batches = pack(groups, **limits)
        assert_near(learned(policy.model, groups, lambda held=batches: by_rollout(policy, held)), alone, near)


@pytest.mark.parametrize("kind", SIZES)
def test_replayed_logprobs_and_gradients_are_those_of_transformers_on_the_same_routes(
    kind: str, tmp_path: Path
) -> None:
    (policy, twin), groups = policy_and_twin(mixture_folder(tmp_path, kind), torch.float32), groups_with_routes()
    ours = learned(policy.model, groups, lambda: by_rollout(policy, pack(groups)))
    theirs = learned(twin, groups, lambda: {
        id(one): replayed_alone(twin, group.prompt_ids, one) for group in groups for one in group.rollouts})
    assert_near(ours, theirs, NEAR)


def test_without_routes_the_same_tokens_take_other_experts(exact: tuple[Policy, Any]) -> None:
    policy, groups = exact[0], groups_with_routes()
    with torch.no_grad():
        replayed = by_rollout(policy, pack(groups))
        for group in groups:
            for rollout in group.rollouts:
                rollout.routes = None
        live = by_rollout(policy, pack(groups))
    assert all((replayed[key] - own).abs().max() > 0.001 for key, own in live.items())


@pytest.mark.parametrize("mode", [True, "offload"])
def test_a_layer_that_is_run_again_for_backward_takes_the_recorded_experts(
    mode: bool | str, exact: tuple[Policy, Any], folder: Path
) -> None:
    plain, groups = exact[0], groups_with_routes()
    expected = learned(plain.model, groups, lambda: by_rollout(plain, pack(groups)))
    share = plain.differing_routes()
    policy, _ = policy_and_twin(folder, torch.float64, mode)
    policy.model.train()
    # two passes before their backwards: each is run again on its own routes
    assert_near(learned(policy.model, groups, lambda: by_rollout(policy, pack(groups, max_tokens=25))), expected, EXACT)
    again = policy.differing_routes()["sampling/routes/differing"]
    assert share["sampling/routes/differing"] > 0.5
    assert abs(again - share["sampling/routes/differing"]) < 0.05  # prompts are there more than once; not counted twice


def test_the_reference_is_computed_on_the_same_routes(exact: tuple[Policy, Any]) -> None:
    (policy, twin), groups = exact, groups_with_routes()
    with torch.no_grad(), policy.base_model(), twin.disable_adapter():
        found = by_rollout(policy, pack(groups))
        for group in groups:
            for rollout in group.rollouts:
                expected = replayed_alone(twin, group.prompt_ids, rollout)
                assert (found[id(rollout)] - expected).abs().max() <= NEAR


def test_tokens_without_routes_are_routed_live_beside_others(exact: tuple[Policy, Any]) -> None:
    (policy, twin), groups = exact, groups_with_routes()
    alone = groups[1].rollouts[0]
    with torch.no_grad():
        alone.routes = None
        live = by_rollout(policy, pack(groups[1:2]))[id(alone)]
        (batch,) = pack(groups)
        assert batch.routed is not None and int((~batch.routed).sum()) == 6 + 13 - 1
        found = by_rollout(policy, [batch])
        assert (found[id(alone)] - live).abs().max() <= EXACT
        for group in (groups[0], groups[2]):
            for rollout in group.rollouts:
                assert (found[id(rollout)] - replayed_alone(twin, group.prompt_ids, rollout)).abs().max() <= NEAR


def test_routes_of_another_model_are_refused(exact: tuple[Policy, Any]) -> None:
    groups = groups_with_routes()
    for rollout in groups[0].rollouts:
        rollout.routes = Routes(tuple(part[:, :, :-1] for part in rollout.routes.parts))
    with pytest.raises(ValueError, match=rf"\({LAYERS}, {K - 1}\), and this model needs \({LAYERS}, {K}\)"):
        exact[0].hidden(pack(groups[:1])[0])


def test_the_share_of_differing_routes_counts_experts_that_the_router_would_not_take() -> None:
    routes = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 0], [0, 0]]], dtype=torch.uint8)
    replay = Replay(routes, torch.tensor([True, True, False]))
    live = torch.tensor([[1, 0], [4, 9], [8, 9]])
    assert replay.chosen(0, live).tolist() == [[0, 1], [4, 5], [8, 9]]  # in another order they are the same
    replay.chosen(1, live)
    replay.chosen(0, live + 50)  # run again
    assert replay.counts().tolist() == [1 + 4, 8]


@pytest.mark.parametrize(("experts", "size"), [(128, 384), (256, 384), (257, 768)])
def test_a_token_of_48_layers_takes_a_byte_for_each_expert_it_took(experts: int, size: int) -> None:
    recorder = RouteRecorder(experts)
    ids = torch.arange(experts - 8, experts).expand(10, 8)
    for layer in range(48):
        assert torch.equal(recorder.chosen(layer, ids), ids)
    taken = recorder.taken(2)
    assert taken.shape == (2, 5, 48, 8) and taken.nbytes == 10 * size
    assert Replay(taken.flatten(0, 1)).chosen(47, ids.flip(-1)).tolist() == ids.tolist()
    assert torch.equal(torch.cat(Routes.unpacked(Routes((taken[0],)).packed()).parts), taken[0])
    assert dtype_of(experts).itemsize == size // 384


def marked(start: int, end: int) -> Tensor:
    """Routes that say their token's number."""
    return torch.arange(start, end)[:, None, None].expand(-1, LAYERS, K).to(torch.uint8).contiguous()


def numbers(routes: Routes | None) -> list[int]:
    return torch.cat(routes.parts)[:, 0, 0].tolist() if routes else []


def test_routes_are_cut_and_continued_across_their_parts() -> None:
    routes = Routes((marked(0, 3), marked(3, 4), marked(4, 9)))
    assert len(routes) == 9 and routes.nbytes == 9 * LAYERS * K
    for start in range(10):
        for end in range(start, 10):
            assert numbers(routes.cut(start, end)) == list(range(start, end))
    assert numbers(routes.cut(2, 5).then(Routes((marked(2, 9),)))) == list(range(2, 9))
    assert numbers(Routes.unpacked(routes.packed())) == list(range(9))


def test_completions_share_the_memory_of_a_prompt_that_has_the_same_routes() -> None:
    routes = [Routes((torch.cat([marked(0, 3), marked(10 * n, 10 * n + 2)]),)) for n in range(1, 4)]
    routes[2].parts[0][1] += 1
    found = one_prompt([Rollout([7, 8, 9], [0.0] * 3, "stop", routes=one) for one in routes], [1, 2, 3])
    places = [rollout.routes.parts[0].data_ptr() for rollout in found]
    assert places[0] == places[1] != places[2]
    assert [numbers(one.routes) for one in found] == [[0, 1, 2, 10, 11], [0, 1, 2, 20, 21], [0, 2, 2, 30, 31]]


def turns() -> Rollout:
    """Two turns of one sequence, a third in another, and a fourth that the engine saw behind other tokens."""
    made = Rollout([3, 4, 9, 5, 8, 6, 2], [0.0] * 7, "stop", trained=[True, True, False, True, False, True, True],
                   splits=[Split(4, [50])])
    made.turns = [
        Turn([1, 2], [3, 4], [0.0] * 2, "stop", routes=Routes((marked(0, 3),))),
        Turn([1, 2, 3, 4, 9], [5], [0.0], "stop", routes=Routes((marked(100, 105),))),
        Turn([50, 8], [6], [0.0], "stop", routes=Routes((marked(20, 22),))),
        Turn([77], [2], [0.0], "stop", routes=Routes((marked(200, 201),))),
    ]
    return made


def test_of_an_episode_each_token_has_the_routes_of_the_turn_in_which_it_came_up() -> None:
    found = routes_of(turns(), [1, 2])
    assert [numbers(one) for one in found] == [[0, 1, 2, 103, 104], [20, 21]]
    (batch,) = pack([RolloutGroup({}, [1, 2], [turns()])])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 9, 50, 8, 6]
    assert batch.routes is not None and batch.routed is not None
    assert batch.routes[:, 0, 0].tolist() == [0, 1, 2, 103, 104, 20, 21, 0]
    assert batch.routed.tolist() == [True] * 7 + [False]


def test_routes_of_an_episode_are_put_back_where_they_were() -> None:
    again, found = turns(), routes_of(turns(), [1, 2])
    for turn in again.turns:
        turn.routes = None
    give_routes(again, [1, 2], found)
    assert [numbers(one) for one in routes_of(again, [1, 2])] == [numbers(one) for one in found]
    assert numbers(again.turns[1].routes) == [0, 1, 2, 103, 104]
