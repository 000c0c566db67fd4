"""Saved training state: exact continuation, crash safety, refusals."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, get_scheduler

from lowmem_grpo.runs import checkpoint, checkpoint_state, saved_adapter
from lowmem_grpo.runs.saved_adapter import CheckpointError

Optimizers = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
STATE = {"step": 3, "reward": 0.1, "rows": [1, 2], "best": None}
WHOLE_FILES = [*saved_adapter.FILES, "manifest.json"]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.01)


@dataclass
class Training:
    """A run in small: an adapter with dropout, an optimizer and a cosine schedule."""

    model: peft.PeftModel
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def step(self) -> float:
        """One step whose data and dropout come from all three random states."""
        rows = [[random.randrange(64) for _ in range(6)], np.random.randint(0, 64, 6).tolist()]
        loss = self.model(input_ids=torch.tensor(rows), labels=torch.tensor(rows)).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, run_dir: Path, step: int) -> Path:
        return checkpoint.save_checkpoint(run_dir, step, self.model, self.optimizer, self.scheduler, STATE)

    def load(self, folder: Path) -> dict[str, Any]:
        return checkpoint.load_checkpoint(folder, self.model, self.optimizer, self.scheduler)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of adapter and optimizer."""
        found: dict[str, torch.Tensor] = {}
        checkpoint_state.encode(self.optimizer.state_dict(), "optimizer", found)
        return found | {name: tensor.detach() for name, tensor in self.model.named_parameters()}


def base_model(dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM._from_config(config, dtype=dtype)


def training(seed: int, make: Optimizers = adamw, dtype: torch.dtype = torch.float32, **lora: Any) -> Training:
    """A fresh run; `seed` decides its adapter and its random states."""
    base = base_model(dtype)
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    settings: dict[str, Any] = {"r": 8, "lora_dropout": 0.3, "target_modules": ["q_proj", "down_proj"]} | lora
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    assert isinstance(model, peft.PeftModel)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    return Training(model.train(), optimizer, get_scheduler("cosine", optimizer, 2, 12))


def assert_identical(one: Training, other: Training) -> None:
    """Bit for bit, dtypes included."""
    first, second = one.tensors(), other.tensors()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
    assert one.scheduler.state_dict() == other.scheduler.state_dict()
    assert one.optimizer.state_dict()["param_groups"] == other.optimizer.state_dict()["param_groups"]


def assert_continues(tmp_path: Path, make: Optimizers, dtype: torch.dtype, **lora: Any) -> None:
    """Three steps, save, three more; the same three again from the checkpoint in a fresh run must be identical."""
    first = training(1, make, dtype, **lora)
    for _ in range(3):
        first.step()
    folder = first.save(tmp_path, 3)
    losses = [first.step() for _ in range(3)]
    second = training(2, make, dtype, **lora)
    second.step()
    assert second.load(folder) == STATE
    assert [second.step() for _ in range(3)] == losses
    assert_identical(first, second)


@pytest.mark.parametrize(("dtype", "lora"), [
    (torch.float32, {}), (torch.bfloat16, {}), (torch.float32, {"modules_to_save": ["norm"], "use_dora": True}),
])
def test_resumed_training_is_identical_to_uninterrupted_training(
    tmp_path: Path, dtype: torch.dtype, lora: dict[str, Any]
) -> None:
    assert_continues(tmp_path, adamw, dtype, **lora)


@pytest.mark.parametrize("before", [False, True])
def test_a_run_that_goes_on_makes_its_steps_as_its_settings_say(before: bool, tmp_path: Path) -> None:
    def make(fused: bool) -> Optimizers:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused)

    first, second = training(1, make(before)), training(2, make(not before))
    first.step()
    second.load(first.save(tmp_path, 1))
    assert [group["fused"] for group in second.optimizer.param_groups] == [not before]
    assert second.step() == pytest.approx(first.step(), abs=1)  # it can go on


def test_optimizer_state_wider_than_its_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    first = training(1, dtype=torch.bfloat16)
    first.step()
    for held in first.optimizer.state.values():
        held["exp_avg"] = held["exp_avg"].float() + 1e-6
    second = training(2, dtype=torch.bfloat16)
    second.load(first.save(tmp_path, 1))
    assert_identical(first, second)


