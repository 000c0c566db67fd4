"""The page on distillation: its code runs, from a teacher that is a model to one whose answers are stored."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.config.teacher import OF_MODEL
from lowmem_grpo.recipes.arithmetic import correct_answer, make_dataset
from tests.attacks.judge_server import serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = {  # what makes the code small enough for a test
    "Qwen/Qwen2.5-1.5B-Instruct": "tiny", "Qwen/Qwen2.5-7B-Instruct": "tiny", "load_in_4bit=True": "load_in_4bit=False",
    "max_completion_length=512": "",
    'output_dir="outputs", ': 'output_dir="outputs", max_steps=1, per_device_train_batch_size=8, disable_tqdm=True, '
                              'max_completion_length=6, overwrite_output_dir=True, save_strategy="no", ',
}


def told(body: dict[str, Any]) -> tuple[int, bytes]:
    """A reply in vLLM's form: at each place the prompt's own token, and 20 that are equally likely."""
    places: list[Any] = [None]
    for token in body["prompt"][1:]:
        ids = [token, *(other for other in range(30, 50) if other != token)]
        places.append({str(name): {"logprob": -4.0} for name in ids})
    return 200, json.dumps({"choices": [{"text": "x", "prompt_logprobs": places}]}).encode()


def test_the_code_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 6
    names: dict[str, Any] = {"dataset": make_dataset("train", 8), "right": correct_answer}
    file, kinds = tmp_path / "block.py", []
    with serving(told) as server:
        for block in BLOCKS:
            own = {"http://127.0.0.1:8000/v1": server.url, "top_k=20": 'top_k=20, model="m"'}
            for old, new in {**SMALL, **own}.items():
                block = block.replace(old, new)
            file.write_text(block, encoding="utf-8")
            names = {key: value for key, value in runpy.run_path(str(file), init_globals=names).items()
                     if not key.startswith("__")}
            if "trainer" in names:
                trainer = names.pop("trainer")
                kinds.append((trainer.method, trainer.args.teacher))
                trainer.train()
                assert trainer.state.global_step == 1
            if not kinds[1:]:
                names["model"].save_lora(str(tmp_path / "runs" / "arithmetic"))
        trainer = names["DistillationTrainer"](names["model"], args=names["config"], train_dataset=names["rows"])
        trainer.train()
    assert kinds == [("distillation", "tiny"), (None, "runs/arithmetic"), ("sdft", "base"), ("sdpo", "ema")]


def test_the_page_names_every_teacher() -> None:
    assert [name for name in (*OF_MODEL, "stored") if f'| `"{name}"` |' not in PAGE] == []
