"""What a `rollout_func` may return, what is refused, and how it samples; and what rollouts of plain Python become:
every sampled token trained once, given what the engine saw before it."""

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import TINY
from tables import every_row
from trainer_runs import close, exact, gradient
from transformers import AutoTokenizer

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.models.packing import sequences_of
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.rollout_func import (
    RolloutFunction,
    generate_rollout_completions,
    group_of,
    rollout_of,
)
from lowmem_grpo.types import Rollout, RolloutGroup, Split, Turn

END, VOCABULARY, CONTEXT = 2, 384, 32
GOOD = {"prompt_ids": [[5, 6]] * 4, "completion_ids": [[7, 8, END]] * 4, "logprobs": [[-1.0, -2.0, -0.5]] * 4}
PROMPTS = [Prompt({"prompt": [{"role": "user", "content": text}]}, [9], text) for text in ("one", "two")]


class RecordingEngine:
    """Answers every prompt with its seed's last digits, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], SamplingParams]] = []

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Rollout]]:
        self.asked.append((prompts, params))
        return [[Rollout([7, END], [-1.0, -2.0], "stop", "x")] for _ in prompts]


def trainer(function: Any = None) -> Any:
    found = SimpleNamespace(
        model=SimpleNamespace(loaded=SimpleNamespace(max_seq_length=CONTEXT),
                              get_input_embeddings=lambda: torch.nn.Embedding(VOCABULARY, 2)),
        policy=SimpleNamespace(eos_token_ids=lambda _: [END]), tokenizer=AutoTokenizer.from_pretrained(TINY),
        state=SimpleNamespace(policy_version=3), engine=RecordingEngine(), renew_engine=lambda: None,
        args=SimpleNamespace(chat_template_kwargs=None, sampling=lambda seed: SamplingParams(seed=seed)),
    )
    found.player = RolloutFunction(function, found)
    return found


def played(returned: Any, prompts: list[Prompt] | None = None) -> list[list[Rollout]]:
    prompts = [Prompt(one.row, list(one.ids), one.text) for one in PROMPTS] if prompts is None else prompts
    return trainer(lambda *_: returned).player.play(None, prompts, SamplingParams(n=2, seed=1))


def test_the_function_gets_each_prompt_as_often_as_it_is_to_be_answered_and_may_change_its_copy() -> None:
    seen = []

    def function(prompts: list[Any], given: Any) -> dict[str, Any]:
        seen.append((["".join(m["content"] for m in prompt) for prompt in prompts], given))
        prompts[0].append({"role": "user", "content": "changed"})
        return GOOD

    with_function = trainer(function)
    told: list[int] = []
    with_function.player.play(None, PROMPTS, SamplingParams(n=2, seed=1), lambda index, group: told.append(index))
    assert seen == [(["one", "one", "two", "two"], with_function)] and told == [0, 1]
    assert len(PROMPTS[0].row["prompt"]) == 1


def test_only_tokens_of_the_mask_train_and_what_is_not_known_of_tokens_is_a_column() -> None:
    mask, lp = [[1, 0, 1], [1, 1, 0]] * 2, [[-1.0, None, -3.0], [-1.0, -2.0, float("nan")]] * 2
    (first, second), _ = played(GOOD | {"env_mask": mask, "logprobs": lp, "won": [1, 2, 3, 4], "shared": "same"})
    assert first.trained == [True, False, True] and first.rollout_logprobs == [-1.0, 0.0, -3.0]
    assert second.rollout_logprobs == [-1.0, -2.0, 0.0] and second.finish_reason == "stop"
    assert [one.columns for one in (first, second)] == [{"won": 1, "shared": "same"}, {"won": 2, "shared": "same"}]
    assert first.policy_version == 3


def test_without_a_mask_every_token_trains_and_a_missing_end_token_means_cut() -> None:
    (first, _), (third, _) = played(GOOD | {"completion_ids": [[7, 8, END]] * 2 + [[7, 8, 9]] * 2})
    assert first.trained is None and (first.finish_reason, third.finish_reason) == ("stop", "length")


def test_prompts_that_the_function_rendered_itself_are_the_prompts_that_are_trained_on() -> None:
    prompts = [Prompt(one.row, list(one.ids), one.text) for one in PROMPTS]
    groups = played(GOOD | {"prompt_ids": [[5], [6], [7, 7], [7, 7]]}, prompts)
    assert [prompt.ids for prompt in prompts] == [[5], [7, 7]]
    assert [one.splits for group in groups for one in group] == [[], [Split(0, [6])], [], []]


def test_tensors_and_numpy_integers_are_taken_as_numbers() -> None:
    ids = [torch.tensor([7, 8, END])] * 2 + [list(torch.tensor([7, 8, END]).numpy())] * 2
    (first, _), (third, _) = played(GOOD | {"completion_ids": ids, "logprobs": torch.full((4, 3), -1.0)})
    assert first.completion_ids == third.completion_ids == [7, 8, END] and first.rollout_logprobs == [-1.0] * 3
    for scalar in (torch.tensor(-1.0), np.float32(-1.0), np.float16(-1.0)):
        (scalars, _), _ = played(GOOD | {"logprobs": [[scalar] * 3] * 4})
        assert scalars.rollout_logprobs == [-1.0] * 3 and {type(one) for one in scalars.rollout_logprobs} == {float}


@every_row(("returned", "says"), [
    (None, "returned a NoneType; it returns a dictionary"),
    ({"prompt_ids": []}, "returned no completion_ids, logprobs"),
    (GOOD | {"logprobs": None}, "None as logprobs.*generate_rollout_completions"),
    (GOOD | {"logprobs": 1.0}, "a float as logprobs; it is a list of 4 lists"),
    (GOOD | {"prompt_ids": [[5]] * 2}, "2 entries of prompt_ids for 4 prompts.*num_generations times already"),
    (GOOD | {3: [1] * 4}, "the key 3; .*names: texts"), (GOOD | {"won": [1]}, "1 entries of won for 4 prompts"),
    (GOOD | {"completion_ids": [[]] * 4}, r"completion_ids\[0\] is empty"),
    (GOOD | {"completion_ids": ["text"] * 4}, r"completion_ids\[0\] is a str.*list of token ids"),
    (GOOD | {"completion_ids": [[7.5, 8, 2]] * 4}, "list of token ids"),
    (GOOD | {"completion_ids": [[7, 8, VOCABULARY]] * 4}, "has the id 384, and the model's are 0 to 383"),
    (GOOD | {"prompt_ids": [[-1]] * 4}, r"prompt_ids\[0\] has the id -1"),
    (GOOD | {"prompt_ids": [[5] * 30] * 4}, "30 tokens in prompt_ids and 3 in completion_ids.*for 32 together"),
    (GOOD | {"env_mask": [[1, 0]] * 4}, r"env_mask\[0\] has 2 entries and completion_ids\[0\] has 3"),
    (GOOD | {"env_mask": [[0, 0, 0]] * 4}, r"env_mask\[0\] has no 1"),
    (GOOD | {"env_mask": [[1, 2, 1]] * 4}, r"env_mask\[0\] is a list.*1 \(the model"),
    (GOOD | {"logprobs": [[-1.0]] * 4}, r"logprobs\[0\] has 1 entries"),
    (GOOD | {"logprobs": [[-1.0, float("nan"), -1.0]] * 4}, r"logprobs\[0\]\[1\] is a float \(nan\)"),
    (GOOD | {"logprobs": [[-1.0, None, -1.0]] * 4}, r"logprobs\[0\]\[1\] is a NoneType"),
    (GOOD | {"logprobs": [[0.3, 0.9, 0.1]] * 4}, r"logprobs\[0\]\[0\] is a float \(0.3\).*0 at most"),
    (GOOD | {"logprobs": [[[-1.0]] * 3] * 4}, r"logprobs\[0\]\[0\] is a list"),
])
def test_what_cannot_be_trained_on_is_refused_by_its_name(returned: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        played(returned)


def test_a_text_a_chat_and_ids_are_sampled_in_the_settings_of_the_run_with_a_new_seed_each_time() -> None:
    given: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        for prompt in ("ab", prompts[0], [7, 8]):
            given.extend(generate_rollout_completions(trainer, [prompt], generation_overrides={"max_tokens": 5}))
        return GOOD

    with_function = trainer(function)
    with_function.player.play(None, PROMPTS, SamplingParams(n=2, temperature=0.7, seed=1))
    tokenizer, asked = with_function.tokenizer, with_function.engine.asked
    chat = tokenizer.apply_chat_template(PROMPTS[0].row["prompt"], add_generation_prompt=True, return_dict=False)
    assert [one["prompt_ids"] for one in given] == [tokenizer("ab").input_ids, chat, [7, 8]]
    assert given[0] | {"prompt_ids": 0} == {
        "prompt_ids": 0, "completion_ids": [7, END], "logprobs": [-1.0, -2.0], "text": "x"}
    assert {(params.n, params.temperature, params.max_tokens) for _, params in asked} == {(1, 0.7, 5)}
    assert len({params.seed for _, params in asked}) == 3
    with_function.player.play(None, PROMPTS, SamplingParams(n=2, temperature=0.7, seed=1))
    assert [params.seed for _, params in asked[3:]] == [params.seed for _, params in asked[:3]]


@pytest.mark.parametrize(("options", "says"), [
    ({"generation_overrides": {"n": 2}}, "repeat the prompt"), ({"as_chat": True}, "leave as_chat out"),
    ({"generation_overrides": {"max_new_tokens": 2}}, "max_new_tokens"),
])
def test_options_of_sampling_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        generate_rollout_completions(trainer(), ["ab"], **options)


def test_sampling_for_a_rollout_func_needs_a_trainer_with_one() -> None:
    with pytest.raises(ValueError, match="is for a trainer with a rollout_func"):
        generate_rollout_completions(SimpleNamespace(), ["ab"])


# Rollouts of turns

PROMPT = [5, 6, 7]


def turn(prompt: list[int], *drawn: int, **more: Any) -> Turn:
    return Turn(prompt, list(drawn), [-0.25 * token for token in drawn], more.pop("finish_reason", "stop"), **more)


def after(before: Turn, *between: int) -> list[int]:
    """A prompt that continues a turn."""
    return [*before.prompt_ids, *before.completion_ids, *between]


FIRST = turn(PROMPT, 10, 11)
SECOND = turn(after(FIRST, 20, 21), 12, 13, 14)
OTHERWISE = turn(after(FIRST, 22), 15)  # the caller went on from the first turn in another way
AGAIN = turn([5, 8], 16, 17)  # a conversation of its own
REWRITTEN = turn([*PROMPT, 10, 23], 18, 19)  # the template dropped a token of the first turn


def trained_once(made: Rollout, prompt: list[int]) -> dict[tuple[int, ...], int]:
    """Every drawn token as a training pass computes it: all that it sees, and itself."""
    [sequences] = sequences_of(RolloutGroup({}, prompt, [made]), [made])
    found = {}
    for one in sequences:
        ids = [*one.prompt, *one.ids]
        for at in (one.mask.nonzero()[:, 0] + len(one.prompt)).tolist():
            assert tuple(ids[:at]) not in found, "a token is trained twice"
            found[tuple(ids[:at])] = ids[at]
    return found


def as_sampled(*turns: Turn) -> dict[tuple[int, ...], int]:
    """The same, by the engine."""
    return {(*one.prompt_ids, *one.completion_ids[:at]): token
            for one in turns for at, token in enumerate(one.completion_ids)}


@every_row(("histories", "sequences"), [
    ([[FIRST]], 1), ([[FIRST, SECOND]], 1), ([[FIRST, REWRITTEN]], 2), ([[FIRST, SECOND], [AGAIN]], 2),
    ([[FIRST, SECOND], [FIRST, OTHERWISE]], 2), ([[FIRST], [AGAIN], [FIRST, SECOND]], 2),
    ([[FIRST, AGAIN, SECOND]], 2),  # two conversations by turns
])
def test_every_sampled_token_is_trained_once_behind_what_the_engine_saw(
    histories: list[list[Turn]], sequences: int
) -> None:
    made, all_turns = rollout_of(histories), {id(one): one for history in histories for one in history}.values()
    assert trained_once(made, PROMPT) == as_sampled(*all_turns)
    assert len(made.splits) + 1 == sequences
    assert made.trained is not None and made.num_trained == sum(len(one.completion_ids) for one in all_turns)
    drawn = [value for value, ours in zip(made.rollout_logprobs, made.trained, strict=True) if ours]
    assert drawn == [value for one in made.turns for value in one.logprobs], "credit and parity count on this order"
    assert all(ours or value == 0.0 for value, ours in zip(made.rollout_logprobs, made.trained, strict=True))


def test_two_turns_that_drew_the_same_are_two_turns() -> None:
    twin = turn(PROMPT, 10, 11)
    made = rollout_of([[FIRST], [twin]])
    assert made.num_trained == 4 and len(made.splits) == 1
    assert rollout_of([[FIRST], [FIRST]]).num_trained == 2, "and one that stands in two histories is one"


def test_ends_and_versions_are_those_of_the_turns() -> None:
    made = rollout_of([[turn(PROMPT, 10, policy_version=4), turn([5], 11, policy_version=3, cached_tokens=1)]])
    assert (made.finish_reason, made.ending, made.policy_version, made.cached_tokens) == ("stop", "done", 3, 1)
    cut = rollout_of([[FIRST], [turn([9], 11, finish_reason="length", text="cut")]])
    assert (cut.finish_reason, cut.ending, cut.text) == ("length", "max_tokens", "cut")
    with pytest.raises(ValueError, match="nothing to train"):
        rollout_of([[]])


def test_members_share_the_prompt_that_most_began_with() -> None:
    group = group_of([[[AGAIN]], [[FIRST, SECOND]], [[turn(PROMPT, 30)]]])
    assert group.prompt_ids == PROMPT
    assert [[split.start for split in one.splits] for one in group.rollouts] == [[0], [], []]
    for made, turns in zip(group.rollouts, ([AGAIN], [FIRST, SECOND]), strict=False):
        assert trained_once(made, group.prompt_ids) == as_sampled(*turns)


def test_the_order_of_histories_does_not_change_the_gradient() -> None:
    policy = Policy(exact())
    histories = [[FIRST, SECOND], [FIRST, OTHERWISE], [AGAIN], [FIRST, REWRITTEN]]
    found = []
    for order in permutations(histories):
        group = group_of([list(order), [[turn(PROMPT, 40, 41, 42)]]])
        group.rollouts[0].advantage, group.rollouts[1].advantage = 0.75, -0.5
        for one in group.rollouts:
            one.old_logprobs = torch.tensor(one.rollout_logprobs)
        found.append(gradient(policy, [group]))
    assert len(found) == 24
    for one in found[1:]:
        close(one, found[0])
