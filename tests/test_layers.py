"""The floors: a folder imports only what is listed before it, heavy libraries stay in their folders, and no code hides
what it does."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lowmem_grpo
import lowmem_grpo.agents
import lowmem_grpo.chat_templates
import lowmem_grpo.config
import lowmem_grpo.data
import lowmem_grpo.environments
import lowmem_grpo.export
import lowmem_grpo.losses
import lowmem_grpo.offload
import lowmem_grpo.planning
import lowmem_grpo.preflight
import lowmem_grpo.rewards

ROOT = Path(lowmem_grpo.__file__).parent
ARCHITECTURE = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
FLOORS = [  # from below; ARCHITECTURE.md says what each folder is for. Files at the top of the package count as folders
    ("kernels", "sandbox", "types", "units", "rules", "later", "hub", "unsloth_names"),
    ("losses", "offload", "memory", "planning"),
    ("config", "models"),
    ("engines",),
    ("data", "runs", "views"),
    ("export", "fast_model", "loader", "rewards", "environments"),
    ("rollout", "preflight", "train", "chat_templates"),
    ("service", "agents", "recipes", "commands", "integrations", "cli", "__main__"),
]
LIBRARIES = {  # what each folder may import beside torch and the standard library
    "kernels": {"triton"},
    "hub": {"huggingface_hub"},
    "models": {"peft", "transformers"},
    "engines": {"numpy", "packaging", "transformers", "vllm"},
    "data": {"datasets", "transformers"},
    "runs": {"numpy", "peft", "safetensors"},
    "views": {"IPython", "click", "plotly", "rich", "trackio", "transformers", "wandb"},
    "export": {"bitsandbytes", "gguf", "peft", "safetensors", "transformers"},
    "fast_model": {"peft", "transformers"},
    "loader": {"peft", "transformers"},
    "environments": {"mcp", "transformers"},
    "rewards": {"jsonschema", "math_verify", "openai", "rich"},
    "rollout": {"transformers"},
    "preflight": {"packaging"},
    "train": {"bitsandbytes", "peft", "transformers"},
    "service": {"fastapi", "starlette", "uvicorn"},