@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_resumed_8bit_optimizer_is_identical_to_an_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(parameters, lr=1e-2, min_8bit_size=16)
        return optimizer

    probe = training(0, make)
    try:
        probe.step()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        pytest.skip(f"bitsandbytes has no 8-bit optimizer on this CPU: {error}")
    assert any(tensor.dtype == torch.uint8 for tensor in probe.tensors().values())
    assert_continues(tmp_path, make, torch.float32)


def test_paged_moments_are_loaded_into_paged_memory() -> None:
    parameter, buffers = torch.nn.Parameter(torch.zeros(4)), [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    moments: dict[str, Any] = {"state1": torch.arange(4).byte(), "state2": torch.arange(4).byte() + 9, "step": 2}
    spare = list(buffers)
    optimizer = SimpleNamespace(state={parameter: dict(moments)}, get_state_buffer=lambda p, dtype: spare.pop())
    checkpoint_state.page(optimizer)
    held = optimizer.state[parameter]
    assert {id(held["state1"]), id(held["state2"])} == {id(buffer) for buffer in buffers} and held["step"] == 2
    assert torch.equal(held["state1"], moments["state1"]) and torch.equal(held["state2"], moments["state2"])


def test_a_run_saved_before_its_first_step_is_loaded_into_the_same_parameters(tmp_path: Path) -> None:
    first, second = training(1), training(2)
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in second.model.named_parameters()}
    second.load(first.save(tmp_path, 0))
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in second.model.named_parameters()} == before
    assert_identical(first, second)


def test_plain_peft_loads_the_folder_which_holds_no_pickle_and_names_tensors_by_their_path(tmp_path: Path) -> None:
    first = training(1)
    first.step()
    folder = first.save(tmp_path, 1)
    plain = peft.PeftModel.from_pretrained(base_model(), str(folder))
    rows = torch.arange(12)[None]
    assert torch.equal(plain.eval()(rows).logits, first.model.eval()(rows).logits)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".md"}
    assert {"state.3.exp_avg", "state.3.step"} <= load_file(folder / "optimizer.safetensors").keys()


def test_a_mismatched_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = training(1).save(tmp_path, 1)
    for other, reason in (
        (training(2, r=4), r"down_proj.lora_A.weight is \[8, 64\] torch.float32 in the checkpoint, \[4, 64\]"),
        (training(2, target_modules=["k_proj", "down_proj"]), "k_proj.lora_A.weight is absent in the checkpoint"),
        (training(2, dtype=torch.bfloat16), "lora_A.weight is .* torch.float32 in the checkpoint, .* torch.bfloat16"),
        (training(2, torch.optim.SGD), "holds the state of AdamW .* here it is SGD"),
    ):
        before = {name: tensor.clone() for name, tensor in other.tensors().items()}
        with pytest.raises(CheckpointError, match=reason):
            other.load(folder)
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.tensors().items())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {"missing": Path.unlink, "truncated": truncate, "altered": alter}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_its_file_named(tmp_path: Path, kind: str) -> None:
    run = training(1)
    older, newer = run.save(tmp_path, 9), run.save(tmp_path, 10)
    whole = shutil.copytree(newer, tmp_path / "whole")
    for name in WHOLE_FILES:
        DAMAGE[kind](newer / name)
        with pytest.raises(CheckpointError, match=f"{name} is .*{kind}"):
            run.load(newer)
        good, problems = checkpoint.last_good(tmp_path)
        assert good == older and len(problems) == 1 and name in problems[0]
        shutil.rmtree(newer)
        shutil.copytree(whole, newer)
    assert checkpoint.last_good(tmp_path) == (newer, [])


