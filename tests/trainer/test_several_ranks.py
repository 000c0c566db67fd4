"""A run in several processes is the run of one: the same samples, the same adapter, one set of records; and it ends
cleanly, with its last checkpoint good, whichever process fails."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.saved_adapter import list_checkpoints, verify
from tests.attacks.ranked_run import Ranked, train, train_in_order
from tests.attacks.small_run import TIMES

ROUNDING = 5e-4  # float32, divided by Adam; another size of micro-batches in one process makes up to 2.3e-4
SAME = ("reward", "completions/mean_length", "num_tokens", "epoch", "groups/with_signal", "learning_rate")


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest weight of the same matrix."""
    return max(float((found[name] - held).abs().max() / held.abs().max()) for name, held in expected.items())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Eight steps in one process: its folder, its adapter, its metrics."""
    folder = tmp_path_factory.mktemp("one")
    ((adapter, lines),) = Ranked(folder, 1, train, max_steps=8, save_steps=4).wait()
    return folder, (adapter, lines)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_after_eight_steps_the_adapter_is_that_of_one_process(tmp_path: Path, one: Any, count: int) -> None:
    folder, (expected, lines) = one
    ranks = Ranked(tmp_path, count, train, max_steps=8, save_steps=4).wait()
    assert all(close(adapter, expected) < ROUNDING for adapter, _ in ranks)
    assert all(torch.equal(adapter[name], ranks[0][0][name]) for adapter, _ in ranks for name in adapter)
    for name in ("completions.jsonl", "metrics.jsonl"):
        assert len(read_lines(tmp_path / name)) == len(read_lines(folder / name)), "each line once"
    texts = [[line["completion"] for line in read_lines(path / "completions.jsonl")] for path in (tmp_path, folder)]
    assert texts[0] == texts[1], "the same samples in the same order"
    for found, line in zip(ranks[0][1], lines, strict=True):
        assert {name: found[name] for name in SAME if name in line} == {
            name: line[name] for name in SAME if name in line}
        assert found["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
        assert found["entropy"] == pytest.approx(line["entropy"], rel=1e-4)
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(held) == len(expected) and (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_in_float64_and_in_a_fixed_order_the_adapter_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    found = {count: Ranked(tmp_path / str(count), count, train_in_order, max_steps=5).wait() for count in (1, 2, 4)}
    expected = found[1][0][0]
    assert any(tensor.dtype == torch.float64 and tensor.any() for tensor in expected.values())
    for count in (2, 4):
        for adapter, _ in found[count]:
            assert all(torch.equal(adapter[name], held) for name, held in expected.items()), count


def sometimes_unjudged(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float | None]:
    """Gives no verdict on a row that is evaluated in the second rank's share."""
    return [None if "with 1." in prompt else float(len(text) % 5)
            for text, prompt in zip(completions, prompts, strict=True)]


setattr(sometimes_unjudged, "required", True)  # noqa: B010 - a function's attribute


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"scale_rewards": "batch", "dynamic_sampling_rounds": 2, "replay_buffer_size": 4},
    {"num_iterations": 2, "top_entropy_quantile": 0.5},
    {"advantage_estimator": "remax", "difficulty_pools": True},
    {"method": "sft", "eval_strategy": "steps", "eval_steps": 2},
    {"method": "dpo", "loss_type": ["sigmoid", "aot"], "ld_alpha": 0.5, "eval_strategy": "steps", "eval_steps": 2},
    {"method": "dpo", "precompute_ref_log_probs": True, "per_device_train_batch_size": 3},
    {"method": "kto", "shuffle_dataset": True, "per_device_train_batch_size": 3},
    {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1},
    {"teacher": "ema", "distillation_mode": "full_logits", "num_iterations": 2},
    {"teacher": "base", "distillation_mode": "full_logits", "steps_per_generation": 2, "max_steps": 2},
    {"teacher": "base", "distillation_mode": "full_logits", "eval_strategy": "steps", "eval_steps": 2,
     "reward": sometimes_unjudged},
    {"advantage_estimator": "gae", "num_iterations": 2, "gamma": 0.9, "critic_warmup_steps": 1},
    {"beside": {"modules_to_save": ["lm_head"]}}, {"beside": {"trainable_token_indices": [5, 23, 40, 41, 300]}},
], ids=["batch std, dynamic sampling, replay", "several updates on chosen tokens", "ReMax, pools", "SFT", "DPO",
        "DPO with its reference from before", "KTO", "evaluation",
        "a teacher that follows", "a teacher of several steps", "a teacher in evaluations without judgements",
        "a critic", "head and embedding", "some rows"])
