"""Each check finds its own mistake, and nothing in a healthy run."""

import os
import re
from collections import UserList
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preflight_runs import ROWS, TEXTS, WITH_SYSTEM, found, make, reads_answer
from trainer_runs import SMALL, digit_sum, load
from transformers.utils import get_json_schema

from lowmem_grpo import (
    DistillationConfig,
    DistillationTrainer,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    SamplingParams,
    SDFTConfig,
    SDFTTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowmem_grpo.memory.cards import device
from lowmem_grpo.rewards.ready import code
from lowmem_grpo.rewards.ready.code import code_passes_tests
from lowmem_grpo.trainer.preflight import resources as room
from lowmem_grpo.trainer.preflight.checks import CHECKS
from lowmem_grpo.trainer.preflight.subject import Subject, Turns
from lowmem_grpo.trainer.run_memory import plan_run, settings_of
from lowmem_grpo.types import SEVERITIES
from lowmem_grpo.utils import GIB, size_text

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NO_HEADER = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LIKE_MISTRAL = ("{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% else %}{{ m['content'] }}"
                "<|im_end|>{% endif %}{% endfor %}")
LIKE_GEMMA = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
              + NO_HEADER + HEADER)
LIKE_QWEN3 = NO_HEADER.replace("\n{{", "\n{% if m['role'] == 'assistant' %}(thought)\n{% endif %}{{") + HEADER
NO_RESULTS = NO_HEADER.replace("messages %}", "messages if m['role'] != 'tool' %}") + HEADER
NO_OLD_THOUGHTS = NO_HEADER.replace("m['content'] }}", "m['content'] if loop.last else "
                                    "m['content'].split('</think>')[-1].strip() }}") + HEADER
CALLS_ENDED = ("{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' "
               "}}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<|endoftext|>{% else %}<|im_end|>\n"
               "{% endif %}{% endfor %}" + HEADER)
USERS_ALONE = NO_HEADER.replace("messages %}", "messages if m['role'] != 'system' %}") + HEADER


@pytest.mark.parametrize("dataset", [ROWS, TEXTS, WITH_SYSTEM], ids=["chat", "text", "with a system message"])
def test_a_healthy_run_gets_no_warning(tmp_path: Path, shared: Any, dataset: Any) -> None:
    rewards = [digit_sum, *([] if dataset is WITH_SYSTEM else [reads_answer])]
    assert found(make(tmp_path, dataset, rewards, shared, dataset[:4], save_strategy="steps")) == []


@pytest.mark.parametrize("template", [LIKE_MISTRAL, LIKE_GEMMA, LIKE_QWEN3],
                         ids=["no head of an answer", "no system message", "thoughts before an answer"])
