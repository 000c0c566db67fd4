"""Complete groups that are trained while others are sampled: the gradient, what is dropped, and what is refused."""

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import every_row
from trainer_runs import ENDS, adapter, digit_sum, load, make, moved, relative, same
from vllm_models import KV_BYTES, NEEDS_VLLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.engines.cuda_graphs import CudaGraph
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses import loss_types
from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.oom import RECORDING
from lowmem_grpo.memory.plan import MemoryPlan, PlanRow, RunSettings
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer import overlap as module

ROWS = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 17)]
MODES = [True, "parallel"]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 4, "temperature": 1.5,
    "max_completion_length": 16, "score_while_sampling": True, "max_steps": 2, "seed": 3, "shuffle_dataset": False,
} | ENDS


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are trained as soon as anything is complete, so that short runs have some."""
    monkeypatch.setattr(module, "TAIL", 1.0)
    monkeypatch.setattr(module, "STEPS", 1)


def trainer(folder: Path, mode: Any, double: bool = False, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    model = settings.pop("model", None) or moved(load())
    if double:
        model.double()
    return make(folder, model=model, rows=ROWS, train_while_sampling=mode, **(SETTINGS | settings))


@contextmanager
def slow_decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rewards are known and the worker is done with its micro-batches before the next step of decoding."""
    meanwhile = module.OverlappedTraining.meanwhile

    def waits(self: module.OverlappedTraining, running: int) -> None:
        with self.calls.changed:
            self.calls.changed.wait_for(lambda: not self.calls.working, 60)
        meanwhile(self, running)
        wait([job for _, job in self.jobs], 60)

    with monkeypatch.context() as patch:
        patch.setattr(module.OverlappedTraining, "meanwhile", waits)
        yield


def one_step(folder: Path, mode: Any, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of a step's update, and its metrics."""
    run = trainer(folder, mode, **settings)
    found: dict[str, torch.Tensor] = {}

    def step() -> dict[str, float]:
        found.update({name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None})
        return {"grad_norm": 0.0, "nonfinite/rollouts": 0.0, "nonfinite/steps": 0.0}

    run.optim_step = step  # type: ignore[method-assign]
    metrics = run.update(run.rollout())
    return found, metrics


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", loss_types.LOSS_TYPES)
def test_the_gradient_and_the_loss_are_those_of_training_after_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, mode: Any
) -> None:
    with slow_decoding(monkeypatch):
        expected, plain = one_step(tmp_path / "plain", False, loss_type=loss_type)
        found, metrics = one_step(tmp_path / "ahead", mode, loss_type=loss_type)
    assert metrics["train_while_sampling/share"] > 0.2, "hardly anything was trained while others were sampled"
    assert relative(found, expected) < 1e-5
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-7)
    assert metrics["entropy"] == pytest.approx(plain["entropy"], rel=1e-4)
    assert metrics["completions/trained"] == plain["completions/trained"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=NEEDS_VLLM)])
def test_with_vllm_and_recomputed_layers_the_gradient_is_that_of_training_after_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=128, load_in_4bit=False, fast_inference=engine, kv_cache_bytes=KV_BYTES)
    model = moved(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=True))
    try:
        found = []
        with slow_decoding(monkeypatch):
            for mode in (False, True, "parallel"):
                gradient, metrics = one_step(tmp_path / str(mode), mode, model=model)
                model.zero_grad(set_to_none=True)
                assert (metrics.get("train_while_sampling/share", 0) > 0.2) == bool(mode)
                found.append(gradient)
        assert relative(found[1], found[0]) < 1e-5 and relative(found[2], found[0]) < 1e-5
    finally:
        model.close_engine()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_rows_that_are_trained_are_sampled_with_beside_passes_of_the_base_and_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    options = {"kv_cache_bytes": KV_BYTES} if engine == "vllm" else {}
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=128, load_in_4bit=False, fast_inference=engine, **options)
    model = moved(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False,
                                                   trainable_token_indices=[*range(18, 28)]))
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if "tokens_delta" in name).mul_(1.3)
    monkeypatch.setattr(Policy, "keep_reference", lambda policy, moves=False: None)  # the base is the reference
    try:
        with slow_decoding(monkeypatch):
            for mode, beta in ((True, 0.1), ("parallel", 0.0)):
                expected, _ = one_step(tmp_path / f"plain {mode}", False, model=model, beta=beta)
                model.zero_grad(set_to_none=True)
                found, metrics = one_step(tmp_path / str(mode), mode, model=model, beta=beta)
                model.zero_grad(set_to_none=True)
                assert metrics["train_while_sampling/share"] > 0.2
                assert any("tokens_delta" in name for name in found) and relative(found, expected) < 1e-5
    finally:
        model.close_engine()


