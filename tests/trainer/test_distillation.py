"""Teachers of every kind in the trainers: a step's loss and gradient by plain transformers and PEFT, runs that stop and
go on, rewards beside a teacher, evaluations, and what is refused before anything is trained."""

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from memory import Failing
from safetensors.torch import load_file
from served import OWNER, serving
from small_models import TINY, random_model, scatter, shallow
from tokenizers import Tokenizer
from torch import Tensor
from trainer_runs import (
    ROWS,
    SMALL,
    TEXTS,
    Gradients,
    adapter_of,
    by_letters,
    digit_sum,
    load,
    make,
    moved,
    naive_logprobs,
    plain_peft,
    relative,
    same,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import (
    DistillationConfig,
    DistillationTrainer,
    FastLanguageModel,
    GRPOConfig,
    GRPOTrainer,
    SDFTConfig,
    SDFTTrainer,
    SDPOConfig,
    SDPOTrainer,
    SFTTrainer,
)
from lowmem_grpo.engines.served_teacher import ServedTeacher, TeacherError
from lowmem_grpo.models.quantized_linear import linears_in_4bit
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer.trajectories import TrajectoryTrainer
from lowmem_grpo.types import Rollout, RolloutGroup, Split
from tests.attacks import judge_server
from tests.attacks.small_run import StopAt

ALONE = {name: value for name, value in SMALL.items() if name != "num_generations"} | {"per_device_train_batch_size": 4}
CONTEXT = "It is 14."
WORKED = [row | {"privileged_context": CONTEXT} for row in ROWS]
STORED_IDS = [7, 8, 20, 2]


def student(folder: Path, teacher: Any, rows: Any = ROWS, model: Any = None, **settings: Any) -> DistillationTrainer:
    return DistillationTrainer(model or moved(load()), teacher, DistillationConfig(output_dir=str(folder / "run"),
                                                                                  **ALONE | settings), rows)


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(shallow())


def dense(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    """The log-probabilities (C, V) at each token of a completion."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    middle = torch.log((1 - beta) * p.exp() + beta * q.exp())
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


def of_some(logprobs: Tensor, ids: Tensor, tail: bool) -> Tensor:
    some = logprobs.gather(-1, ids)
    return torch.cat([some, torch.log1p(-some.exp().sum(-1, True))], -1) if tail else some.log_softmax(-1)


def token_losses(p: Tensor, q: Tensor, ids: list[int], config: Any, by_teacher: bool) -> Tensor:
    """(C,) of one completion, from all log-probabilities (C, V) of both."""
    rows = min(p.shape[-1], q.shape[-1])
    beta = config.beta if isinstance(config, DistillationConfig) else config.distillation_alpha
    if config.distillation_mode == "sampled_token":
        own, other = (each.gather(-1, torch.tensor(ids)[:, None])[:, 0] for each in (p, q))
        return (own - other).detach() * own
    if config.distillation_mode == "full_logits":
        return divergence(*(each[:, :rows].log_softmax(-1) for each in (p, q)), beta)
    top = (q if by_teacher else p)[:, :rows].topk(config.distillation_topk).indices
    return divergence(*(of_some(each, top, config.distillation_add_tail) for each in (p, q)), beta)


@dataclass
class Case:
    """A trainer, and its teacher as plain transformers and PEFT have it (None: the student as it is)."""

    trainer: Any
    teacher: Any = None
    by_teacher: bool = False  # whether the tokens of top-k are the teacher's likeliest
    prompt_of: Callable[[Any, Any], list[int]] = lambda group, rollout: rollout.teacher_prompt or group.prompt_ids


def without_adapter(folder: Path, stack: Any) -> Case:
    return Case(student(folder, "base", beta=0.3), base())


def with_other_adapter(folder: Path, stack: Any) -> Case:
    scatter(load(), seed=5).save_lora(folder / "teacher")
    return Case(student(folder, folder / "teacher", distillation_mode="sampled_token"),
                peft.PeftModel.from_pretrained(base(), folder / "teacher"))


def smaller_model(folder: Path, stack: Any) -> Case:
    """Of another hidden size and with fewer tokens, in a folder."""
    made = random_model("Llama", hidden_size=48, vocab_size=370)
    made.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "teacher")
    settings = {"distillation_mode": "topk_logits", "distillation_topk": 200, "beta": 0.3}
    return Case(student(folder, str(folder / "teacher"), **settings), made)


def wider_model(folder: Path, stack: Any) -> Case:
    """With rows in its head that the student lacks, and that would be likely."""
    made = base()
    made.resize_token_embeddings(400)
    with torch.no_grad():
        made.get_output_embeddings().weight[384:] = made.get_output_embeddings().weight[7:23]
    return Case(student(folder, made), made)


def loaded_model(folder: Path, stack: Any) -> Case:
    other = scatter(load(), seed=5)
    return Case(student(folder, other, beta=0.0), plain_peft(other, folder / "teacher"))


def worked_solution(folder: Path, stack: Any) -> Case:
    config = SDFTConfig(output_dir=str(folder / "run"), teacher="live", distillation_topk=7, num_loss_tokens_to_skip=2,
                        **SMALL)
    trainer = SDFTTrainer(moved(load()), config, WORKED)

    def prompt_of(group: Any, rollout: Any) -> list[int]:
        said = group.row["prompt"][0]["content"] + "\n\n" + CONTEXT
        return list(trainer.tokenizer.apply_chat_template([{"role": "user", "content": said}], return_dict=False,
                                                          add_generation_prompt=True))

    return Case(trainer, prompt_of=prompt_of)


def own_success(folder: Path, stack: Any) -> Case:
    config = SDPOConfig(output_dir=str(folder / "run"), success_reward_threshold=9.0, distillation_mode="full_logits",
                        **SMALL)
    return Case(SDPOTrainer(moved(load()), by_letters, config, ROWS))


def served_model(folder: Path, stack: Any) -> Case:
    made = random_model("Llama")

    @torch.no_grad()
    def answer(body: dict[str, Any]) -> judge_server.Reply:
        ids, places = body["prompt"], list[Any]([None])
        for row, token in zip(made(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1), ids[1:], strict=False):
            named = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            places.append({str(name): {"logprob": float(row[name])} for name in named})
        return 200, json.dumps({"choices": [{"index": 0, "text": "", "prompt_logprobs": places}]}).encode()

    server = stack.enter_context(judge_server.serving(answer))
    settings = {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_add_tail": True}
    return Case(student(folder, ServedTeacher(server.url, model="m", top_k=5), **settings), made, True)


def own_server(folder: Path, stack: Any) -> Case:
    (folder / "served").mkdir()
    options: dict[str, Any] = {"context": 128, "dtype": torch.float32, "load_in_16bit": True}
    served = stack.enter_context(serving(folder / "served", str(shallow()), **options))
    teacher = ServedTeacher(served.url, api_key=OWNER, top_k=1)
    return Case(student(folder, teacher, distillation_mode="sampled_token"), base())


def stored_teacher(folder: Path, stack: Any) -> Case:
    made, rows = random_model("Llama"), []
    for row in ROWS:
        ids = AutoTokenizer.from_pretrained(TINY).apply_chat_template(row["prompt"], return_dict=False,
                                                                      add_generation_prompt=True)
        with torch.no_grad():
            top = dense(made, list(ids), STORED_IDS).topk(6)
        rows.append(row | {"completion_ids": STORED_IDS, "teacher_top_ids": top.indices.tolist(),
                           "teacher_top_logprobs": top.values.tolist()})
    settings = {"distillation_mode": "topk_logits", "distillation_topk": 6}
    return Case(student(folder, "stored", rows, **settings), made, True)


def beside(**trained: Any) -> Any:
    """A student that trains more than LoRA, and is not as it was at the start."""
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False, **trained)
    return scatter(moved(model), of="modules_to_save" if "modules_to_save" in trained else "tokens_delta")


def whole_head(folder: Path, stack: Any) -> Case:
    return Case(student(folder, "base", beta=0.3, model=beside(modules_to_save=["lm_head"])), base())


def rows_of_head(folder: Path, stack: Any) -> Case:
    model = beside(trainable_token_indices=[7, 20, 23, 300, 5])
    return Case(student(folder, "base", beta=0.3, model=model), base())


def likeliest_of_whole_head(folder: Path, stack: Any) -> Case:
    settings = {"distillation_mode": "topk_logits", "distillation_topk": 7, "beta": 0.3}
    return Case(student(folder, "base", model=beside(modules_to_save=["lm_head"]), **settings), base())


def likeliest_of_rows(folder: Path, stack: Any) -> Case:
    config = SDPOConfig(output_dir=str(folder / "run"), success_reward_threshold=9.0, distillation_mode="topk_logits",
                        distillation_topk=9, **SMALL)
    return Case(SDPOTrainer(beside(trainable_token_indices=[7, 20, 23, 300, 5]), by_letters, config, ROWS))


KINDS = (whole_head, rows_of_head, likeliest_of_whole_head, likeliest_of_rows, without_adapter, with_other_adapter,
         smaller_model, wider_model, loaded_model, worked_solution, own_success, served_model, own_server,
         stored_teacher)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_first_steps_loss_or_gradient_would_not_be_that_of_its_teacher(kind: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        case = kind(tmp_path, stack)
        groups = case.trainer.rollout()
    trainer, config, losses, weights = case.trainer, case.trainer.args, [], []
    plain, skipped = plain_peft(trainer.model, tmp_path / "plain"), getattr(config, "num_loss_tokens_to_skip", 0)
    for group in groups:
        for rollout in group.rollouts:
            ids, taught = rollout.completion_ids, rollout.fields["teacher_mask"]
            p = dense(plain, group.prompt_ids, ids)
            with torch.no_grad():
                q = dense(case.teacher or plain, case.prompt_of(group, rollout), ids)
            counts = (torch.arange(len(ids)) >= skipped).float() * float(taught.max())
            assert torch.equal(counts, taught.expand(len(ids)))
            losses.append(token_losses(p, q, ids, config, case.by_teacher))
            weights.append(counts / counts.sum().clamp(min=1) if config.by_sequence else counts)
    total = len(weights) if config.by_sequence else sum(len(weight) for weight in weights)
    wanted = (torch.cat(losses) * torch.cat(weights)).sum() / total
    wanted.backward()
    trainer.learner.prepare(groups, 1)
    metrics = trainer.learner.forward_backward(groups)
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-3, abs=1e-6) and abs(wanted.item()) > 1e-4
    own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert own.keys() == found.keys()
    scale = max(float(grad.abs().max()) for grad in own.values())
    assert max(float((found[name] - own[name]).abs().max()) for name in own) < 2e-4 * scale


# A teacher that follows the policy

FOLLOWING: dict[str, Any] = SMALL | {"teacher": "ema", "teacher_update_rate": 0.25, "save_steps": 2,
                                     "save_strategy": "steps", "max_steps": 4, "learning_rate": 3e-3}
FILE = "teacher.safetensors"


def following(folder: Path, model: Any, callbacks: Any = None, **settings: Any) -> SDFTTrainer:
    return SDFTTrainer(model, SDFTConfig(output_dir=str(folder), **FOLLOWING | settings), WORKED, callbacks=callbacks)


class Keeps:
    """Keeps the adapter after each optimizer step."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, list[Gradients]()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.append(adapter_of(self.model))


@pytest.mark.parametrize("every", [1, 2])
def test_an_average_would_not_follow_at_its_rate_and_steps(every: int, tmp_path: Path) -> None:
    model = moved(load())
    begun, keeps = adapter_of(model), Keeps(model)
    trainer = following(tmp_path, model, [keeps], teacher_sync_steps=every)
    trainer.train()
    for name, kept in (trainer.policy.teacher_adapter or {}).items():
        wanted = begun[name]
        for after in keeps.seen[every - 1 :: every]:
            wanted = 0.25 * after[name] + 0.75 * wanted
        torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=1e-8)
        assert not torch.equal(kept, begun[name])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    following(folder, moved(load())).train()
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("fresh", [True, False], ids=["a new adapter", "another adapter"])
def test_a_resumed_run_would_go_on_with_another_average(fresh: bool, straight: Path, tmp_path: Path) -> None:
    following(tmp_path, moved(load()), [StopAt(2)]).train()
    trainer = following(tmp_path, load() if fresh else scatter(load(), seed=9))
    trainer.train(resume_from_checkpoint=True)
    for path in (f"checkpoint-4/{FILE}", "adapter/adapter_model.safetensors"):
        assert same(load_file(tmp_path / path), load_file(straight / path)), path
    assert losses(tmp_path) == losses(straight) and len([loss for loss in losses(straight) if loss > 0.01]) == 4


def test_a_second_run_of_a_trainer_would_begin_with_the_average_of_the_first(tmp_path: Path) -> None:
    model = moved(load())
    trainer, begun = following(tmp_path / "run", model), adapter_of(model)
    mixed = make(tmp_path / "mixed", beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    first = adapter_of(mixed.model)
    for one in (trainer, mixed):
        one.train()
        one.saver.begin_again()
    assert same(trainer.policy.teacher_adapter or {}, begun) and not same(adapter_of(model), begun)
    assert same(mixed.policy.reference_adapter or {}, first)
    trainer.policy.teacher_adapter = {name: value + 1 for name, value in begun.items()}
    trainer.saver.begin_again()
    assert same(trainer.policy.teacher_adapter, begun)


# Rewards beside a teacher, and what must not change what is learnt

SHARE = 0.3
MIXED: dict[str, dict[str, Any]] = {
    "kl and entropy": {"beta": 0.1, "entropy_coef": 0.01, "distillation_mode": "full_logits",
                       "distillation_alpha": 0.3},
    "second optimizer step": {"beta": 0.1, "num_iterations": 2},
    "truncated ones masked": {"mask_truncated_completions": True, "distillation_mode": "topk_logits",
                              "distillation_topk": 5, "distillation_add_tail": True},
    "small micro-batches": {"loss_type": "dr_grpo", "max_tokens_per_micro_batch": 60,
                            "distillation_mode": "full_logits"},
}


def learnt(trainer: Any, sampled: list[RolloutGroup], **wider: Any) -> tuple[float, Gradients]:
    """The loss and the gradient on copies of the groups; with several iterations, after the policy has moved."""
    groups = copy.deepcopy(sampled)
    vars(trainer.args).update(wider)
    trainer.learner.prepare(groups, trainer.args.num_iterations)
    if trainer.args.num_iterations > 1:
        with torch.no_grad():
            for number, parameter in enumerate(trainer.policy.trainable):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    loss = trainer.learner.forward_backward(groups)["loss"]
    return loss, {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", MIXED.values(), ids=MIXED)
def test_rewards_and_a_teacher_would_not_add_up_by_their_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    own = {name: value for name, value in settings.items() if not name.startswith("distillation")}
    shared = {name: value for name, value in settings.items() if name not in ("beta", "entropy_coef")}
    both, paid, taught = (make(tmp_path / name, by_letters, model=moved(load()), **each) for name, each in (
        ("both", settings | {"teacher": "base", "distillation_weight": SHARE}), ("paid", own),
        ("taught", shared | {"teacher": "base", "distillation_weight": 1.0})))
    groups = both.rollout()
    for group in groups:
        for rollout in group.rollouts[:2]:
            rollout.finish_reason = "stop"
    (loss, found), (paid_loss, first), (taught_loss, second) = (learnt(each, groups) for each in (both, paid, taught))
    assert loss == pytest.approx((1 - SHARE) * paid_loss + SHARE * taught_loss, rel=1e-4)
    wanted = {name: (1 - SHARE) * first[name] + SHARE * second[name] for name in first}
    assert relative(found, wanted) < 1e-5 and relative(first, wanted) > 0.1 and relative(second, wanted) > 0.1
    if "max_tokens_per_micro_batch" in settings:
        both.model.zero_grad()
        assert relative(learnt(both, groups, max_tokens_per_micro_batch=None)[1], found) < 1e-5


@pytest.mark.parametrize("precision", ["bf16 model", "bf16", "fp16", "4 bits"])
def test_a_teacher_would_be_loaded_or_compared_in_another_precision(precision: str, tmp_path: Path) -> None:
    """The plain model has 32 bits; the tolerance is that of the precision."""
    four, half = precision == "4 bits", torch.bfloat16 if precision == "bf16 model" else None
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=four, dtype=half)
    model = moved(FastLanguageModel.get_peft_model(bare, r=4))
    mixed = {precision: True} if precision in ("bf16", "fp16") else {}
    trainer = student(tmp_path, str(shallow()) if four else "base", model=model, beta=0.3, **mixed)
    groups, kept = trainer.rollout(), trainer.policy.trainable
    metrics = trainer.update(groups)
    assert math.isfinite(metrics["grad_norm"]) and all(parameter.isfinite().all() for parameter in kept)
    if four:
        assert len([*linears_in_4bit(trainer.teaching.teacher.other.base)]) == 14
        return
    plain, other = plain_peft(moved(load()), tmp_path / "plain"), base()
    with torch.no_grad():
        both = [[dense(each, group.prompt_ids, rollout.completion_ids) for each in (plain, other)]
                for group in groups for rollout in group.rollouts]
        wanted = torch.cat([divergence(*each, 0.3) for each in both]).mean()
    assert metrics["distillation/divergence"] == pytest.approx(float(wanted), rel=0.05) and wanted > 0.01


def test_a_teacher_would_read_with_the_dropout_of_training(tmp_path: Path) -> None:
    config = SDFTConfig(output_dir=str(tmp_path / "run"), teacher="live", distillation_mode="sampled_token",
                        distillation_alpha=1.0, disable_dropout=False, **SMALL)
    trainer = SDFTTrainer(moved(load(lora_dropout=0.5)), config, WORKED)
    groups, plain = trainer.rollout(), plain_peft(trainer.model, tmp_path / "plain")
    trainer.learner.prepare(groups, 1)
    for rollout in groups[0].rollouts:
        wanted = naive_logprobs(plain, rollout.teacher_prompt or [], rollout.completion_ids)
        assert (rollout.fields["teacher_logprobs"] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(("other", "number"), [(False, 0), (True, 0), (False, 3)],
                         ids=["its own base", "another model", "in training"])
def test_memory_that_runs_out_while_the_teacher_reads_or_later_would_change_what_is_learnt(
    other: bool, number: int, tmp_path: Path
) -> None:
    ends = []
    for tokens in (50, 100):
        given = scatter(load(), seed=5) if other else "base"
        trainer = student(tmp_path / str(tokens), given, TEXTS, max_tokens_per_micro_batch=tokens)
        groups, hook = trainer.rollout(), Failing(number)
        if tokens == 100:
            read = trainer.teaching.teacher.other or trainer.policy
            read.backbone.norm.register_forward_hook(hook)
        trainer.update(groups)
        assert hook.raised == (tokens == 100)
        ends.append(adapter_of(trainer.model))
    assert same(*ends)


def test_an_episode_would_be_read_without_what_its_environment_said(tmp_path: Path) -> None:
    class Twice:
        def reset(self, **_: Any) -> str:
            self.left = 2
            return "Say a digit."

        def step(self, reply: str) -> tuple[str, float, bool]:
            self.left -= 1
            return "Another one", float(len(reply) % 3), self.left == 0

    config = GRPOConfig(output_dir=str(tmp_path), teacher="base", max_turn_tokens=6, max_turns=2,
                        **SMALL | {"max_completion_length": 64})
    trainer = GRPOTrainer(moved(load()), None, config, environment_factory=Twice)
    groups, plain = trainer.rollout(), base()
    trainer.learner.prepare(groups, 1)
    rollouts = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    assert all(len(rollout.turns) == 2 and not rollout.splits for _, rollout in rollouts)
    for prompt, rollout in rollouts:
        wanted = rollout.at_trained(naive_logprobs(plain, prompt, rollout.completion_ids))
        assert (rollout.at_trained(rollout.fields["teacher_logprobs"]) - wanted).abs().max() < 1e-4
    assert math.isfinite(trainer.learner.forward_backward(groups)["loss"])


# Evaluations


def evaluated(folder: Path, **settings: Any) -> SDPOTrainer:
    config = SDPOConfig(output_dir=str(folder), success_reward_threshold=9.0, disable_dropout=False,
                        **SMALL | {"max_steps": 3} | settings)
    return SDPOTrainer(moved(load(lora_dropout=0.1)), by_letters, config, ROWS, ROWS[:2])


def test_an_evaluation_would_change_the_run_or_have_no_loss_of_distillation(tmp_path: Path) -> None:
    alone, often = evaluated(tmp_path / "alone"), evaluated(
        tmp_path / "often", eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss")
    seen = Keeps(often.model), Keeps(alone.model)
    for trainer, keeps in zip((often, alone), seen, strict=True):
        trainer.add_callback(keeps)
        trainer.train()
    assert len(seen[0].seen) == 3 and all(map(same, seen[0].seen, seen[1].seen))
    assert same(often.policy.teacher_adapter or {}, alone.policy.teacher_adapter or {})
    lines = [line for folder in ("alone", "often") for line in read_lines(tmp_path / folder / "metrics.jsonl")]
    kept = [{name: line[name] for name in line if name.startswith(("self_dist", "distill", "loss"))}
            for line in lines if "loss" in line]
    assert kept[:3] == kept[3:] and len(kept) == 6
    best = [line["eval_loss"] for line in often.state.log_history if "eval_loss" in line]
    assert often.state.best_metric == min(best) and len(best) == 3


def test_the_loss_of_an_evaluation_would_not_be_that_of_its_completions(tmp_path: Path) -> None:
    trainer, groups = evaluated(tmp_path / "run"), list[RolloutGroup]()
    trainer.evaluation.run(trainer.eval_sets, lambda sampled: groups.extend(sampled) or {})
    metrics, plain = trainer.evaluate(), plain_peft(trainer.model, tmp_path / "plain")
    trainer.read_by_teacher(groups)
    sequences = []
    with torch.no_grad():
        for group in groups:
            for rollout in group.rollouts:
                own, other = (naive_logprobs(plain, prompt, rollout.completion_ids) for prompt in (
                    group.prompt_ids, rollout.teacher_prompt or group.prompt_ids))
                sequences.append(((own - other) * own).mean() * rollout.fields["teacher_mask"])
    assert 0 < sum(bool(value) for value in sequences) < len(sequences)
    assert metrics["eval_loss"] == pytest.approx(float(sum(sequences)) / len(sequences), rel=1e-3)
    assert {"eval_distillation/divergence", "eval_reward"} <= metrics.keys()


# What is refused, in words and before a model is loaded

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (GRPOConfig, {"teacher": "live"}, "nothing differs. Take 'ema' or 'base', or SDPOTrainer or SDFTTrainer"),
    (GRPOConfig, {"teacher": "base", "distillation_alpha": 0.5}, "set distillation_alpha=1.0, or the mode 'topk_l"),
    (GRPOConfig, {"teacher": "base", "distillation_mode": "topk_logits"}, "set distillation_topk, such as 100"),
    (GRPOConfig, {"teacher": " "}, "a folder with an adapter, the name or folder of a model, or a URL"),
    (GRPOConfig, {"teacher": "stored"}, "Set distillation_mode='topk_logits', distillation_weight=1.0 and num_gen"),
    (GRPOConfig, {"teacher": "stored", "distillation_weight": 0.0}, "and no policy sampled it. Set distillation_mode"),
    (DistillationConfig, {"teacher": "stored", "distillation_mode": "topk_logits", "distillation_topk": 4,
                          "temperature": 0.7}, "as DistillationConfig has them, and temperature=1.0"),
    (DistillationConfig, {"teacher": "base", "sync_ref_model": True}, "nothing is compared with the reference. Set it"),
    (GRPOConfig, {"teacher": "http://a", "temperature": 0.7}, "to 'sampled_token' or 'topk_logits', and temperature=1"),
    (GRPOConfig, {"teacher": "http://a", "distillation_mode": "full_logits"}, "set distillation_mode to 'sampled_tok"),
    (GRPOConfig, {"teacher": "base", "train_while_sampling": True}, "leave train_while_sampling out"),
    (GRPOConfig, {"teacher": "base", "replay_buffer_size": 4}, "leave replay_buffer_size out"),
    (GRPOConfig, {"teacher": "base", "distillation_weight": 1.0, "beta": 0.1, "entropy_coef": 0.1},
     "there is no policy loss, which beta, entropy_coef changes; leave it out, or set a smaller distillation_weight"),
    (GRPOConfig, {"teacher": "base", "distillation_weight": 1.0, "top_entropy_quantile": 0.5}, "which top_entropy_q"),
    (GRPOConfig, {"teacher": "ema", "distillation_weight": 1.0}, "Set a distillation_weight below 1, with rewards"),
    (DistillationConfig, {"teacher": "ema"}, "begins as the policy: nothing is learnt from it alone"),
    (DistillationConfig, {"distillation_alpha": 0.3}, "DistillationConfig calls it beta, as TRL does: set beta=0.3"),
    (DistillationConfig, {"distillation_mode": "sampled_token", "beta": 0.3}, "and beta is 0.3; one token gives"),
    (DistillationConfig, {"lmbda": 0.5}, "train on other texts with SFTTrainer"),
    (DistillationConfig, {"seq_kd": True}, "train on other texts with SFTTrainer"),
    (SDFTConfig, {"num_loss_tokens_to_skip": 256}, "and max_completion_length 256: no token is left to learn; skip f"),
    (DistillationConfig, {"teacher": "HTTP://a"}, "set distillation_mode to 'sampled_token' or 'topk_logits'"),
    (DistillationConfig, {"teacher_model_init_kwargs": ["float32"]}, "it must be a dict"),
    (SDPOConfig, {"use_successful_as_teacher": False}, "the teacher is told nothing; set one of them to True"),
]


@pytest.mark.parametrize(("kind", "settings", "said"), REFUSED, ids=[said[:40] for _, _, said in REFUSED])
def test_settings_that_contradict_each_other_would_be_taken(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        kind(**settings)


def test_a_token_for_loading_the_teacher_would_be_kept_in_records() -> None:
    config = DistillationConfig(teacher_model_init_kwargs={"token": "hf_secret", "dtype": torch.float32})
    assert config.to_dict()["teacher_model_init_kwargs"] == {"dtype": "torch.float32"}


NOWHERE = "nobody/nothing"  # whose loading would be another error
PLAIN = [{"prompt": "1 + 1"}]
OF_STORED = DistillationConfig(teacher="stored", distillation_mode="topk_logits", distillation_topk=4)
WITH_URL = DistillationConfig(distillation_mode="sampled_token")
DOORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: DistillationTrainer(NOWHERE, None, None, PLAIN), "DistillationConfig needs a teacher and a"),
    (lambda: GRPOTrainer(NOWHERE, digit_sum, DistillationConfig(), PLAIN), "DistillationConfig needs a teacher"),
    (lambda: SDPOTrainer(NOWHERE, digit_sum, SDPOConfig(teacher=None), PLAIN), "SDPOConfig needs a teacher"),
    (lambda: DistillationTrainer(NOWHERE, "base", None, PLAIN, teacher="base"), "two names of the same; give one"),
    (lambda: SDPOTrainer(NOWHERE, None, None, PLAIN), "Without rewards take SDFTTrainer or DistillationTrainer"),
    (lambda: SDFTTrainer(NOWHERE, None, PLAIN), "has no column 'privileged_context'"),
    (lambda: GRPOTrainer(NOWHERE, [], None, PLAIN, teacher="base", dynamic_sampling_rounds=2),
     "dynamic_sampling_rounds is 2, which goes by rewards, and there are none"),
    (lambda: GRPOTrainer(NOWHERE, None, None, PLAIN, teacher="base", advantage_estimator="remax"),
     "advantage_estimator is 'remax', which goes by rewards, and there are none"),
    (lambda: DistillationTrainer(NOWHERE, "stored", OF_STORED, PLAIN, rollout_func=lambda prompts, trainer: {}),
     "say where completions are from; leave them, or tools, environment_factory and rollout_func out"),
    (lambda: SDFTTrainer(NOWHERE, SDFTConfig(generate_from_teacher=True), WORKED, tools=[digit_sum]),
     "say where completions are from"),
    (lambda: TrajectoryTrainer(NOWHERE, GRPOConfig(teacher="base")), "a teacher reads what GRPOTrainer samples; leave"),
    (lambda: TrajectoryTrainer(NOWHERE, DistillationConfig()), "args is a DistillationConfig, and a teacher reads"),
    (lambda: DistillationTrainer(NOWHERE, "./runs/arithmetc", None, PLAIN), "there is no teacher './runs/arithmetc' ("),
    (lambda: DistillationTrainer(NOWHERE, ("model", "tokenizer"), None, PLAIN), "the teacher is a tuple; give a model"),
    (lambda: DistillationTrainer(NOWHERE, "base", DistillationConfig(teacher_model_init_kwargs={"bits": 4}), PLAIN),
     "bits=4 is not supported"),
    (lambda: DistillationTrainer(NOWHERE, "http://127.0.0.1:9", WITH_URL, PLAIN), "cannot be reached"),
    (lambda: DistillationTrainer(NOWHERE, "http://127.0.0.1:x", WITH_URL, PLAIN), "the teacher's URL is"),
    (lambda: SFTTrainer(NOWHERE, PLAIN, teacher="base"), "SFTTrainer has no parameter 'teacher'"),
]


@pytest.mark.parametrize(("door", "said"), DOORS, ids=[said[:40] for _, said in DOORS])
def test_a_trainer_that_cannot_distill_would_load_a_model_first(door: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError, TeacherError), match=re.escape(said)):
        door()


def other_tokens(folder: Path) -> Any:
    """A model with a tokenizer of its own."""
    random_model("Llama").save_pretrained(folder / "other")
    made = AutoTokenizer.from_pretrained(TINY)
    words = json.loads(made.backend_tokenizer.to_str())
    first, second = list(words["model"]["vocab"])[30:32]
    vocabulary = words["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    type(made)(tokenizer_object=Tokenizer.from_str(json.dumps(words))).save_pretrained(folder / "other")
    return str(folder / "other")


@pytest.mark.parametrize(("teacher", "settings", "said"), [
    (lambda folder, model: model, {}, "the teacher is the model that is trained; say teacher='base' or 'ema'"),
    (lambda folder, model: model.get_base_model(), {}, "the teacher is the model that is trained"),
    (lambda folder, model: plain_peft(model, folder / "peft"), {}, "a PeftModel; pass its adapter's folder, or what"),
    (lambda folder, model: ServedTeacher("http://127.0.0.1:9/v1", model="m", top_k=4), {
        "distillation_mode": "topk_logits", "distillation_topk": 5}, "and the ServedTeacher's top_k is 4; give both"),
    (lambda folder, model: "base", {"distillation_mode": "topk_logits", "distillation_topk": 385},
     "distillation_topk is 385, and the vocabulary has 384 tokens; set at most that"),
    (lambda folder, model: other_tokens(folder), {}, "the teacher's tokens are not the student's"),
    (lambda folder, model: random_model("Llama", max_position_embeddings=100), {},
     "the teacher reads at most 100 tokens, and the student was loaded for 128; load it with max_seq_length=100"),
    (lambda folder, model: folder / "nothing", {}, "there is no such folder"),
], ids=["itself", "its base", "peft", "top_k", "vocabulary", "tokens", "context", "folder"])
def test_a_teacher_that_cannot_teach_would_fail_in_the_first_step_or_never(
    teacher: Any, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = moved(load())
    with pytest.raises((ValueError, TypeError, OSError), match=said):
        student(tmp_path, teacher(tmp_path, model), model=model, **settings)


def test_a_token_that_the_teacher_lacks_would_be_looked_up_beyond_its_embedding(tmp_path: Path) -> None:
    made = base()
    made.resize_token_embeddings(40)
    trainer = student(tmp_path, made)
    with pytest.raises(ValueError, match=r"has the token \d+, and the teacher has 40 tokens; take a teacher with"):
        trainer.rollout()


@pytest.mark.parametrize("args", [None, SDPOConfig(teacher="base")], ids=["no args", "args"])
def test_the_kind_of_a_teacher_would_be_read_from_args_only(args: Any, tmp_path: Path) -> None:
    made = SDPOTrainer(load(), digit_sum, args, ROWS, output_dir=str(tmp_path), teacher_model_kind="live", **SMALL)
    assert made.teaching.teacher.kind == made.args.teacher == "live"


def test_a_served_teacher_would_read_another_history_than_the_policy(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        trainer = served_model(tmp_path, stack).trainer
        split = Rollout([7, 8], [0.0] * 2, "stop", splits=[Split(0, [5])])
        with pytest.raises(ValueError, match="gave the policy another history; take a teacher that computes here"):
            trainer.teaching.read([RolloutGroup(ROWS[0], [5, 9], [split])])


def test_a_policy_that_is_its_own_teacher_would_train_for_nothing_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student(tmp_path / "new", "base", model=load())
    assert "the policy is its teacher 'base' and learns nothing: continue a trained adapter" in caplog.text
    caplog.clear()
    student(tmp_path / "trained", "base")
    make(tmp_path / "paid", teacher="base")
    assert "learns nothing" not in caplog.text


@pytest.mark.parametrize("setting", [
    {"teacher": "stored"}, {"distillation_weight": 0.5}, {"distillation_mode": "sampled_token"},
    {"distillation_topk": 3}, {"max_reprompt_len": 9},
], ids=str)
def test_a_setting_of_the_teacher_that_is_changed_too_late_would_have_no_effect(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    trainer = student(tmp_path, "base")
    vars(trainer.args).update(setting)
    with pytest.raises(ValueError, match=f"args.{next(iter(setting))} is .* make a new trainer"):
        trainer.train()


class Selected:
    """Keeps the prompts behind which completions are sampled."""

    prompts: Any = None

    def on_generation_prompts_selected(self, generation_prompts: Any = None, **_: Any) -> None:
        self.prompts = generation_prompts


def test_completions_would_not_be_sampled_behind_the_teachers_prompt_or_be_learnt_behind_it(tmp_path: Path) -> None:
    watcher, settings = Selected(), {**SMALL, "generate_from_teacher": True, "num_iterations": 2, "temperature": 1e-6}
    trainer = SDFTTrainer(moved(load()), SDFTConfig(output_dir=str(tmp_path / "run"), **settings), WORKED,
                          callbacks=[watcher])
    plain, groups = plain_peft(trainer.model, tmp_path / "plain"), trainer.rollout()
    for group, asked in zip(groups, watcher.prompts, strict=True):
        assert asked[-1]["content"] == group.row["prompt"][-1]["content"] + f"\n\n{CONTEXT}"
        read = trainer.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        own = trainer.tokenizer.apply_chat_template(group.row["prompt"], add_generation_prompt=True, return_dict=True)
        assert group.prompt_ids == own["input_ids"] and read != group.prompt_ids
        for rollout in group.rollouts:
            assert rollout.teacher_prompt == read
            ids = torch.tensor([read + rollout.completion_ids])
            likeliest = plain(input_ids=ids).logits[0, len(read) - 1 : -1].argmax(-1)
            assert likeliest.tolist() == rollout.completion_ids
    assert trainer.parity.watch(groups) == {}
    trainer.update(groups)
    assert groups[0].rollouts[0].old_logprobs is None
    with pytest.raises(ValueError, match=r"generate_from_teacher=True, and distillation_weight is 0\.5"):
        SDFTConfig(generate_from_teacher=True, distillation_weight=0.5)
