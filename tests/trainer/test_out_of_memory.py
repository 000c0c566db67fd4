"""Memory that runs out in training: what is trained stays the same."""

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_runs
from checkpointed_stack import LateCopies
from memory import Failing
from trainer_runs import TEXTS, Gradients, adapter, load, moved, same

from lowmem_grpo import GRPOTrainer
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.oom import MemoryExhaustedError, OutOfMemory, RunMemory
from lowmem_grpo.models.packing import pack
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.types import RolloutGroup
from lowmem_grpo.utils import GIB

TOKENS = 100  # of a micro-batch: the groups below make at least three of them
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 16, "max_completion_length": 12, "max_steps": 3,
                            "disable_tqdm": True, "parity_steps": 0}


def make(folder: Path, dropout: float = 0.1, checkpointing: bool | str = False, **settings: Any) -> GRPOTrainer:
    """A trainer of the embedded model, with an adapter that matters."""
    model = moved(load(lora_dropout=dropout, checkpointing=checkpointing))
    return trainer_runs.make(folder, rows=TEXTS, model=model, **SETTINGS | settings)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> list[RolloutGroup]:
    """Four groups of four completions, all with a gradient."""
    groups = make(tmp_path_factory.mktemp("sampled")).rollout()
    assert count_batches(groups, TOKENS) >= 3
    return groups


def fail_forward(trainer: GRPOTrainer, hook: Failing) -> Any:
    """At the last layer norm of a forward pass, when all layers have run."""
    return trainer.policy.backbone.norm.register_forward_hook(hook)


def fail_backward(trainer: GRPOTrainer, hook: Failing) -> Any:
    """When the gradient of the first layer's adapter is there, and those of all other layers were added already."""
    first = next(p for name, p in trainer.model.named_parameters() if "layers.0.self_attn.q_proj.lora_A" in name)
    return first.register_hook(hook)


PLACES = {"forward": fail_forward, "backward": fail_backward}


def updated(trainer: GRPOTrainer, groups: list[RolloutGroup], hook: Any = None) -> tuple[Gradients, dict[str, float]]:
    """The adapter after an update on copies of the groups, and its metrics; the hook's handle is removed."""
    torch.manual_seed(7)
    metrics = trainer.update(copy.deepcopy(groups))
    if hook is not None:
        hook.remove()
    return adapter(trainer), metrics


def distance(first: Gradients, second: Gradients) -> float:
    return sum((first[name] - second[name]).square().sum().item() for name in first) ** 0.5


def batches(groups: list[RolloutGroup], tokens: int | None = None) -> list[Any]:
    trained = [RolloutGroup(g.row, g.prompt_ids, [r for r in g.rollouts if r.advantage]) for g in groups]
    return pack(trained, tokens, SETTINGS["per_device_train_batch_size"])


