"""The environment of all tests. Their fixtures are in support/everywhere.py."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# Tests import bench/ as its commands do; at the end: where the package is installed, that one is tested.
sys.path.append(str(Path(__file__).parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of tests and their processes: two workers share the cores
# Before datasets is imported: its cache lies below HOME, which may not be writable.
os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/lowmem-grpo-datasets-{os.getuid()}")
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # inductor takes what it kept for other instruction sets
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/lowmem-grpo-inductor-{capability}")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch's deterministic mode refuses products

import torch

pytest_plugins = ["skips"]  # which counts the skipped tests
gc.set_threshold(100_000, 50, 100)  # tests make many objects, and looking through them took a fifteenth of their time

# before triton is imported (bitsandbytes does): its kernels then run on CPU tensors, where there is no card
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is tested, here and in what tests start


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run: the process that hands them out to workers starts without transformers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("everywhere")
