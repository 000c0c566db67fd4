"""Behind which prompts teachers read, beside TRL's builders; what is cut, what is refused, and how it is packed."""

import copy
import json
import logging
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_models import TINY
from template_tokenizers import tokenizer_of, weather
from tokenizers import Tokenizer
from trainer_runs import ROWS, exact, learner, naive_logprobs
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl.experimental.sdft import SDFTConfig as TrlSDFTConfig
from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder
from trl.experimental.sdft.sdft_trainer import SDFTTrainer as TrlSDFTTrainer
from trl.experimental.sdpo import SDPOConfig as TrlSDPOConfig
from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer, SuccessfulRolloutTeacherContextBuilder

from lowmem_grpo import GRPOConfig, SDFTTrainer
from lowmem_grpo.config.distillation import DistillationConfig, SDFTConfig, SDPOConfig
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, PromptSource
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.teacher_prompts import (
    PrivilegedPrompts,
    SuccessPrompts,
    TeacherPrompts,
    behind,
    check_same_tokens,
)
from lowmem_grpo.types import Rollout, RolloutGroup, Split, TokenField, Turn

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
ENCODER = PromptEncoder(TOKENIZER, 10_000)
CHATS: list[Any] = [[{"role": "user", "content": "2 + 3?"}],
                    [{"role": "system", "content": "Be {brief}."}, {"role": "user", "content": "What is 4 {x} 5?"}]]
TEXTS: list[Any] = ["2 + 3 =", "4 {x} 5 ="]
SAID = ["<think>Hm.\n2</think> 5", "no {idea}", "five", "20", "<think>9", ""]  # of two groups of three
GRADES = [1.0, 0.0, 1.5, 0.0, 0.5, 0.25]
HINTS = ["{too} high", "  "]
BOTH = {"include_environment_feedback": True}


def of_trl(config: Any, **options: Any) -> Any:
    return config(output_dir="unused", report_to="none", use_cpu=True, bf16=False, num_generations=2, **options)


def groups_of(prompts: list[Any], rewards: list[float] = GRADES, **columns: list[Any]) -> list[RolloutGroup]:
    """Two groups of three, with the texts SAID."""
    groups = []
    for place, prompt in enumerate(prompts):
        row = {"prompt": prompt, **{name: values[place] for name, values in columns.items()}}
        rollouts = [Rollout([*TOKENIZER(text).input_ids, 2], [], "stop", text, reward=reward) for text, reward in
                    list(zip(SAID, rewards, strict=True))[3 * place : 3 * place + 3]]
        made = ENCODER.encode(row)
        assert isinstance(made, Prompt)
        groups.append(RolloutGroup(row, made.ids, rollouts, row_index=place))
    return groups


def trl_trainer(args: Any, of: Any) -> Any:
    """What TRL's builders read of their trainer."""
    made = SimpleNamespace(
        args=args, accelerator=Accelerator(cpu=True), model=SimpleNamespace(training=True), num_generations=3,
        _tokenizer=TOKENIZER, processing_class=TOKENIZER, chat_template_kwargs={}, max_prompt_length=None)
    for name in ("_tokenize_prompts_untruncated", "_tokenize_prompts"):
        if hasattr(of, name):
            setattr(made, name, getattr(of, name).__get__(made))
    return made


def trl_batch(groups: list[RolloutGroup]) -> tuple[list[Rollout], dict[str, Any], list[dict[str, Any]]]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids = [torch.tensor(rollout.completion_ids) for rollout in rollouts]
    pad = {"batch_first": True}
    return rollouts, {
        "completion_ids": torch.nn.utils.rnn.pad_sequence(ids, padding_value=TOKENIZER.pad_token_id, **pad),
        "completion_mask": torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], **pad),
    }, [group.row for group in groups for _ in group.rollouts]


def read_by(groups: list[RolloutGroup]) -> list[list[int]]:
    return [[*(rollout.teacher_prompt or group.prompt_ids), *rollout.completion_ids]
            for group in groups for rollout in group.rollouts]


def trl_read(built: dict[str, Any]) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for ids, mask in
            zip(built["teacher_input_ids"], built["teacher_attention_mask"], strict=True)]