def count_batches(groups: list[RolloutGroup], tokens: int) -> int:
    return len(batches(groups, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_layer_inputs_on_the_host_survive_an_attempt_that_broke_off(
    tmp_path: Path, sampled: list[RolloutGroup], place: str
) -> None:
    """Their pages come back, and the repeated step reads none of the first attempt's."""
    kind: dict[str, Any] = {"dropout": 0.1, "checkpointing": "offload"}
    expected, _ = updated(make(tmp_path, max_tokens_per_micro_batch=TOKENS // 2, **kind), sampled)
    for number in (0, count_batches(sampled, TOKENS) - 1):  # with nothing done before it, and with most
        trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS, **kind)
        # what a card does, on the CPU: copies as late as allowed, in pages smaller than a layer input
        offload = ActivationOffload(trainer.model, LateCopies(), min_bytes=1024, page_bytes=4096)
        trainer.learner.offload = offload
        hook = Failing(number)
        found, _ = updated(trainer, sampled, PLACES[place](trainer, hook))
        assert hook.raised == 1 and offload.host_bytes_peak > 0
        assert same(found, expected), number
        assert offload.host_bytes == 0


@pytest.mark.parametrize(("dropout", "place"), [(0.0, "forward"), (0.1, "backward")])
@pytest.mark.every(2)
def test_out_of_memory_at_any_micro_batch_or_twice_in_a_row_does_not_change_what_is_trained(
    tmp_path: Path, sampled: list[RolloutGroup], place: str, dropout: float
) -> None:
    kind = {"dropout": dropout}
    # with nothing done before it, with most, and at the second micro-batch and the first of the second attempt
    for calls in ((0,), (count_batches(sampled, TOKENS) - 1,), (1, 2)):
        bound = TOKENS // 2 ** len(calls)
        expected, metrics = updated(make(tmp_path, max_tokens_per_micro_batch=bound, **kind), sampled)
        trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS, **kind)
        hook = Failing(*calls)
        found, measured = updated(trainer, sampled, PLACES[place](trainer, hook))
        assert hook.raised == len(calls) and trainer.memory.train.lowered == bound
        assert trainer.memory.metrics() == {"memory/oom_train": len(calls), "memory/oom_generate": 0}
        assert same(found, expected), calls
        assert measured == metrics
    if dropout == 0:
        start = adapter(make(tmp_path, **kind))
        whole, _ = updated(make(tmp_path, max_tokens_per_micro_batch=TOKENS, **kind), sampled)
        # Adam's first step is as large for a gradient of rounding noise as for any other: hence the norm of all
        assert distance(whole, expected) < 1e-2 * distance(start, expected)


def test_a_run_without_a_bound_halves_the_micro_batch_that_failed(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer = make(tmp_path)
    (batch,) = batches(sampled)
    half = len(batch.input_ids) // 2
    found, _ = updated(trainer, sampled, fail_forward(trainer, Failing(0)))
    assert trainer.memory.train.lowered == half
    assert same(found, updated(make(tmp_path, max_tokens_per_micro_batch=half), sampled)[0])


@pytest.mark.parametrize("error", [
    lambda: MemoryError(), lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
                                                "can't allocate memory: you tried to allocate 8 bytes."),
])
def test_out_of_memory_on_the_host_is_answered_too(tmp_path: Path, sampled: list[RolloutGroup], error: Any) -> None:
    trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS)
    updated(trainer, sampled, fail_forward(trainer, Failing(1, error=error)))
    assert trainer.memory.train.failures == 1


@pytest.mark.parametrize("error", [RuntimeError("the reward model is out of memory"), KeyboardInterrupt(),
                                   RuntimeError("CUDA Error: invalid argument at /csrc/cumem_allocator.cpp:139"),
                                   ValueError("CUDA out of memory"), RuntimeError("CUDA error: illegal memory access")])
def test_other_errors_are_raised(tmp_path: Path, sampled: list[RolloutGroup], error: BaseException) -> None:
    trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS)
    with pytest.raises(type(error)) as caught:
        updated(trainer, sampled, fail_forward(trainer, Failing(1, error=lambda: error)))
    assert caught.value is error
    assert trainer.memory.train.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize(("field", "number"), [
    ("old_logprobs", 0), ("ref_logprobs", 2), ("old_logprobs", 7), ("both", 0), ("both", 4), ("both", 7),
])
def test_out_of_memory_while_log_probabilities_are_recomputed_does_not_change_what_is_trained(
    tmp_path: Path, sampled: list[RolloutGroup], field: str, number: int
) -> None:
    more = {"old_logprobs": {"num_iterations": 2}, "ref_logprobs": {"beta": 0.1},
            "both": {"num_iterations": 2, "beta": 0.1}}[field]
    expected, _ = updated(make(tmp_path, max_tokens_per_micro_batch=TOKENS // 2, **more), sampled)
    trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS, **more)
    fills = count_batches(sampled, TOKENS) * (2 if field == "both" else 1)
    hook = Failing(number)  # in the first pass over the groups, in the second one, or in that of the first step
    found, _ = updated(trainer, sampled, fail_forward(trainer, hook))
    assert hook.raised == 1
    assert number < fills + count_batches(sampled, TOKENS) or field != "both"
    if number < fills + count_batches(sampled, TOKENS):
        assert same(found, expected)
    else:  # the second optimizer step: the first one was made in larger micro-batches, which cannot be undone
        assert all(torch.isfinite(value).all() for value in found.values())


def test_gradients_from_before_the_call_are_kept(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    first, second = sampled[:2], sampled[2:]
    gradients = []
    for tokens, calls in ((TOKENS // 2, ()), (TOKENS, (1,))):
        trainer = make(tmp_path, max_tokens_per_micro_batch=tokens)
        torch.manual_seed(7)
        trainer.learner.config.max_tokens_per_micro_batch = TOKENS // 2
        trainer.forward_backward(copy.deepcopy(first))
        trainer.learner.config.max_tokens_per_micro_batch = tokens
        parameter = trainer.policy.trainable[-1]
        held = parameter.grad
        hook = fail_backward(trainer, Failing(*calls))
        trainer.forward_backward(copy.deepcopy(second))
        hook.remove()
        assert trainer.memory.train.failures == len(calls)
        assert parameter.grad is held
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad})
    assert same(*gradients)


def test_what_cannot_be_made_smaller_changes_nothing_and_says_what_would_help(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    trainer = make(tmp_path)
    rows = [SimpleNamespace(name="MLP tile", train=3 * GIB, rollout=0),
            SimpleNamespace(name="weights", train=4 * GIB, rollout=4 * GIB)]
    trainer.memory.advice.plan = SimpleNamespace(rows=rows)
    before, random = adapter(trainer), torch.get_rng_state()
    with pytest.raises(MemoryExhaustedError) as caught:
        fail_backward(trainer, Failing(*range(100)))
        trainer.forward_backward(sampled)
    message = str(caught.value)
    assert "cannot be made smaller" in message
    expected = ("MLP tile      3.00 GiB", "together      7.00 GiB", "Measured peak: ", "max_completion_length (now 12)",
                "max_seq_length (now 128)", 'use_gradient_checkpointing="offload"', "load_in_4bit=True")
    assert [part for part in expected if part not in message] == []
    assert "8bit" not in message  # three settings, no more
    assert same(adapter(trainer), before)
    assert all(parameter.grad is None for parameter in trainer.policy.trainable)
    assert torch.equal(torch.get_rng_state(), random)
    sizes = [len(batch.rollouts) for batch in pack(sampled, trainer.memory.train.lowered)]
    assert set(sizes) == {1}


def test_a_setting_that_is_on_already_is_not_recommended(tmp_path: Path) -> None:
    trainer = make(tmp_path, checkpointing="offload", optim="adamw_8bit")
    text = trainer.memory.advice.text("train")
    assert "offload" not in text
    assert "8bit" not in text
    assert "load_in_4bit=True" in text
    assert text.count(";") == 2


def test_a_shortage_is_counted_and_reported_once(
    tmp_path: Path, sampled: list[RolloutGroup], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, max_tokens_per_micro_batch=TOKENS)
    sizes = {"weights": 9, "layer recompute": 5}
    rows = [SimpleNamespace(name=name, train=size, rollout=0) for name, size in sizes.items()]
    trainer.memory.advice.plan = SimpleNamespace(rows=rows)
    with caplog.at_level(logging.WARNING):
        updated(trainer, sampled, fail_forward(trainer, Failing(2)))
    (line,) = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    expected = ("a training micro-batch of ", "20.0 MiB", f"is now {TOKENS // 2}", "layer recompute")
    assert [part for part in expected if part not in line] == []


def test_the_parity_check_is_repeated_when_memory_runs_out(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer = make(tmp_path, parity_steps=1)
    expected = trainer.parity.check(sampled)
    handle = fail_forward(trainer, Failing(0))
    found = trainer.parity.check(sampled)
    handle.remove()
    assert found == pytest.approx(expected, abs=1e-6)
    assert trainer.memory.train.failures == 1
    assert trainer.policy.model.training


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_optimizer_step_that_runs_out_of_memory_is_made_once(
    tmp_path: Path, sampled: list[RolloutGroup], optim: str, moment: str
) -> None:
    expected, steady = [], make(tmp_path, optim=optim)
    expected = [updated(steady, sampled)[0] for _ in range(2)]
    for number in range(2):  # at the first step there is no state yet
        trainer = make(tmp_path, optim=optim)
        register = getattr(trainer.learner.optimizer, f"register_step_{'pre' if moment == 'before' else 'post'}_hook")
        handle = register(Failing(number))
        found = [updated(trainer, sampled)[0] for _ in range(2)]
        handle.remove()
        assert trainer.memory.train.failures == 1
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])


def test_an_optimizer_that_stops_between_parameters_updates_each_once(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    expected, _ = updated(make(tmp_path, optim="adamw_8bit"), sampled)
    trainer = make(tmp_path, optim="adamw_8bit")
    optimizer: Any = trainer.learner.optimizer
    initial, hook = optimizer.init_state, Failing(5)
    optimizer.init_state = lambda *args: hook() or initial(*args)  # the sixth parameter's state cannot be had
    found, _ = updated(trainer, sampled)
    assert hook.raised == 1
    assert same(found, expected)


def test_an_optimizer_step_without_memory_keeps_gradients_and_parameters(
    tmp_path: Path, sampled: list[RolloutGroup]
) -> None:
    trainer = make(tmp_path, max_grad_norm=1e9)
    before = adapter(trainer)
    trainer.forward_backward(copy.deepcopy(sampled))
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.learner.optimizer.register_step_post_hook(Failing(0, 1))
    with pytest.raises(MemoryExhaustedError, match="the optimizer step"):
        trainer.optim_step()
    assert same(adapter(trainer), before)
    assert same({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}, gradients)
    assert trainer.state.global_step == 0


def test_a_run_that_cannot_go_on_saves_what_it_has(tmp_path: Path) -> None:
    # single sequences from the start; the second pass makes each update draw random numbers before its first step
    settings = {"max_tokens_per_micro_batch": 1, "num_iterations": 2, "max_steps": 4, "learning_rate": 1e-3}
    expected = make(tmp_path / "steady", **settings)
    expected.train()
    trainer = make(tmp_path / "run", **settings)
    passes = Failing(*range(1000, 2000))
    handle = fail_backward(trainer, passes)
    trainer.callbacks.callbacks.append(  # the second update has no memory at all
        SimpleNamespace(on_step_begin=lambda args, state, *_, **__: passes.at.update(range(1000))
                        if state.global_step == 2 else None)
    )
    with pytest.raises(MemoryExhaustedError) as caught:
        trainer.train()
    handle.remove()
    assert f"Saved {tmp_path / 'run' / 'checkpoint-2'}" in "\n".join(caught.value.__notes__)
    resumed = make(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(adapter(resumed), adapter(expected))
    assert resumed.state.num_tokens == expected.state.num_tokens
    assert resumed.memory.train.failures == 1


@pytest.mark.slow
def test_a_resumed_run_keeps_its_bounds_and_old_checkpoints_can_be_read(tmp_path: Path) -> None:
    settings = {"max_tokens_per_micro_batch": TOKENS, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make(tmp_path, **settings)
    handle = fail_forward(trainer, Failing(0))  # the sampler comes first
    trainer.memory.train.lower("a test", OutOfMemory("", None, 0), 30)
    trainer.train()
    handle.remove()
    line = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert trainer.memory.state() == {"train": {"lowered": 30, "failures": 1},
                                      "rollout": {"lowered": 8, "failures": 1, "kv_bytes": None}}
    assert (line["memory/oom_train"], line["memory/oom_generate"]) == (1, 1)
    resumed = make(tmp_path, **(settings | {"max_steps": 3}))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.memory.state() == trainer.memory.state()
    assert resumed.engine.bound is resumed.memory.rollout
    old = RunMemory()
    old.restore(None)
    assert old.state() == RunMemory().state()
