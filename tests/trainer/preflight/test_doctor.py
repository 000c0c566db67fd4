"""`lowmem-grpo doctor` on machines with everything, with something missing, and with something broken."""

import importlib.metadata
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tables import every_row

from lowmem_grpo import __version__
from lowmem_grpo.__main__ import main
from lowmem_grpo.cli.plan import report
from lowmem_grpo.rewards.sandbox import trial, worker
from lowmem_grpo.trainer.preflight import doctor
from lowmem_grpo.trainer.preflight.doctor import NEEDED, TRIED, Checkup, examine

VERSION = importlib.metadata.version
BLOCK = """
    import importlib.abc, importlib.metadata, sys

    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] == {name!r}:
                raise {error}
            return None

    sys.meta_path.insert(0, Broken())
    if {missing}:
        version = importlib.metadata.version
        def fake(name):
            if name == {name!r}:
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)
        importlib.metadata.version = fake
    from lowmem_grpo.__main__ import main
    main(["doctor", "--json"])
"""


def fake_cuda(major: int = 9, fails: bool = False) -> Any:
    """Return a card as torch shows it."""
    def memory(device: int) -> tuple[int, int]:
        if fails:
            raise RuntimeError("CUDA error: device unavailable\nmore")
        return 20 * 2**30, 24 * 2**30

    return SimpleNamespace(
        is_available=lambda: True, mem_get_info=memory, get_device_capability=lambda device: (major, 0),
        get_device_name=lambda device: "NVIDIA Test 24GB", device_count=lambda: 1,
    )


def fake_torch(cuda: Any) -> Any:
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))


def fake_load(**libraries: Any) -> Callable[[str], Any]:
    """Loads what this machine has, but for the libraries that are given: a value, or the error of loading them."""
    def load(name: str) -> Any:
        found = libraries.get(name.replace(".", "_"))
        if isinstance(found, BaseException):
            raise found
        return import_module(name) if found is None else found

    return load