@pytest.mark.parametrize("prompts", [CHATS, TEXTS], ids=["chat", "text"])
@pytest.mark.parametrize("options", [
    {}, {"dont_reprompt_on_self_success": False}, {"success_reward_threshold": 0.5},
    {"remove_thinking_from_demonstration": True}, BOTH,
    BOTH | {"environment_feedback_only_without_solution": True},
    BOTH | {"use_successful_as_teacher": False}, BOTH | {"reprompt_template": "{feedback}|{solution} {{}} {prompt}",
                                                         "solution_template": "s: {successful_previous_attempt}",
                                                         "feedback_template": "f: {feedback_raw}"},
], ids=lambda options: " ".join(options) or "defaults")
def test_sdpo_s_teachers_read_what_trl_s_read(prompts: list[Any], options: dict[str, Any]) -> None:
    groups = groups_of(prompts, privileged_context=HINTS)
    metrics = SuccessPrompts(SDPOConfig(**options), ENCODER).assign(groups)
    rollouts, batch, rows = trl_batch(groups)
    builder = SuccessfulRolloutTeacherContextBuilder(trl_trainer(of_trl(TrlSDPOConfig, **options), SDPOTrainer))
    built = builder.build(batch, [row["prompt"] for row in rows], torch.tensor(GRADES), [row["privileged_context"]
                                                                                         for row in rows])
    assert read_by(groups) == trl_read(built)
    assert [rollout.fields["teacher_mask"].item() for rollout in rollouts] == built["self_distillation_mask"].tolist()
    assert {name: metrics[name] for name in builder.last_metrics} == pytest.approx(builder.last_metrics)


@pytest.mark.parametrize("prompts", [CHATS, TEXTS], ids=["chat", "text"])
def test_sdft_s_teachers_read_what_trl_s_read(prompts: list[Any]) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "then"}]
    for contexts in (["It is {5}.", 7], [[{"role": "user", "content": "Hm"}, {"role": "assistant", "content": parts}],
                                         [{"role": "assistant", "content": ""}, {"role": "user", "content": "9"}]]):
        groups = groups_of(prompts, privileged_context=contexts)
        PrivilegedPrompts(SDFTConfig(), ENCODER).assign(groups)
        rollouts, batch, rows = trl_batch(groups)
        built = DemonstrationTeacherContextBuilder(trl_trainer(of_trl(TrlSDFTConfig), TrlSDFTTrainer)).build(
            [row["prompt"] for row in rows], [row["privileged_context"] for row in rows], *batch.values())
        assert read_by(groups) == trl_read(built)
        assert all(rollout.fields["teacher_mask"] == 1 and rollout.teacher_prompt for rollout in rollouts)


def test_thinking_that_the_prompt_began_and_feedback_of_one_completion_are_known_too() -> None:
    group = groups_of(TEXTS, rewards=[0.7 + 0.2 + 0.1, 0, 0, 0, 0, 0])[0]  # which is less than 1 by its rounding
    group.rollouts[0].text, group.rollouts[1].extras = "Hm.</think> 5", {"privileged_context": "too low"}
    SuccessPrompts(SDPOConfig(remove_thinking_from_demonstration=True, **BOTH), ENCODER).assign([group])
    read = [TOKENIZER.decode(rollout.teacher_prompt or []) for rollout in group.rollouts]
    solution, feedback = "\nCorrect solution:\n\n5\n\n", "attempt:\n\ntoo low\n\n"
    assert read[0] == "" and solution in read[1] and feedback in read[1] and solution in read[2]
    assert feedback not in read[2] and [one.fields["teacher_mask"].item() for one in group.rollouts] == [0, 1, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_a_demonstration_that_is_too_long_loses_its_end_and_the_question_stays_whole(place: int) -> None:
    group, hint = groups_of([CHATS, TEXTS][place], privileged_context=["No. " * 40, ""])[0], "No. " * 40
    group.rollouts[0].text = solution = " ".join(map(str, range(50)))
    prompts = SuccessPrompts(SDPOConfig(max_reprompt_len=160, **BOTH), ENCODER)
    metrics = prompts.assign([group])
    ids = group.rollouts[1].teacher_prompt or []
    text = TOKENIZER.decode(ids)
    kept = text.partition("solution:\n\n")[2].partition("\n\n\nThe following")[0]
    told = text.partition("attempt:\n\n")[2].partition("\n\n\n\nCorrectly solve the original question.\n")[0]
    assert ["2 + 3?", "2 + 3 ="][place] in text
    assert len(kept) == len(told) > 8 and solution.startswith(kept) and hint.startswith(told)
    assert 155 < len(ids) <= 160 and metrics["self_distillation/cut_fraction"] == 1
    assert metrics["self_distillation/max_prompt_length"] == max(map(len, map(attrgetter("teacher_prompt"),
                                                                              group.rollouts)))


def another(template: str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer] "
            ) -> PromptEncoder:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, 10)


