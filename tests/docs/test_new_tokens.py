"""The page on new tokens: its code runs, from adding tokens to the adapter in plain transformers and PEFT."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TINY

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "new_tokens.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = {  # what makes the code small enough for a test
    'LM.from_pretrained("Qwen/Qwen2.5-1.5B-Instruct")': f'LM.from_pretrained("{TINY}")',
    "Qwen/Qwen2.5-1.5B-Instruct": "tiny", "load_in_4bit=True": "load_in_4bit=False", "adamw_8bit": "adamw_torch",
    'dataset_text_field="text", ': 'dataset_text_field="text", max_steps=1, disable_tqdm=True, save_strategy="no", ',
}


def test_the_code_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"rows": [{"text": "<|think|> 3 + 4 = 7 <|/think|> 7"}] * 8}
    trained: list[dict[str, int]] = []
    for number, block in enumerate(BLOCKS):
        for old, new in SMALL.items():
            block = block.replace(old, new)
        (tmp_path / "block.py").write_text(block, encoding="utf-8")
        left = runpy.run_path(str(tmp_path / "block.py"), init_globals=names)
        names = {key: value for key, value in left.items() if not key.startswith("__")}
        if number == 0:
            ours, asked = names["model"], names["tokenizer"]("<|think|> 3", return_tensors="pt")
        if number < 2:
            assert names["trainer"].state.global_step == 1
            beside = [weight for weight in names["model"].parameters() if weight.requires_grad and weight.ndim == 2]
            trained.append({str(tuple(weight.shape)): 1 for weight in beside})
    assert len(BLOCKS) == 3
    assert "(2, 128)" in trained[0] and "(384, 128)" in trained[1]
    with torch.no_grad():
        mine, plain = (model.eval()(**asked).logits for model in (ours, names["plain"]))
    assert (mine - plain).abs().max() < 1e-4