def test_a_template_that_fits_its_prompts_gets_no_warning(
    tmp_path: Path, shared: Any, tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    assert found(make(tmp_path, model=shared)) == []


# What is wrong with a run

Build = Callable[[Callable[..., Any], Any, Any], Any]  # of `make`, the tokenizer and pytest's MonkeyPatch
CASES: dict[str, tuple[str, str, str, Build]] = {}  # the check, its severity, what is said, what makes it so


def case(check: str, severity: str, said: str) -> Callable[[Build], Build]:
    """Registers a function that makes a trainer of which exactly one thing is wrong."""

    def register(build: Build) -> Build:
        CASES[build.__name__.replace("_", " ")] = check, severity, said, build
        return build

    return register


def fine_tuned(trainer: Any, rows: Any, **settings: Any) -> SFTTrainer:
    """A trainer of these rows, of the model of another one."""
    return SFTTrainer(trainer.model, rows, SFTConfig(output_dir=trainer.args.output_dir, max_steps=2, **settings))


TALK = {"messages": [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]}
ENDS_OUTSIDE = NO_HEADER.replace("{{ m['content'] }}", "{% if m['role'] == 'assistant' %}{% generation %}"
                                 "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}")


@case("answers without an end", "warning", r"^in all 4 rows, not every answer is trained with a token that ends")
def some_without_an_end(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.chat_template = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
                               "{% if add_generation_prompt %}assistant: {% endif %}")
    return fine_tuned(make(), [{"messages": TALK["messages"] * 2}] * 4, assistant_only_loss=True)


def with_ends(trainer: Any, token: str | None, ids: Any = None) -> Any:
    """With this end token of the tokenizer, and these of the model's generation config."""
    trainer.tokenizer.eos_token, trainer.policy.base.generation_config.eos_token_id = token, ids
    return trainer


def with_new_tokens(padding: str = "") -> Any:
    model = load()
    model.loaded.tokenizer.add_tokens([f"<new {n}>" for n in range(100)])
    model.loaded.tokenizer.pad_token = padding or model.loaded.tokenizer.pad_token
    return model


def calculator(expression: str) -> str:
    """Reckons.

    Args:
        expression: What to reckon.
    """
    return expression


def of_turns(trainer: Any, tools: bool, replies: bool = False) -> Any:
    trainer.turns = Turns([get_json_schema(calculator)] if tools else None, replies)
    return trainer


@case("rows without a verdict", "error", r"^code_passes_tests: it can never judge 1 of 12 rows \(number 3\); row 3, "
                                         r"column 'tests': tests are \[\]; allowed are .*correct these rows")
def unjudged(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(code, "open_sandbox", lambda *given: None)
    tests = [["assert add(1, 2) == 3"]] * 12
    tests[3] = []
    return make([row | {"tests": one} for row, one in zip(ROWS, tests, strict=True)], code_passes_tests().reward())


@case("output_dir", "error", r"^output_dir is '.*file/run', and .*file is a file\. What to do: choose another")
def a_file(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    trainer.run_dir = trainer.run_dir.parent / "file" / "run"
    trainer.run_dir.parent.write_text("")
    return trainer


@case("output_dir", "error", r"cannot be written to\. What to do: choose another output_dir, or change")
def read_only(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(os, "access", lambda path, mode: False)
    return make()


def with_free(free: int, **settings: Any) -> Build:
    """What makes a trainer of these settings, with so many bytes free on the disk."""
    def build(make: Any, tokenizer: Any, patch: Any) -> Any:
        patch.setattr(room, "free_bytes", lambda path: free)
        return make(**settings)

    return build


CASES |= {
    "no room": ("disk", "error", r"0\.1 MiB free, but one checkpoint needs 0\.\d MiB\. What to do: free some space",
                with_free(100_000, save_strategy="steps")),
    "no room for the adapter": (
        "disk", "error", r"0\.0 MiB free, but the adapter needs 0\.\d MiB\. What to do: free some space, or choose",
        with_free(100, save_strategy="no")),
    "little room": (
        "disk", "warning", r"2\.0 MiB free; 5 checkpoints need \d\.\d MiB, and completions.jsonl up to ",
        with_free(2**21, save_strategy="steps", save_steps=1, max_steps=9)),
}


def planned(trainer: Any, card: str, **settings: Any) -> Any:
    plan = plan_run(replace(settings_of(trainer.model, trainer.args, "transformers", 128), **settings), trainer.model,
                    device(card))
    trainer.memory.advice.plan = plan
    return trainer


@case("host memory", "warning", r"^the host has (0\.50 GiB|512\.0 MiB) of free memory, and .* may take .*\. ")
def little_host_memory(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(room, "available_host_bytes", lambda: GIB // 2)
    return planned(make(), "16GiB", checkpointing="offload")


@case("managed memory", "error", r"^optim='paged_adamw_8bit' needs managed memory, .* driver here does not offer it .*W"
                                 r"SL.*\. What to do: use optim=.adamw_8bit., which keeps")
def nothing_shared(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make(optim="paged_adamw_8bit")
    patch.setattr(room, "has_managed_memory", lambda index: False)
    patch.setattr(trainer.policy, "device", torch.device("cuda"))
    return trainer


def with_cache(trainer: Any, kind: str) -> Any:
    """As if what samples had such a cache."""
    trainer.sampler.engine.cache_dtype = kind
    return trainer


@case("bfloat16", "warning", r"^the run computes in bfloat16, which this card only emulates\. What to do: load")
def emulated(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    patch.setattr(room, "is_bfloat16_supported", lambda: False)
    patch.setattr(trainer.policy, "device", torch.device("cuda"))
    trainer.policy.autocast_dtype = torch.bfloat16
    return trainer


SIMPLE: list[tuple[Any, ...]] = [  # what is wrong, check, severity, what is said, the trainer, its chat template
    ("base model", "rows", "error", r"the tokenizer has no chat template\. What to do: set tokenizer\.chat_template",
     lambda make: make(), None),
    ("no system message", "rows", "error",
     r"^all 12 rows cannot be made into a prompt \(ChatTemplateError: the chat template cannot write these messages: "
     r"System role not supported\)\. ",
     lambda make: make(WITH_SYSTEM), LIKE_GEMMA),
    ("broken row", "rows", "error", r"^1 of 13 rows cannot be made into a prompt \(AttributeError: ",
     lambda make: make(UserList([*ROWS, 7]))),
    ("some skipped", "skipped rows", "warning",
     r"^3 of 15 rows will be skipped: empty prompt \(2\), prompt is int, not text or chat",
     lambda make: make([*ROWS, {"prompt": ""}, {"prompt": None}, {"prompt": 7}])),
    ("all skipped", "skipped rows", "error", r"^no row of the dataset can be used: empty prompt \(2\)",
     lambda make: make([{"prompt": ""}, {"prompt": None}])),
    ("one too long", "prompt lengths", "warning",
     r"^1 of 13 rows will be skipped: longer than max_prompt_length \(60\), the longest has \d{3} tokens\. What to "
     r"do: raise max_prompt_length", lambda make: make([*TEXTS, {"prompt": "1 + 1 " * 40}], max_prompt_length=60)),
    ("all too long", "prompt lengths", "error",
     r"^no row of the dataset can be used: longer than the 8 tokens that the context of 128 leaves, the longest has "
     r"\d\d tokens\. What to do: load", lambda make: make(max_completion_length=120)),
    ("one row", "few rows", "warning", r"^one generation takes 2 prompts and the dataset has 1, so each has only 1\.",
     lambda make: make(ROWS[:1])),
    ("repeated rows", "duplicates", "warning", r"^3 of 15 rows repeat the prompt of another row\. What to do: remove",
     lambda make: make([*ROWS, *ROWS[:3]])),
    ("copies side by side", "duplicates", "warning",
     r"^1600 of 2000 rows repeat the prompt of another row\. What to do: remove",
     lambda make: make([{"prompt": f"How much is {i}?"} for i in range(400) for _ in range(5)])),
    ("no header", "generation prompt", "warning", r"leaves out '<\|im_start\|>assistant' at the end of a prompt",
     lambda make: make(), NO_HEADER),
    ("users alone", "dropped messages", "warning",
     r"leaves out the text of 12 system messages in the 12 sampled prompts",
     lambda make: make(WITH_SYSTEM), USERS_ALONE),
    ("ends outside", "answers without an end", "error",
     r"^in all 4 rows, no answer is trained with a token that ends a completion \('<\|im_end\|>'\), so the model "
     r"does not learn to stop\. What to do: ",
     lambda make: fine_tuned(make(), [TALK] * 4, assistant_only_loss=True), ENDS_OUTSIDE),
    ("no end token", "no end token", "warning", r"^no token ends a completion: .*set tokenizer\.eos_token",
     lambda make: with_ends(make(), None)),
    ("another end", "another end token", "warning",
     r"an answer with '<\|im_end\|>', but only '<\|endoftext\|>' ends a completion",
     lambda make: with_ends(make(), "<|endoftext|>")),
    ("another end of calls", "another end token", "warning",
     r"^the chat template ends a tool call with '<\|endoftext\|>', but only '<\|im_end\|>' ends a completion, so a "
     r"turn goes on after its call\. What to do: add \d+ to model\.generation_config",
     lambda make: of_turns(with_ends(make(), "<|im_end|>"), tools=True), CALLS_ENDED),
    ("end beyond", "unknown tokens", "error", r"^the end token 9999 is beyond the model's vocabulary of 384",
     lambda make: with_ends(make(TEXTS), None, 9999)),
    ("one end beyond", "unknown tokens", "warning", r"^the end token 9999 is beyond",
     lambda make: with_ends(make(), "<|im_end|>", [2, 9999])),
    ("ids without an end", "answers without an end", "warning",
     r"^in all 4 rows, no answer is trained with a token that ends a completion",
     lambda make: fine_tuned(make(), [{"input_ids": [5, 6, 7]}] * 4)),
    ("added tokens", "unknown tokens", "error",
     r"^a row contains the token 4\d\d \('<new 99>'\), but the model's vocabulary has 384 tokens",
     lambda make: make([*TEXTS, {"prompt": "what is <new 99>?"}], model=with_new_tokens())),
    ("padding beyond", "unknown tokens", "error", r"^the padding token 4\d\d is beyond",
     lambda make: make(model=with_new_tokens("<new 99>"))),
    ("no schemas", "turns", "error",
     r"^the chat template does not tell the policy about its tools \(calculator\)\. What to do: use a model family "
     r"whose template has tools \(Qwen2\.5, Qwen3, ", lambda make: of_turns(make(), tools=True)),
    ("no results", "turns", "error",
     r"^the chat template cannot render messages of the roles tool \(it leaves out .*Qwen2\.5",
     lambda make: of_turns(make(), tools=True), NO_RESULTS),
    ("tools with a plain string", "turns", "error",
     r"^tools are described to the policy by its chat template, and .*plain string has none\. What",
     lambda make: of_turns(make(TEXTS), tools=True)),
    ("plain strings anew", "turns", "error",
     r"^history='template' renders .* a plain string has none\. What to do: use history='append'",
     lambda make: of_turns(make(TEXTS, history="template"), tools=False, replies=True)),
    ("thoughts are dropped", "rewritten history", "warning",
     r"^the chat template rewrites sampled text that stands before a user message after a thought; history='append' "
     r"trains on the text as it was sampled",
     lambda make: of_turns(make(), tools=False, replies=True), NO_OLD_THOUGHTS),
    ("thoughts are dropped at a cost", "rewritten history", "warning",
     r"^the .* rewrites .* after a thought, so history='template' begins another training sequence there; if .*, an "
     r"episode of 4 turns has 2\.5 times the tokens",
     lambda make: of_turns(make(history="template", max_turns=4), tools=False, replies=True), NO_OLD_THOUGHTS),
    ("reserved", "reserved columns", "error",
     r"^dataset columns \['trainer_state'\] have names of reward function arguments\. ",
     lambda make: make([row | {"trainer_state": 1} for row in ROWS])),
    ("missing", "missing columns", "error",
     r"^reads_answer: it requires answer, which no dataset column provides; the dataset's columns are prompt\. What "
     r"to do: rename", lambda make: make([{"prompt": row["prompt"]} for row in ROWS], reads_answer)),
    ("missing in evaluation", "missing columns", "error",
     r"^reads_answer: .*; the evaluation dataset's columns are prompt\. What",
     lambda make: make(ROWS, reads_answer, evaluation=[{"prompt": "1 + 1?"}])),
    ("empty", "empty columns", "warning", r"^reads_answer: it reads the column 'answer', which is None in all 12 rows",
     lambda make: make([row | {"answer": None} for row in ROWS], [reads_answer, digit_sum])),
    ("no evaluation", "evaluation rows", "error",
     r"^no row of the evaluation dataset can be used; the first one: empty prompt",
     lambda make: make(evaluation=[{"prompt": ""}])),
    ("eight bits and no correction", "cache in 8 bits", "warning",
     r"^the key-value cache is in 8 bits \(fp8\), so the sampler's log-probabilities differ from the trainer's, and "
     r"vllm_importance_sampling_correction=False",
     lambda make: with_cache(make(vllm_importance_sampling_correction=False), "fp8")),
    ("eight bits and nobody measures", "cache in 8 bits", "warning",
     r"with parity_steps=0 the difference between the sampler's and the trainer's log-probabilities is meas",
     lambda make: with_cache(make(parity_steps=0), "fp8_e5m2")),
    ("over plan", "plan", "warning",
     r"^the plan expects .* on the card, which is more than the 1\.0 MiB .*: .*The run goes on.*\. What to do: try a "
     r"lower max_completion_length", lambda make: planned(make(), "1MiB")),
    ("small", "scale", "note", r"^the run has 2 steps \(300 or more are usual\) and 12 rows \(500 or more are usual\)",
     lambda make: make()),
]


def with_template(trainer: Callable[..., Any], template: str | None = "") -> Build:
    """What makes the trainer, with another chat template of its tokenizer if one is given."""
    def build(make: Any, tokenizer: Any, patch: Any) -> Any:
        if template != "":
            tokenizer.chat_template = template
        return trainer(make)

    return build


def sdft(make: Any, context: str, most: int = 10_240) -> SDFTTrainer:
    config = SDFTConfig(output_dir=str(make().run_dir), max_reprompt_len=most, **SMALL)
    return SDFTTrainer(load(max_seq_length=128), config, [{**row, "privileged_context": context} for row in ROWS])


def kto(make: Any, labels: str, **weights: float) -> KTOTrainer:
    rows = [{"prompt": f"How much is {place}?", "completion": " 7", "label": label == "+"}
            for place, label in enumerate(labels)]
    config = KTOConfig(output_dir=str(make().run_dir), max_length=128, disable_tqdm=True, **weights)
    return KTOTrainer(load(max_seq_length=128), args=config, train_dataset=rows)


@case("labels", "warning", r"^all 8 rows have label True, and KTO learns from both labels\. What to do: add rows with "
                           r"label False")
def one_label(make: Any, tokenizer: Any, patch: Any) -> Any:
    return kto(make, "++++++++")


@case("labels", "warning", r"^label True outweighs label False by 8\.00 to 1 .*set desirable_weight=0\.25, or undesira"
                           r"ble_weight=8$")
def rare_label(make: Any, tokenizer: Any, patch: Any) -> Any:
    return kto(make, "++++-", desirable_weight=2.0)


@pytest.mark.parametrize("labels", ["+-", "++++-", "++++"])
def test_a_weight_of_zero_is_a_choice_and_no_label_that_outweighs(labels: str, tmp_path: Path) -> None:
    for name in ("desirable_weight", "undesirable_weight"):
        trainer = kto(lambda: make(tmp_path), labels, **{name: 0.0})
        assert not [line for line in found(trainer) if "label" in line]


@case("the teacher's prompts", "warning",
      r"12 of 12 rows make a prompt of the teacher that is longer than 120 tokens, the longest has \d{3}: the end of "
      r"what only the teacher is told is cut \(12\)\. What to do: load with a larger max_seq_length, or lower max_com")
def context_longer_than_the_models(make: Any, tokenizer: Any, patch: Any) -> Any:
    return sdft(make, "14 " * 90)


@case("the teacher's prompts", "error",
      r"longer than 12 tokens, the longest has \d\d: no completion is distilled \(12\)\. What to do: raise max_repro")
def no_room_for_the_context(make: Any, tokenizer: Any, patch: Any) -> Any:
    return sdft(make, "the answer is 14", 12)


def stored(make: Any, rows: list[Any]) -> DistillationTrainer:
    settings = SMALL | {"num_generations": 1, "distillation_mode": "topk_logits", "distillation_topk": 2}
    return DistillationTrainer(load(), "stored", DistillationConfig(output_dir=str(make().run_dir), **settings), rows)


@case("stored completions", "error",
      r"1 of 12 rows of the dataset cannot be trained on; row 3: at token 0, .* rises; .*\. What to do: correct ")
def unsorted_tokens_of_a_teacher(make: Any, tokenizer: Any, patch: Any) -> Any:
    rows: list[Any] = [{**row, "completion_ids": [5], "teacher_top_ids": [[5, 6]],
                        "teacher_top_logprobs": [[-0.1, -3.0]]} for row in ROWS]
    rows[3]["teacher_top_logprobs"] = [[-3.0, -0.1]]
    return stored(make, rows)


@case("stored completions", "error", r"12 of 12 rows of the dataset cannot .*; row \d+ has no column completion_ids")
def no_stored_completions(make: Any, tokenizer: Any, patch: Any) -> Any:
    return stored(make, ROWS)


CASES |= {name: (check, severity, said, with_template(*parts)) for name, check, severity, said, *parts in SIMPLE}


@pytest.mark.parametrize(("check", "severity", "said", "build"), CASES.values(), ids=CASES.keys())
def test_each_mistake_is_reported_and_nothing_else(
    tmp_path: Path, shared: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, check: str, severity: str, said: str,
    build: Callable[..., Any],
) -> None:
    def make_here(dataset: Any = ROWS, reward: Any = digit_sum, model: Any = shared, **settings: Any) -> GRPOTrainer:
        return make(tmp_path, dataset, reward, model, **settings)

    trainer = build(make_here, tokenizer, monkeypatch)
    (line,) = found(trainer, "note") if severity == "note" else found(trainer)
    assert re.search(said, line)
    assert "\n" not in line
    subject = Subject(trainer)
    (look,) = [one.look for one in CHECKS if one.name == check]
    assert [one.severity for one in look(subject)] == [severity]


def test_every_check_is_tested_here_with_its_worst_severity() -> None:
    worst = {one.name: min((held[1] for held in CASES.values() if held[0] == one.name), key=SEVERITIES.index)
             for one in CHECKS}
    assert worst == {one.name: one.severity for one in CHECKS}


def test_stop_strings_and_stop_tokens_count_as_ends(tmp_path: Path, shared: Any, tokenizer: Any) -> None:
    def found_with(**stops: Any) -> list[str]:
        params = SamplingParams(max_tokens=8, n=4, **stops)
        return [line.partition(":")[0] for line in found(make(tmp_path, model=shared, vllm_sampling_params=params))]

    assert found_with(ignore_eos=True, stop="<|im_end|>") == []
    assert found_with(ignore_eos=True) == ["no token ends a completion"]
    assert len(found(with_ends(make(tmp_path, model=shared), "<|endoftext|>"))) == 1
    assert found_with(stop="<|im_end|>") == found_with(stop_token_ids=[2]) == []


def test_a_run_without_checkpoints_only_needs_room_for_its_adapter(
    tmp_path: Path, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, model=shared, save_strategy="no")
    subject = Subject(trainer)
    needed = room.checkpoint_bytes(subject)
    subject.args = replace(trainer.args, save_strategy="steps")
    whole = room.checkpoint_bytes(subject)
    monkeypatch.setattr(room, "free_bytes", lambda path: whole - 1)
    assert needed < whole and not [line for line in found(trainer, "error") if "adapter" in line]


def test_a_run_that_trains_an_embedding_says_what_it_takes_and_how_large_the_adapters_file_becomes(
    tmp_path: Path, shared: Any
) -> None:
    model = load(modules_to_save=("embed_tokens",))
    trainer = make(tmp_path, model=model, save_strategy="steps", optim="adamw_torch", beta=0.1, sync_ref_model=True)
    subject = Subject(trainer)
    numbers = model.config.vocab_size * model.config.hidden_size
    sizes = size_text(4 * numbers), size_text(8 * numbers)
    file = trainer.save_model(str(tmp_path / "saved")) or tmp_path / "saved" / "adapter_model.safetensors"
    line = room.beside_lora(subject)
    assert line and line.startswith(f"trained beside LoRA: embed_tokens, with {sizes[0]} of weights, as much of "
                                    f"gradients, and {sizes[1]} of optimizer states; the adapter's file takes ")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    told = trained + 4 * numbers  # tied: PEFT writes the matrix under both of its names
    assert line.endswith(size_text(told)) and told < file.stat().st_size < told + 2**14
    assert room.checkpoint_bytes(subject) == told + (1 + 2) * trained, "adapter, reference, and float32 states"
    assert room.beside_lora(Subject(make(tmp_path, model=shared))) is None