def test_two_ranks_decide_what_one_process_decides_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"double": True, "parity_bound": 0.001, "max_steps": 3} | settings
    if "method" in settings:
        del settings["parity_bound"]
    ((expected, lines),) = Ranked(tmp_path / "1", 1, train, **settings).wait()
    ranks = Ranked(tmp_path / "2", 2, train, **settings).wait()
    within = 1e-5 if settings.get("advantage_estimator") == "gae" else 1e-9  # a critic's head is in float32
    assert all(close(adapter, expected) < within for adapter, _ in ranks)
    counted = ("sampling/rounds", "sampling/replayed_groups", "num_tokens", "data/skipped_rows", "pools/resting")
    for found, line in zip(ranks[0][1], lines, strict=True):
        assert {k: v for k, v in found.items() if k in counted} == {k: v for k, v in line.items() if k in counted}
        for name in line:
            if name.startswith("eval_") and not name.startswith(tuple(f"eval_{time}" for time in TIMES)):
                assert found[name] == pytest.approx(line[name], rel=1e-5), name
            if name.startswith("critic/"):
                assert found[name] == pytest.approx(line[name], rel=1e-4), name


@pytest.mark.slow
def test_ranks_round_16_bits_at_random_alike(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"beside": {"modules_to_save": ["lm_head"]}, "dtype": torch.bfloat16,
                                "embedding_learning_rate": 1e-5, "method": "sft", "max_steps": 4}
    ((alone, _),) = Ranked(tmp_path / "1", 1, train, **settings).wait()
    first, second = (adapter for adapter, _ in Ranked(tmp_path / "2", 2, train, **settings).wait())
    assert all(torch.equal(first[name], second[name]) for name in first)
    (name,) = (name for name in first if "modules_to_save" in name)
    assert first[name].dtype == torch.bfloat16
    assert (first[name] == alone[name]).double().mean() > 0.99, "another sum of gradients changes few roundings"


# Going on


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (1, 4)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, one: Any, first: int, then: int) -> None:
    Ranked(tmp_path, first, stopped, max_steps=8, stop=4).wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-4"]
    found = Ranked(tmp_path, then, train, max_steps=8, save_steps=4, resume=True).wait()
    assert all(close(adapter, one[1][0]) < ROUNDING for adapter, _ in found)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def stopped(folder: Path, rank: int, stop: int, **settings: Any) -> None:
    """A run whose last rank asks for a stop."""
    train(folder, rank, callbacks=[StopOne(stop)], **settings)


class StopOne:
    """Asks for a stop in the last rank only."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from lowmem_grpo.config.launcher import this_process

        process = this_process()
        if process.rank == process.count - 1:
            control.should_training_stop = state.global_step >= self.stop


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    run = Ranked(tmp_path, 2, train, max_steps=1000, save_steps=1000)
    wait_for_step(run, 3)
    run.kill(1, signal.SIGINT)
    run.wait()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    (folder,) = list_checkpoints(tmp_path)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == int(folder.name.rpartition("-")[2])


def wait_for_step(run: Ranked, step: int) -> None:
    """Until the run has made so many steps."""
    until, path = time.monotonic() + 400, run.folder / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert time.monotonic() < until and all(process.is_alive() for process in run.processes), f"no step {step}"
        time.sleep(0.05)


# What goes wrong


@pytest.mark.slow
def test_a_killed_or_stopped_rank_ends_the_run_and_the_last_checkpoint_is_good(tmp_path: Path) -> None:
    """Also the first one, in which torch's store lives. Both wait together until they count as lost."""
    begun = [(1, broken(tmp_path / "killed", 1, signal.SIGKILL)), (0, broken(tmp_path / "stopped", 0, signal.SIGSTOP))]
    found = [ended(run, victim) for victim, run in begun]
    for (victim, run), told in zip(begun, found, strict=True):
        assert told[victim] is None and f"RankError: rank {victim} is lost" in told[1 - victim]
        newest = list_checkpoints(run.folder)[-1]
        verify(newest)
        done = int(newest.name.rpartition("-")[2])
        Ranked(run.folder, 2, train, max_steps=done + 2, save_steps=2, resume=True).wait()
        assert [line["step"] for line in read_lines(run.folder / "metrics.jsonl")] == list(range(1, done + 3))