KINDS = ((SuccessPrompts, SDPOConfig(), None), (PrivilegedPrompts, SDFTConfig(), None),
         (TeacherPrompts, DistillationConfig(), another()))


def test_a_question_that_is_too_long_is_not_distilled_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    groups = groups_of(TEXTS, privileged_context=["12", "13"])
    for kind, config, other in KINDS:
        caplog.clear()
        prompts = kind(config, ENCODER, other, longest=3)
        with caplog.at_level(logging.WARNING):
            metrics = [prompts.assign(groups) for _ in range(2)][1]
        assert all(one.fields["teacher_mask"] == 0 and one.teacher_prompt is None for one in groups[0].rollouts)
        assert metrics["self_distillation/too_long_fraction"] == (0.5 if kind is SuccessPrompts else 1)
        assert [record.message.count("longer than 3 tokens") for record in caplog.records].count(1) == 1


def test_feedback_that_no_teacher_reads_is_said(caplog: pytest.LogCaptureFixture) -> None:
    SuccessPrompts(SDPOConfig(), ENCODER).assign(groups_of(TEXTS, privileged_context=HINTS))
    assert "include_environment_feedback=True" in caplog.text


def test_another_model_reads_its_own_template_and_one_of_the_same_template_the_group_s_prompt() -> None:
    groups = groups_of(CHATS)
    metrics = TeacherPrompts(DistillationConfig(), ENCODER, another()).assign(groups)
    for group, text in zip(groups, ["[user] 2 + 3?", "[system] Be {brief}.\n[user] What is 4 {x} 5?"], strict=True):
        assert {TOKENIZER.decode(one.teacher_prompt or []) for one in group.rollouts} == {text + "\n[answer] "}
    assert metrics["self_distillation/reprompt_sample_fraction"] == 1
    same = TeacherPrompts(DistillationConfig(), ENCODER, another(TOKENIZER.chat_template))
    groups[0].rollouts[0].turns, groups[0].rollouts[1].splits = [Turn([1], [2], [0.0], "stop")], [Split(1, [4])]
    assert same.assign(groups) == {}
    assert all(one.teacher_prompt is None and one.fields["teacher_mask"] == 1 for one in groups[0].rollouts)


@pytest.mark.parametrize("episode", [{"turns": [Turn([1], [2], [0.0], "stop")]}, {"splits": [Split(1, [4])]}])
@pytest.mark.parametrize(("kind", "config", "other"), KINDS)
def test_episodes_are_refused_where_the_teacher_would_read_another_prompt(
    kind: type[TeacherPrompts], config: GRPOConfig, other: PromptEncoder | None, episode: dict[str, Any]
) -> None:
    groups = groups_of(CHATS, privileged_context=HINTS)
    vars(groups[0].rollouts[1]).update(episode)
    with pytest.raises(ValueError, match="Leave out tools, environments and rollout_func"):
        kind(config, ENCODER, other).assign(groups)


def test_rows_of_which_no_teacher_can_learn_are_left_out_before_they_are_sampled() -> None:
    prompts, encoder = PrivilegedPrompts(SDFTConfig(), ENCODER), PromptEncoder(TOKENIZER, 1000)
    encoder.refuses = prompts.refused
    begun = [*CHATS[0], {"role": "assistant", "content": "It is"}]
    rows = [{"prompt": CHATS[0], "privileged_context": hint} for hint in ("5", " ", None, float("nan"))]
    source = PromptSource([*rows, {"prompt": begun, "privileged_context": "5"}], encoder, 0, shuffle=False)
    assert source.count_rows(read=True) == 1 and len(source.take(2)) == 2
    assert source.skipped == {"`privileged_context` must not be None or empty, as the teacher is to read it": 3,
                              "prompt ends with a message of the role 'assistant'; what only the teacher is told needs "
                              "a last message of the user": 1}
    with pytest.raises(DataError, match=r"row 1: `privileged_context` must not be None"):
        prompts.assign(groups_of(TEXTS, privileged_context=HINTS))