def examined(load: Callable[[str], Any], version: Callable[[str], str] = VERSION) -> Checkup:
    """The checkup of a machine that loads libraries, and reads their versions, in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "import_module", load)
        patch.setattr(importlib.metadata, "version", version)
        return examine()


def without(*names: str) -> Callable[[str], str]:
    """Versions of a machine where these are not installed."""
    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return VERSION(name)

    return version


def light(name: str) -> Any:
    """Loads nothing."""
    raise ImportError(f"no {name}")


def test_without_an_installed_package_it_says_which_version_is_used_all_the_same() -> None:
    found = examined(light, without("lowmem-grpo"))
    assert found.versions["lowmem-grpo"] == f"{__version__} (not installed: used from its folder)"
    assert found.used["code sandbox"] == "unknown (ImportError: no lowmem_grpo.rewards.sandbox.trial)"


def test_this_machine_can_train() -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    for name in ("python", *NEEDED, "triton", "vllm"):
        assert f"\n  {name} " in done.output
    for title in ("Card", "Host", "A run will use", "Missing, or worth a change"):
        assert f"\n{title}\n" in done.output
    assert f"torch {importlib.metadata.version('torch')}" in " ".join(done.output.split())
    assert done.output.strip().endswith("Training is possible here.")
    assert max(map(len, done.output.splitlines())) <= 100


def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BWRAP", "no-such-bwrap")
    monkeypatch.setattr(trial, "why_not", cache(trial.why_not.__wrapped__))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0 and "apt install bubblewrap" in " ".join(done.output.split()), done.output


def test_json_holds_the_same_and_nothing_else() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert set(found) == {"versions", "card", "host", "used", "advice", "can_train"}
    assert set(found["used"]) == {"engine", "kernels", "attention", "4-bit weights", "code sandbox", "model families",
                                  "sampled by vLLM"}
    assert found["used"]["4-bit weights"] == "NF4 by bitsandbytes"
    assert found["host"]["disk_free_bytes"] > 0


@every_row("name", NEEDED)
def test_each_needed_library_may_be_missing(name: str) -> None:
    found = examined(light, without(name))
    assert not found.can_train
    assert found.versions[name] == "missing"
    said = f"{name} is missing, and training needs it. What to do: pip install '{name}"
    assert any(line.startswith(said) for line in found.advice)
    assert report(found)[-1] == "Training is NOT possible here."


@every_row(("name", "error"), [
    ("torch", OSError("libcudart.so.13: cannot open shared object file\nsecond line")), ("peft", RuntimeError("")),
    ("bitsandbytes", SyntaxError("bad")), ("triton", AttributeError("module has no attribute")),
    ("torch", KeyError("x")), ("peft", RecursionError("too deep")), ("bitsandbytes", AssertionError()),
])
def test_a_library_may_break_in_any_way(name: str, error: Exception) -> None:
    others = {other: object() for other in TRIED if other != name}  # nothing else is loaded
    found = examined(fake_load(**(others | {
        name: error, "torch": error if name == "torch" else fake_torch(fake_cuda()),
        "lowmem_grpo_loader": ImportError("no"), "lowmem_grpo_engines_choice": ImportError("no"),
    })))
    assert "(broken)" in found.versions[name]
    assert any(f"{name} is installed but cannot be imported ({type(error).__name__}" in line for line in found.advice)
    assert all("\n" not in line for line in found.advice)
    assert not found.can_train
    json.dumps(found.to_dict())


@pytest.mark.parametrize(("name", "missing"), [("torch", True), ("torch", False)])
@pytest.mark.every(2)
def test_the_command_itself_survives_without_a_library(name: str, missing: bool, tmp_path: Path) -> None:
    error = f"ModuleNotFoundError('No module named {name}')" if missing else "OSError('undefined symbol')"
    script = textwrap.dedent(BLOCK.format(name=name, error=error, missing=missing))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"][name] == "missing" if missing else "(broken)" in found["versions"][name]
    assert found["advice"][0].startswith("training is not possible here")
    assert "Traceback" not in done.stderr


def with_card(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Checkup:
    """What is found on a machine with that card, where kernels run and nothing heavy is loaded."""
    choice = SimpleNamespace(name="vllm", why="vllm 0.30 is installed")
    engines = SimpleNamespace(choose_engine=lambda wanted, device: choice)
    monkeypatch.setattr(doctor, "run_kernel", lambda torch: None)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    libraries = {name: object() for name in TRIED} | {"torch": fake_torch(cuda)}
    return examined(fake_load(**libraries, lowmem_grpo_engines_choice=engines, lowmem_grpo_loader=object(),
                              lowmem_grpo_trainer_grpo=object(), lowmem_grpo_memory_offload_pages=object()))


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_card(fake_cuda(), monkeypatch)
    assert found.card == {"name": "NVIDIA Test 24GB", "driver": "580.1", "count": 1, "total_bytes": 24 * 2**30,
                          "free_bytes": 20 * 2**30, "capability": "9.0", "bf16": True}
    assert found.used["engine"] == "vllm: vllm 0.30 is installed"
    assert found.used["kernels"] == "Triton"
    assert found.used["attention"].startswith("torch's flash attention")
    lines = "\n".join(report(found))
    assert "24.00 GiB" in lines
    assert "bfloat16              yes" in lines


def test_an_old_card_takes_float16_and_another_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_card(fake_cuda(major=7), monkeypatch)
    assert found.card["bf16"] is False
    assert any("does not compute in bfloat16" in line for line in found.advice)
    assert "needs compute capability 8.0" in found.used["attention"]


def test_a_card_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_card(fake_cuda(fails=True), monkeypatch)
    assert found.card["name"] is None
    wanted = "the card does not answer (RuntimeError: CUDA error: device unavailable)"
    assert any(wanted in line for line in found.advice)


def test_a_kernel_that_does_not_compile_makes_training_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Checkup(card={"name": "card", "capability": "9.0"})

    def broken(torch: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(doctor, "run_kernel", broken)
    doctor.look_at_kernels(object(), found)
    assert not found.can_train
    assert "C compiler" in found.advice[1]


def test_a_version_outside_the_requirements_is_said() -> None:
    wanted = {"transformers": "transformers>=5.17,<5.20"}
    assert doctor.excluded("transformers", "4.56.0", wanted)
    assert not doctor.excluded("transformers", "5.19.0", wanted) and not doctor.excluded("other", "1.0", wanted)


def test_little_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: 2**30)
    room = SimpleNamespace(available_host_bytes=lambda: 2 * 2**30)
    found = Checkup()
    monkeypatch.setattr(doctor, "import_module", fake_load(lowmem_grpo_memory_offload_pages=room))
    doctor.look_at_host(found)
    assert "2.00 GiB of host memory are free" in found.advice[0]
    assert "1.00 GiB are free on this folder's disk" in found.advice[1]


def test_an_old_card_wsl_and_a_vllm_without_its_pool_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowmem_grpo.engines.choice import EngineChoice
    from lowmem_grpo.memory.offload import pages

    def advice(major: int, files: list[str]) -> str:
        choice = SimpleNamespace(choose_engine=lambda *_: EngineChoice("vllm", "it is here"))
        found = Checkup(card={"name": "NVIDIA Test", "capability": f"{major}.5"})
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "import_module", lambda name: choice)
            patch.setattr(importlib.metadata, "files", lambda name: files)
            doctor.look_at_engine(found)
        return "\n".join(found.advice)

    assert "compute capability 7.5. What to do: sample with the transformers engine" in advice(7, [])
    assert "no memory pool" in advice(8, ["vllm/__init__.py"])
    assert advice(8, ["vllm/__init__.py", "vllm/cumem_allocator.abi3.so"]) == ""
    for release, wsl in (("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)):
        monkeypatch.setattr(pages.platform, "uname", lambda release=release: SimpleNamespace(release=release))
        found = Checkup()
        doctor.look_at_host(found)
        assert any("this is WSL" in line for line in found.advice) == wsl