@pytest.mark.parametrize("mode", MODES)
def test_in_float64_and_in_the_same_order_the_gradient_is_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    run = trainer(tmp_path, mode, double=True, loss_type="dr_grpo", parity_bound=1.0)
    groups = run.rollout()
    run.overlap.drop()
    run.learner.prepare(groups, 1)
    run.forward_backward(groups)
    expected = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    run.learner.optimizer.zero_grad(set_to_none=True)
    prompts = [Prompt(group.row, group.prompt_ids, "") for group in groups]
    with run.scoring.start_batch(groups) as calls:
        run.overlap.start_step(prompts, calls)
        for index, group in enumerate(groups):
            run.overlap.on_group(index, group.rollouts)
        calls.wait(groups)
        while not run.overlap.dropped and (run.overlap.partial is None or run.overlap.batches):
            run.overlap.meanwhile(1)
        run.overlap.join_worker()
    with run.overlap.gradient(groups) as begun:
        assert begun is not None and len(begun.facts) == 32
        run.learner.forward_backward(groups, begun=begun)
        assert same({name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}, expected)
    assert_no_gradient(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [ValueError("broken"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_failure_while_sampling_leaves_a_step_made_of_the_completions_that_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: Any, error: Exception
) -> None:
    add, left = module.OverlappedTraining.add, [1]

    def fails(self: module.OverlappedTraining, batch: Any) -> None:
        add(self, batch)
        if left and self.partial is not None and self.partial.count > 1:
            left.pop()
            raise error

    with slow_decoding(monkeypatch), caplog.at_level("WARNING"):
        expected, _ = one_step(tmp_path / "plain", False)
        monkeypatch.setattr(module.OverlappedTraining, "add", fails)
        found, metrics = one_step(tmp_path / "ahead", mode)
    assert not left, "nothing failed"
    assert metrics["train_while_sampling/dropped"] == 1 and metrics["train_while_sampling/share"] == 0
    assert same(found, expected)
    assert "the step is made of the completions that are held" in caplog.text


def assert_no_gradient(run: GRPOTrainer) -> None:
    assert all(p.grad is None for p in run.model.parameters())


def test_an_error_of_the_engine_waits_for_the_worker_and_leaves_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile, add = module.OverlappedTraining.meanwhile, module.OverlappedTraining.add
    run, reached, may_add = trainer(tmp_path, "parallel"), Event(), Event()

    def held(self: module.OverlappedTraining, batch: Any) -> None:
        reached.set()
        assert may_add.wait(60)
        add(self, batch)

    def fails(self: module.OverlappedTraining, running: int) -> None:
        with self.calls.changed:
            self.calls.changed.wait_for(lambda: not self.calls.working, 60)
        meanwhile(self, running)
        if self.jobs:
            assert reached.wait(60)
            Thread(target=may_add.set).start()
            raise OSError

    monkeypatch.setattr(module.OverlappedTraining, "add", held)
    monkeypatch.setattr(module.OverlappedTraining, "meanwhile", fails)
    with pytest.raises(OSError):
        run.rollout()
    assert not run.overlap.jobs
    assert_no_gradient(run)


def test_the_worker_has_ended_before_the_engine_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = trainer(tmp_path, "parallel"), []
    sleep = run.engine.sleep
    monkeypatch.setattr(run.engine, "sleep", lambda: left.append(len(run.overlap.jobs)) or sleep())
    with slow_decoding(monkeypatch):
        run.rollout()
    assert left == [0] and run.overlap.partial is not None


def test_a_cuda_graph_is_never_recorded_beside_a_micro_batch_whose_shortage_would_be_an_error_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, add, others = trainer(tmp_path, "parallel"), module.OverlappedTraining.add, []

    def other_thread() -> None:
        others.append(RECORDING.acquire(blocking=False))

    def watched(*arguments: Any, **options: Any) -> Any:
        thread = Thread(target=other_thread)
        thread.start()
        thread.join(60)
        return add(*arguments) if arguments else torch.zeros(1)

    monkeypatch.setattr(module.OverlappedTraining, "add", watched)
    with slow_decoding(monkeypatch):
        run.rollout()
    assert others and not any(others), "a recording may begin beside a micro-batch"
    others.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *arguments, **options: nullcontext())
    CudaGraph(watched)
    assert others == [False], "a micro-batch may begin, or torch's cache be emptied, beside a recording"


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_update_leaves_no_gradient_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    run = trainer(tmp_path, mode)
    with slow_decoding(monkeypatch):
        groups = run.rollout()
    assert run.overlap.partial is not None and any(p.grad is not None for p in run.model.parameters())

    def stops(*args: Any) -> Any:
        raise OSError

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(run.learner, "forward_backward", stops)
        run.update(groups)
    assert run.overlap.partial is None
    assert_no_gradient(run)


def test_a_correction_that_begins_in_the_step_drops_what_was_trained_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrected(self: Any, stale: bool) -> bool:
        return corrects[0]

    run = trainer(tmp_path, True)
    corrects = [False]
    monkeypatch.setattr(type(run.parts.objective.mismatch), "due", corrected)
    with slow_decoding(monkeypatch):
        groups = run.rollout()
    assert run.overlap.partial is not None
    corrects[0] = True
    metrics = run.update(groups)
    assert metrics["train_while_sampling/dropped"] == 1 and metrics["mismatch/corrected"] == 1


def test_other_groups_than_those_that_were_sampled_are_trained_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, True)
    with slow_decoding(monkeypatch):
        groups = run.rollout()
        run.rollout()
    assert run.update(groups)["train_while_sampling/share"] == 0