def test_rows_without_the_column_and_tools_are_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.trainer.grpo.bring_model", None)
    for rows, error, told in ((ROWS, DataError, "no column 'privileged_context'"),
                              ([{**ROWS[0], "privileged_context": "14"}], ValueError, "Leave out tools")):
        with pytest.raises(error, match=told):
            SDFTTrainer(str(TINY), SDFTConfig(), rows, tools=[weather] if error is ValueError else None)


def test_the_images_of_a_question_stay_in_it() -> None:
    seen = list[Any]()

    class Reader(PromptEncoder):
        def of_any_length(self, row: dict[str, Any]) -> Prompt:
            seen.append(row)
            return Prompt(row, [1], "")

    content = [{"type": "image", "image": "a picture"}, {"type": "text", "text": "How many?"}]
    row = {"prompt": [{"role": "user", "content": content}], "privileged_context": "Two."}
    group = RolloutGroup(row, [1, 2], [Rollout([3], [0.0], "stop")])
    PrivilegedPrompts(SDFTConfig(), Reader(TOKENIZER, 10)).assign([group])
    assert seen[0]["prompt"][0]["content"] == [content[0], {"type": "text", "text": "How many?\n\nTwo."}]


@torch.no_grad()
def test_what_is_read_behind_other_prompts_is_aligned_and_a_prompt_of_several_is_packed_once() -> None:
    """Prompts of 30, 9 and 5 tokens, of which the first is two rollouts' and begins as the group's does not."""
    generator = torch.Generator().manual_seed(0)
    long, short, own = (torch.randint(3, 380, (size,), generator=generator).tolist() for size in (30, 9, 5))
    ids = [torch.randint(3, 380, (size,), generator=generator).tolist() for size in (4, 7, 5, 6)]
    mask = torch.tensor(1.0)
    rollouts = [Rollout(each, [0.0] * len(each), "stop", teacher_prompt=prompt, fields={"teacher_mask": mask})
                for each, prompt in zip(ids, [long, short, long, None], strict=True)]
    rollouts[3].trained = [True, True, False, True, False, True]
    rollouts[3].routes = object()  # of the student's experts, which the teacher need not choose
    group, policy = RolloutGroup({}, own, rollouts), Policy(exact())
    assert [len(batch.input_ids) for batch in pack(behind([group]))] == [29 + 4 + 5 + 8 + 7 + 4 + 6]
    assert all(one.routes is None and not one.fields for one in behind([group])[0].rollouts)
    rollouts[3].routes = None
    told = TokenField("told", "float64", value=attrgetter("logprobs"), behind=behind)
    learner(policy).fill_fields([group], told)
    for rollout, prompt in zip(rollouts, [long, short, long, own], strict=True):
        alone = naive_logprobs(policy.model, prompt, rollout.completion_ids)
        expected = rollout.with_context(rollout.at_trained(alone))
        assert (rollout.fields["told"] - expected).abs().max() < 1e-9
    assert group.prompt_ids == own and not rollouts[0].splits and rollouts[0].fields.keys() == {"teacher_mask", "told"}


def changed(words: dict[str, str] | None = None, **parts: Any) -> Any:
    """The tokenizer with some words of its vocabulary exchanged or renamed, or with other parts of its pipeline."""
    state = json.loads(TOKENIZER.backend_tokenizer.to_str()) | parts
    vocabulary = state["model"]["vocab"]
    vocabulary |= {new: vocabulary.pop(old) for old, new in (words or {}).items() if new not in vocabulary} or {
        new: vocabulary[old] for old, new in (words or {}).items()}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


def test_a_teacher_may_have_more_or_fewer_tokens() -> None:
    wider = copy.deepcopy(TOKENIZER)
    wider.add_tokens(["<think>"])
    wider.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    for student, teacher in ((TOKENIZER, wider), (wider, TOKENIZER), (wider, wider)):
        check_same_tokens(student, teacher)


@pytest.mark.parametrize(("teacher", "why"), [
    (lambda: changed({"!": "#", "#": "!"}), "is the student's token"),
    (lambda: changed({"!": "new"}), "'!' and the teacher's 'new'"),
    (lambda: changed(normalizer=None), "to the student and"),
    (lambda: changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                    "use_regex": True}), "to the student and"),
    (lambda: tokenizer_of("qwen3"), "teacher's")])
def test_a_teacher_with_other_tokens_is_refused(teacher: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"the teacher's tokens are not the student's .*{why}.*SFTTrainer"):
        check_same_tokens(TOKENIZER, teacher())