def broken(folder: Path, victim: int, number: int) -> Ranked:
    """A run in two processes, of which one has got a signal after some steps."""
    run = Ranked(folder, 2, train, max_steps=1000, save_steps=2)
    wait_for_step(run, 5)
    run.kill(victim, number)
    return run


def ended(run: Ranked, victim: int) -> list[Any]:
    """What the ranks of a broken run told, after the other rank has ended by itself."""
    run.processes[1 - victim].join(200)
    run.processes[victim].kill()
    return run.wait()


def bad_reward(completions: list[str], prompts: list[str], **kwargs: Any) -> list[float]:
    """Fails on rows that only the last rank gets in the first step."""
    from lowmem_grpo.config.launcher import this_process

    if this_process().rank == 1 and kwargs["trainer_state"].global_step == 2:
        raise ZeroDivisionError("no digits")
    return [float(len(text)) for text in completions]


@pytest.mark.slow
def test_an_error_of_a_reward_in_one_rank_is_told_by_all_and_what_was_trained_is_saved(tmp_path: Path) -> None:
    first, second = Ranked(tmp_path, 2, train, reward=bad_reward, max_steps=5, max_completion_length=4).wait()
    assert "no digits" in second and "RankError" not in second
    assert first.startswith("RankError: rank 1 has failed") and "no digits" in first
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def nan_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """NaN in one rank, at the second step."""
    from lowmem_grpo.config.launcher import this_process

    bad = this_process().rank == 1 and kwargs["trainer_state"].global_step == 1
    return [float("nan") if bad and not place else float(len(text) % 5) for place, text in enumerate(completions)]


@pytest.mark.slow
def test_a_step_with_a_reward_of_nan_in_one_rank_is_skipped_in_all(tmp_path: Path) -> None:
    ranks = Ranked(tmp_path, 2, train, reward=nan_reward, max_steps=3, max_completion_length=4).wait()
    assert [line["optimizer/skipped"] for line in ranks[0][1]] == [0.0, 1.0, 0.0]
    assert all(torch.equal(ranks[0][0][name], ranks[1][0][name]) for name in ranks[0][0])
    assert len(read_lines(tmp_path / "nonfinite.jsonl")) == 1


def unlike(folder: Path, rank: int, **changes: Any) -> None:
    """A run whose second rank has other settings."""
    train(folder, rank, **(changes if rank else {}))


@pytest.mark.parametrize(("changes", "named"), [
    ({"learning_rate": 2e-4}, "the setting learning_rate is 0.0001 (rank 0) and 0.0002 (rank 1)"),
    *(pytest.param(*others, marks=pytest.mark.slow) for others in (
        ({"rows": [{"prompt": "2+2="}] * 9}, "the rows is 7 ("), ({"lora_seed": 4}, "the adapter's weights is "))),
])
def test_ranks_that_differ_are_refused_by_name_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    told = Ranked(tmp_path, 2, unlike, **changes).wait()
    assert all("the ranks are not alike" in one for one in told)
    assert all(named in one for one in told)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(("settings", "named"), [
    ({"train_while_sampling": True}, "train_while_sampling is True, and the run has 2 processes"),
    ({"per_device_train_batch_size": 4}, "a step has 1 prompts, and the run has 2 processes"),
])
def test_settings_that_need_one_process_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    assert all(named in one for one in Ranked(tmp_path, 2, train, **settings).wait())
