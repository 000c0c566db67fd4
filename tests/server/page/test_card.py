"""What the page says of the cards."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lowmem_grpo.server.page import watching as driver
from lowmem_grpo.server.page.watching import KEEP, CardUse


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "WAITS", 60.0)


def smi(folder: Path, prints: str, code: int = 0) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho x >> '{folder}/asked'\nprintf '{prints}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_each_card_is_told_and_the_driver_is_not_asked_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    card = CardUse(smi(tmp_path, "NVIDIA H200, NVL, 73, 1024, 143771\\nTesla T4, [N/A], [N/A], 15360\\n"))
    assert card.words() == ["NVIDIA H200, NVL: 73% busy, 1.00 GiB of 140.40 GiB in use",
                            "Tesla T4: its driver says nothing"]
    for later, asked in ((KEEP, 1), (1, 2)):
        now[0] += later
        assert card.words() and (tmp_path / "asked").read_text().count("x") == asked


def test_without_a_driver_nothing_is_said_and_nothing_asked_again(tmp_path: Path) -> None:
    card = CardUse(smi(tmp_path, "no devices", 9))
    assert card.words() == card.words() == [] and card.command is None
    assert CardUse(str(tmp_path / "none")).words() == []
