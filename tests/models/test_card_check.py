"""A card that cannot be used is refused before anything is downloaded; a usable one becomes the current one."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.models import card_check
from lowmem_grpo.models.card_check import has_managed_memory, larger_card, missing_compiler, no_card, use_card
from lowmem_grpo.models.stored_model import resolve

CARD = torch.cuda.is_available()


def cards_of(*capabilities: tuple[int, int], sizes: tuple[int, ...] = ()) -> Any:
    """Cards as torch.cuda tells of them; `current` is what was set."""
    cards = SimpleNamespace(
        current=0, is_available=lambda: bool(capabilities), device_count=lambda: len(capabilities),
        get_device_capability=capabilities.__getitem__, get_device_name=lambda index: f"card {index}",
        get_device_properties=lambda index: SimpleNamespace(total_memory=sizes[index]))
    cards.set_device = lambda index: setattr(cards, "current", index)
    return cards


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of Python's headers, which has them, on a machine with a compiler."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(card_check.sysconfig, "get_path", lambda *_: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("device", "current"), [("cuda:1", 1), ("cuda:0", 0), ("cuda", 0), ("cpu", 0)])
@pytest.mark.usefixtures("headers")
def test_the_models_card_is_the_current_one_or_kernels_on_a_second_card_die(device: str, current: int) -> None:
    use_card(device, cards := cards_of((7, 5), (9, 0)))
    assert cards.current == current


@pytest.mark.parametrize(("device", "cards", "error", "words"), [
    ("cuda:2", cards_of((7, 5), (7, 5)), ValueError, r"sees 2 cards: allowed are 'cuda:0', 'cuda:1'"),
    ("cuda:0", cards_of((7, 0)), RuntimeError, r"card 0 has compute capability 7\.0, .* need 7\.5"),
    ("cuda:1", cards_of((8, 0), (6, 1)), RuntimeError, r"card 1 has compute capability 6\.1"),
    ("cuda:0", cards_of(), RuntimeError, "the model is to be on 'cuda:0', and"),
])
def test_a_card_that_is_absent_or_too_old_is_refused(device: str, cards: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        use_card(device, cards)


@pytest.mark.parametrize(("driver", "cuda", "words"), [
    ("535.183.01", "13.0", r"driver 535\.183\.01 is too old .* CUDA 13\.0 and needs 580 or newer.*whl/cu126"),
    ("575.57.08", "13.2", "needs 580 or newer"),
    ("470.82", "12.6", "needs 525 or newer"),
    ("580.65.06", "13.2", "new enough for CUDA 13.2, .*it sees none.* CUDA_VISIBLE_DEVICES"),
    ("575.57.08", "12.6", "new enough"),
    ("575.57.08", None, r"there is a card \(driver 575.57.08\), but torch is built for CPUs"),
    (None, "13.0", "there is no NVIDIA driver, so no card is found: .*install driver 580 or newer .*device='cpu'"),
    (None, "12.6", "install driver 525 or newer"), (None, None, "install driver 580 or newer"),
])
def test_why_torch_sees_no_card_is_said_with_what_to_do(driver: str | None, cuda: str | None, words: str) -> None:
    assert re.search(words, ": ".join(no_card(driver, cuda, "2.13.0")))


@pytest.mark.parametrize("line", [
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (builder@host)",
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  550.54.14  Release Build",
])
def test_both_kinds_of_driver_are_recognised(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(card_check, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(card_check.shutil, "which", lambda name: None)
    assert card_check.driver_version() == "550.54.14"


@pytest.mark.parametrize(("device", "gib", "said"), [
    ("cuda:0", (8, 24), "on 'cuda:0', which has 8.00 GiB, and 'cuda:1' has 24.00 GiB: CUDA_VISIBLE_DEVICES=1"),
    ("cuda:0", (23.5, 24), None), ("cuda:1", (8, 24), None), ("cuda:0", (24,), None), ("cpu", (24,), None),
])
def test_a_smaller_card_than_another_one_is_said_with_how_to_take_that_one(
    device: str, gib: tuple[float, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cards = cards_of(*[(8, 0)] * len(gib), sizes=tuple(int(size * 2**30) for size in gib))
    assert larger_card(device, cards) == said if said is None else said in str(larger_card(device, cards))
    monkeypatch.setenv("WORLD_SIZE", "2")  # each rank has its own
    assert larger_card(device, cards) is None


@pytest.mark.parametrize(("managed", "works", "has"), [(1, 0, True), (0, 0, False), (0, 100, True)])
def test_the_driver_says_whether_host_and_card_share_memory(
    managed: int, works: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(
        cuInit=lambda flags: works, cuDeviceGet=lambda card, index: 0,
        cuDeviceGetAttribute=lambda found, which, card: setattr(found._obj, "value", managed if which == 83 else 9))
    monkeypatch.setattr(card_check.ctypes, "CDLL", lambda name: driver)
    assert has_managed_memory(0) == has


def test_a_missing_compiler_or_header_is_named(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_compiler() is None
    (headers / "Python.h").unlink()
    assert "Python.h does not exist: sudo apt install python3" in str(missing_compiler())
    monkeypatch.delenv("CC")
    monkeypatch.setattr(card_check.shutil, "which", lambda _: None)
    assert "sudo apt install gcc" in str(missing_compiler())
    with pytest.raises(RuntimeError, match="sudo apt install gcc"):
        use_card("cuda:0", cards_of((9, 0)))


@pytest.mark.skipif(CARD, reason="this machine has a card")
def test_the_loader_refuses_a_card_before_it_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.models.pretrained.Pretrained.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(RuntimeError, match=r"to be on 'cuda:1', and there is no NVIDIA driver.*: if this machine has"):
        FastLanguageModel.from_pretrained("tiny", device="cuda:1")


def test_a_brought_models_card_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("lowmem_grpo.trainer.model_setup.use_card", seen.append)
    model = AutoModelForCausalLM.from_pretrained(resolve("tiny"))
    GRPOTrainer(model=model, reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
                args=GRPOConfig(output_dir=str(tmp_path), max_steps=1, report_to=[]), peft_config=LoraConfig(r=4),
                train_dataset=[{"prompt": "1 + 1"}])
    assert seen == [str(model.device)]


@pytest.mark.parametrize(("device", "cards", "used"), [
    ("cuda", 2, "cuda:1"), (None, 2, "cuda:1"), ("cuda", 1, "cuda:0"), ("cuda:0", 2, "cuda:0"), ("cuda", 0, "cuda"),
])
def test_any_card_is_the_one_of_this_rank_and_never_the_processor(
    device: str | None, cards: int, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)

    def stop(device: str) -> None:
        raise InterruptedError(device)

    monkeypatch.setattr(card_check, "use_card", stop)
    with pytest.raises(InterruptedError, match=f"^{used}$"):
        FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, device=device)
