"""A model of images computes in packs what plain transformers computes alone, and its tower reads an image once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_problem import gradients
from vision_models import (
    FAMILIES,
    IMAGE,
    VIDEO,
    alone,
    given,
    group_of,
    pictures,
    prompt_of,
    vision_model,
    with_language_adapter,
)

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.offload.activations import (
    ActivationOffload,
    checkpointed_layers,
    enable_checkpointing,
    keep_last,
)
from lowmem_grpo.memory.offload.pages import Copies
from lowmem_grpo.models import vision
from lowmem_grpo.models.lean_modules import make_lean
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import ImageToken, RolloutGroup

each_family = pytest.mark.parametrize("family", FAMILIES)
GROUPS = {  # prompts by pictures and numbers of tokens of text, and the lengths of their completions
    "one picture": [(prompt_of(3, "cat", 4), [5, 2])], "text alone": [(prompt_of(9), [3, 6])],
    "other pictures, two and three of them": [
        (prompt_of(2, "dog", 3, "owl", 5), [4, 7]), (prompt_of("owl", 1, "cat", 1, "owl", 2), [6, 1]),
        (prompt_of(4), [2])],
    "equal tokens, other pictures": [(prompt_of(3, "cat", 4), [5]), (prompt_of(3, "dog", 4), [5])],
}


def policy_of(family: str, dtype: torch.dtype = torch.float32) -> Policy:
    model = with_language_adapter(vision_model(family, dtype))
    make_lean(model.get_base_model(), None)
    policy = Policy(model)
    for picture in pictures().values():
        policy.inputs.store.put(picture)
    return policy


@each_family
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_logprobs_and_every_gradient_of_a_pack_are_those_of_plain_transformers(family: str, groups: Any) -> None:
    policy = policy_of(family, torch.float64)
    made = [group_of(prompt, *lengths) for prompt, lengths in groups]
    (batch,) = pack(made)
    logprobs, _ = policy.logprobs(batch, 1.0)
    theirs = with_language_adapter(vision_model(family, torch.float64))
    owner = {id(rollout): group for group in made for rollout in group.rollouts}
    wanted = torch.cat([alone(theirs, owner[id(rollout)], rollout) for rollout in batch.rollouts])
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-5)  # the head's kernel computes in float32
    found, expected = gradients(policy.model, logprobs), gradients(theirs, wanted)
    assert found.keys() == expected.keys() and len(found) == 42
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-9, name


@pytest.mark.parametrize("mode", [True, "offload"])
def test_layers_that_are_computed_again_have_the_same_features_and_gradients(mode: bool | str) -> None:
    policy = policy_of("Qwen3VL")
    (batch,) = pack([group_of(prompt, *lengths) for prompt, lengths in GROUPS["other pictures, two and three of them"]])
    wanted = gradients(policy.model, policy.logprobs(batch, 1.0)[0])
    enable_checkpointing(policy.base, mode)
    assert len(checkpointed_layers(policy.base)) == 3, "the tower has no gradient, and is not computed again"
    keep_last(policy.base, 1)
    with ActivationOffload(policy.model, Copies() if mode == "offload" else None, min_bytes=1):
        found = gradients(policy.model, policy.logprobs(batch, 1.0)[0])
    assert all(torch.equal(found[name], grad) for name, grad in wanted.items()) and policy.inputs.store.encoded == 3


@each_family
def test_the_sampler_has_the_trainers_logprobs_and_greedy_tokens_are_those_of_transformers(
    family: str, tokenizer: Any
) -> None:
    policy = policy_of(family)
    engine = TransformersEngine(policy, tokenizer, 256)
    engine.eos_ids = []
    prompts = [prompt for groups in GROUPS.values() for prompt, _ in groups]
    theirs = with_language_adapter(vision_model(family))
    sampled = engine.generate(prompts, SamplingParams(n=2, max_tokens=12, seed=1))
    for prompt, rollouts in zip(prompts, sampled, strict=True):
        for rollout in rollouts:
            with torch.no_grad():
                wanted = alone(theirs, RolloutGroup({}, prompt, []), rollout)
            torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), wanted, rtol=0, atol=1e-4)
    greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    for prompt, (rollout,) in zip(prompts, greedy, strict=True):
        ids = torch.tensor([[*map(int, prompt)]])
        made = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6,
                               suppress_tokens=[IMAGE, VIDEO], eos_token_id=None, **given(prompt))
        assert made[0, len(prompt) :].tolist() == rollout.completion_ids


def test_no_token_of_an_image_is_sampled_and_the_others_keep_the_policys_logprobs(tokenizer: Any) -> None:
    policy = policy_of("Qwen2_5_VL")
    with torch.no_grad():
        policy.head.weight[[IMAGE, VIDEO]] = 30 * policy.head.weight[9]  # as likely as can be, wherever 9 is
    engine = TransformersEngine(policy, tokenizer, 256)
    engine.eos_ids = []
    prompt = prompt_of(3, "cat", 4)
    (rollouts,) = engine.generate([prompt], SamplingParams(n=16, max_tokens=16, seed=1))
    assert not {IMAGE, VIDEO} & {token for rollout in rollouts for token in rollout.completion_ids}
    (batch,) = pack([RolloutGroup({}, prompt, rollouts)])
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch, 1.0)
    drawn = torch.tensor([value for rollout in batch.rollouts for value in rollout.rollout_logprobs])
    torch.testing.assert_close(drawn, logprobs, rtol=1e-4, atol=1e-4)
    assert drawn.min() < -20, "the likely tokens were forbidden"


def test_the_tower_reads_each_image_once_for_all_passes_rollouts_and_micro_batches(tokenizer: Any) -> None:
    policy, read = policy_of("Qwen3VL"), list[int]()
    policy.inputs.tower.register_forward_hook(
        lambda module, args, named, out: read.append(len(named["grid_thw"])), with_kwargs=True)
    groups = [group_of(prompt_of(3, "cat", 4), 5, 2), group_of(prompt_of(1, "cat", 1, "dog", 2), 3)]
    TransformersEngine(policy, tokenizer, 256).generate([group.prompt_ids for group in groups],
                                                        SamplingParams(n=3, max_tokens=4))
    for batch in pack(groups, max_sequences=1):
        policy.logprobs(batch, 1.0)[0].sum().backward()
    assert sum(read) == policy.inputs.store.encoded == 2


def test_a_tower_that_waits_on_the_host_comes_only_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, moves = policy_of("Qwen2_5_VL"), list[str]()
    inputs = policy.inputs
    place = ["cpu"]  # of the tower, where the decoder is on a card and its embedding on the host
    monkeypatch.setattr(inputs, "tower", SimpleNamespace(
        to=lambda device: moves.append(str(device)) or place.append(device),
        parameters=lambda: iter([SimpleNamespace(device=place[-1])])))
    monkeypatch.setattr(inputs, "layers", SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device="card")])))
    inputs.wait_on_host(False)
    monkeypatch.setattr(inputs, "encode", lambda picture: (moves.append(picture.name), inputs.store.features.update({
        picture.name: torch.zeros(1, 6, 64)})))
    inputs.features(["owl"])
    inputs.wait_on_host(True)
    inputs.prepare([prompt_of("cat", 1, "dog", 2), prompt_of("owl", 2)])
    inputs.features(["cat", "dog"])
    assert moves == ["card", "owl", "cpu", "card", "cat", "dog", "cpu"]


def test_images_used_least_recently_are_dropped_but_none_that_a_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("Qwen2_5_VL")
    store = policy.inputs.store
    policy.logprobs(pack([group_of(prompt_of("cat", 1, "dog", 2), 3)])[0], 1.0)
    monkeypatch.setattr(vision, "HELD_BYTES", 1)
    policy.logprobs(pack([group_of(prompt_of("cat", 1, "dog", 2), 3)])[0], 1.0)
    assert list(store.pictures) == ["cat", "dog"] and store.encoded == 2
    store.put(pictures()["owl"])
    assert list(store.pictures) == ["owl"] and not store.features
    with pytest.raises(LookupError, match="the image dog is not held any more"):
        policy.logprobs(pack([group_of(prompt_of("dog", 2), 3)])[0], 1.0)


def test_an_image_with_another_number_of_tokens_than_features_is_refused() -> None:
    policy, short = policy_of("Qwen2_5_VL"), [3, *[ImageToken(IMAGE, "cat")] * 5, 4, 9]
    with pytest.raises(ValueError, match="an image of 6 features has 5 tokens in a prompt"):
        policy.logprobs(pack([group_of(short, 3)])[0], 1.0)