def test_another_format_and_a_manifest_that_lists_too_little_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_state, "FORMAT", 2)
    folder = training(1).save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2"):
        training(2).load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["rng.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"does not list rng\.safetensors"):
        checkpoint.verify(folder)


@pytest.mark.parametrize(("name", "size"), [
    ("/proc/kmsg", 0), ("../secret", 4), ("../" * 20 + "etc/hostname", 1), ("state.json", float("inf")),
])
def test_a_manifest_leads_out_of_its_folder_or_has_a_size_that_is_none(name: str, size: float, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    folder = training(1).save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": size, "sha256": "x"}
    (folder / "manifest.json").write_text(json.dumps(manifest).replace("Infinity", "1e999"))
    with pytest.raises(CheckpointError, match=r"manifest.json is (altered: it lists .* no file of|truncated or alt)"):
        checkpoint.verify(folder)


class Trap:
    """Unpickling this ends the test run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (99,)


def test_a_planted_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = training(1).save(tmp_path, 1)
    for name in ("adapter_model.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    for module, reader in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, reader, lambda *_, **__: pytest.fail("a pickle was read"))
    assert training(2).load(folder) == STATE
    (folder / checkpoint.ADAPTER_FILE).unlink()
    for read in (checkpoint.check_adapter_folder, checkpoint.verify, training(2).load):
        with pytest.raises(CheckpointError, match=r"only as adapter_model\.bin, a pickle file"):
            read(folder)


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def assert_old_one_survives(run: Training, run_dir: Path, step: int, expected: dict[Path, bytes]) -> str:
    with pytest.raises(CheckpointError) as caught:
        run.save(run_dir, step)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == expected
    assert [path.name for path in run_dir.iterdir()] == ["checkpoint-1"]
    return str(caught.value)


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The disk is full at each flush in turn, at the last one (of the run's folder) after the renames."""
    run = training(1)
    old = run.save(tmp_path, 1)
    run.step()
    expected = {path: path.read_bytes() for path in old.rglob("*")}
    real, calls = os.fsync, 0
    for last in range(len(expected) + 2):
        left = iter([real] * last)
        monkeypatch.setattr(os, "fsync", lambda descriptor, left=left: next(left, no_space)(descriptor))
        message = assert_old_one_survives(run, tmp_path, step, expected)
        assert all(part in message for part in (f"checkpoint-{step} ", "No space left", "bytes", f"{str(old)!r}"))
        calls += 1
    monkeypatch.undo()
    assert calls == 9 and run.save(tmp_path, step) == tmp_path / f"checkpoint-{step}"
    checkpoint.verify(tmp_path / f"checkpoint-{step}")
    assert not list(tmp_path.glob(".checkpoint-*"))


def refuse(*_: Any) -> None:
    """What safetensors does on a full disk: its own error, no OSError."""
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_an_error_of_safetensors_and_state_that_is_not_json_leave_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training(1)
    old = run.save(tmp_path, 1)
    expected = {path: path.read_bytes() for path in old.rglob("*")}
    with pytest.raises(TypeError):
        checkpoint.save_checkpoint(tmp_path, 2, run.model, run.optimizer, run.scheduler, {"bad": object()})
    monkeypatch.setattr(checkpoint, "save_file", refuse)
    assert "No space left" in assert_old_one_survives(run, tmp_path, 2, expected)


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def killed_at(change: int, run: Training, run_dir: Path) -> bool:
    """Save in a process that is killed right before this change of the disk; False if a save makes fewer changes."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
        return status != 0
    left = iter(range(change))

    def watch(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        run.save(run_dir, 1)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses CUDA cannot fork")
def test_a_save_killed_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    run, reader = training(1), training(2)
    folder, interrupted = run.save(tmp_path, 1), 0
    for change in count():
        if not killed_at(change, run, tmp_path):
            break
        interrupted += len(checkpoint.clean_leftovers(tmp_path))
        assert checkpoint.last_good(tmp_path) == (folder, [])
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert reader.load(folder) == STATE
    assert change > 12 and interrupted > 12  # writing five files, two renames, removing the old ones


def test_leftovers_of_a_process_with_the_same_id_do_not_block_saving(tmp_path: Path) -> None:
    run = training(1)
    run.save(tmp_path, 1)
    for kind in ("tmp", "old"):
        (tmp_path / f".checkpoint-1.{kind}-{os.getpid()}").mkdir()
        (tmp_path / f".checkpoint-1.{kind}-{os.getpid()}" / "file").touch()
    checkpoint.verify(run.save(tmp_path, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_pruning_keeps_the_best_the_newest_and_the_last_good(tmp_path: Path) -> None:
    run = training(1)
    folders = [run.save(tmp_path, step) for step in (2, 9, 10, 30, 100)]
    assert checkpoint.list_checkpoints(tmp_path) == folders
    assert checkpoint.prune(tmp_path, None, set()) == []
    assert checkpoint.prune(tmp_path, 4, {folders[0]}) == []
    assert checkpoint.prune(tmp_path, 3, {folders[0]}) == [folders[1]]
    truncate(folders[3] / "state.json")
    truncate(folders[4] / "state.json")
    assert checkpoint.prune(tmp_path, 1, {folders[0]}) == [folders[3]]
    assert checkpoint.list_checkpoints(tmp_path) == [folders[0], folders[2], folders[4]]
    assert sorted(tmp_path.iterdir()) == sorted([folders[0], folders[2], folders[4]])


def altered(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The folder with another state.json, whose manifest lists it as it is now."""
    state, manifest = (json.loads((folder / name).read_text()) for name in ("state.json", "manifest.json"))
    change(state)
    (folder / "state.json").write_text(json.dumps(state).replace('"1e999"', "1e999"))
    manifest["files"]["state.json"] = saved_adapter.fingerprint(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("step", [10**30, 4, -3, "3", 10**400, 3.5, True, [3], "1e999"], ids=lambda n: f"{n!s:.9}")
def test_a_state_of_another_step_than_its_folder_is_refused(step: Any, tmp_path: Path) -> None:
    folder = altered(training(1).save(tmp_path, 3), lambda all: all["state"].update(trainer={"global_step": step}))
    with pytest.raises(CheckpointError, match=r"state\.json.* is altered: .*global_step.*; use an older checkpoint"):
        training(2).load(folder)


@pytest.mark.parametrize("name", ["checkpoint-3", "final", "my checkpoint-4"])
def test_a_state_of_its_folders_step_or_in_a_folder_with_another_name_is_read(name: str, tmp_path: Path) -> None:
    folder = altered(training(1).save(tmp_path, 3), lambda all: all["state"].update(trainer={"global_step": 3}))
    assert training(2).load(folder.rename(tmp_path / name))["trainer"] == {"global_step": 3}


WRONG_STATES = {
    "trainer": [[1], "x", 5], "trainer.policy_version": ["x", -1, 10**30, 0.5, None], "trainer.elapsed": ["x", -1],
    "trainer.epoch": [[1], "1e999"], "trainer.alarms": [[1], {"a": 5}, {"a": {"steps": -1, "kept": []}}],
    "trainer.unlogged": ["x", [5], [{"loss": "x"}]], "trainer.best_metric": ["x", [1]],
    "source": ["x"], "source.position": ["x", -1, 10**30], "source.skipped": [{"a": "b"}, "x"],
    "source.pools.rows": [[[1]], [5], "x"], "memory.train.lowered": ["x", -1], "memory.rollout.kv_bytes": [0.5, [1]],
    "objective.last_k3": ["x", True], "records": [[1], {"metrics.jsonl": "x"}], "threads": ["x"], "config": [[1]],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, each in WRONG_STATES.items() for value in each],
                         ids=lambda held: f"{held!s:.25}")
def test_a_field_of_the_state_that_no_run_saves_is_named(place: str, value: Any, tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        *above, name = place.split(".")
        inner = content["state"]
        for part in above:
            inner = inner.setdefault(part, {})
        inner[name] = value

    folder = altered(training(1).save(tmp_path, 3), change)
    with pytest.raises(CheckpointError, match=r"state\.json, or a file beside it, is altered: .*use an") as refused:
        training(2).load(folder)
    assert place.removeprefix("trainer.") in str(refused.value)


@pytest.mark.parametrize("value", ["x", ["x", "y"], None, {"dict": []}, "1e999", True], ids=str)
@pytest.mark.parametrize("where", ["lr", "betas", "last_epoch", "base_lrs"])
def test_an_optimizer_or_schedule_with_a_value_of_another_kind_is_refused(
    where: str, value: Any, tmp_path: Path
) -> None:
    def change(content: dict[str, Any]) -> None:
        groups = dict(content["optimizer"]["content"]["dict"])["param_groups"]
        for pair in [*groups[0]["dict"], *content["scheduler"]["dict"]]:
            if pair[0] == where:
                pair[1] = value

    with pytest.raises(CheckpointError, match=rf"is altered: it does not hold what a run saves \({where} of the "):
        training(2).load(altered(training(1).save(tmp_path, 3), change))


def test_what_a_schedule_never_saves_replaces_nothing_of_it(tmp_path: Path) -> None:
    folder = altered(training(1).save(tmp_path, 3), lambda all: all["scheduler"]["dict"].append(["step", "x"]))
    run = training(2)
    run.load(folder)
    assert callable(run.scheduler.step)


def test_an_optimizers_state_without_a_setting_takes_that_of_the_run(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        group = dict(content["optimizer"]["content"]["dict"])["param_groups"][0]["dict"]
        group[:] = [pair for pair in group if pair[0] != "lr"]

    run = training(2)
    here = run.optimizer.param_groups[0]["lr"]
    run.load(altered(training(1).save(tmp_path, 3), change))
    assert run.optimizer.param_groups[0]["lr"] == here