def test_a_reward_that_is_no_number_skips_the_step_as_it_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float("nan"), *digit_sum(completions)[1:]]

    run = trainer(tmp_path, True, reward=broken)
    before = adapter(run)
    with slow_decoding(monkeypatch):
        metrics = run.update(run.rollout())
    assert metrics["optimizer/skipped"] == 1 and same(adapter(run), before)


@pytest.mark.slow
def test_a_run_with_it_ends_where_a_run_without_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_decoding(monkeypatch):
        plain, ahead = trainer(tmp_path / "plain", False), trainer(tmp_path / "ahead", True)
        plain.train()
        ahead.train()
    assert relative(adapter(ahead), adapter(plain)) < 1e-3
    shares = [line["train_while_sampling/share"] for line in ahead.state.log_history if "loss" in line]
    assert len(shares) == 2 and shares[0] > 0


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=NEEDS_VLLM)])
def in_8_bits(request: pytest.FixtureRequest) -> Iterator[FastPeftModel]:
    """A model whose cache is in 8 bits, with vLLM's engine: where the processor can."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" and not torch.cuda.is_available():
        pytest.skip("vLLM's build for CPUs has a cache in 8 bits with AVX-512 only")
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False, kv_cache_dtype="fp8",
                                                fast_inference=request.param, kv_cache_bytes=KV_BYTES)
    model = moved(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False))
    yield model
    bare.loaded.keeper.close()


@pytest.mark.slow
def test_a_cache_in_8_bits_goes_with_training_while_sampling(tmp_path: Path, in_8_bits: FastPeftModel) -> None:
    """They are taken, they move the adapter, the switch is seen in the log, and numbers stay numbers."""
    run = trainer(tmp_path, "parallel", model=in_8_bits, max_completion_length=40, gradient_accumulation_steps=2)
    before = adapter(run)
    run.train()
    after = adapter(run)
    assert not same(after, before) and all(bool(held.isfinite().all()) for held in after.values())
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 2
    assert any("train_while_sampling/share" in line for line in lines)
    assert all(len(group.rollouts) == 4 for group in run.sampled)


@every_row(("settings", "words"), [
    ({"num_iterations": 2}, "num_iterations=2 needs all of them; set num_iterations=1"),
    ({"scale_rewards": "batch"}, "set scale_rewards='group'"),
    ({"advantage_estimator": "remax"}, "set advantage_estimator='grpo'"),
    ({"dynamic_sampling_rounds": 1}, "set dynamic_sampling_rounds=0"),
    ({"entropy_coef": 0.1}, "set entropy_coef=0.0"),
    ({"score_while_sampling": False}, "set score_while_sampling=None"),
    ({"train_while_sampling": "parallel", "beta": 0.1}, "set beta=0.0"),
    ({"train_while_sampling": "stream"}, "one of False, True, parallel"),
])
def test_settings_that_need_all_groups_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GRPOConfig(**({"train_while_sampling": True} | settings))


def test_what_cannot_be_trained_early_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rewards digit_sum are computed after sampling"):
        make(tmp_path, train_while_sampling=True)
    model = load()
    model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing is on"):
        make(tmp_path, model=model, train_while_sampling="parallel", score_while_sampling=True)
    with pytest.raises(ValueError, match="lora_dropout is above 0"):
        make(tmp_path, model=load(lora_dropout=0.1), train_while_sampling="parallel", score_while_sampling=True)


@pytest.mark.parametrize(("used", "fits"), [(60, True), (70, True), (71, False)])
def test_on_a_card_a_micro_batch_waits_until_the_cache_leaves_the_room_that_is_planned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, used: int, fits: bool
) -> None:
    rows = (PlanRow("weights", rollout=40, train=40), PlanRow("cache", rollout=60), PlanRow("activations", train=30))
    plan = MemoryPlan("a model", Device("a card", 200, 200), RunSettings(8), rows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 - used - 5, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 45)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    learner: Any = SimpleNamespace(policy=SimpleNamespace(device=torch.device("cuda")))
    scoring: Any = SimpleNamespace(state=None, clock=None)
    overlap = module.OverlappedTraining(learner, scoring, 8, plan)
    with caplog.at_level("INFO"):
        assert [overlap.has_room(), overlap.has_room()] == [fits, fits]
    assert caplog.text.count("leaves no room") == int(not fits), "it is said once"
