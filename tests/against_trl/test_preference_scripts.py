"""TRL's own scripts dpo.py and kto.py run here with only their imports, model, rows and number of steps replaced."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
from small_models import shallow

from lowmem_grpo.runs.records import read_lines

PAIRS = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n + 3}, or so"} for n in range(8)]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen" if wanted else "rejected"], "label": wanted}
            for row in PAIRS for wanted in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("dpo", PAIRS), ("kto", LABELLED)])
def test_trls_script_runs(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    text = (Path(trl.__file__).parent / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    kind, count = name.upper(), 0
    for ours in (f"{kind}Trainer", f"{kind}Config"):
        text, found = re.subn(rf"^( *)from trl import (.*)\b{ours}, ", rf"\1from lowmem_grpo import {ours}\n\1"
                              r"from trl import \2", text, flags=re.MULTILINE)
        count += found
    assert count == 2
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"--dataset_name {tmp_path / 'rows'} --model_name_or_path {shallow()} --use_peft --lora_r 4 "
             f"--lora_target_modules all-linear --output_dir {tmp_path / 'out'} --max_steps 2 --learning_rate 1e-3 "
             "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --logging_steps 1 --eval_strategy steps "
             "--eval_steps 2 --report_to none --no_remove_unused_columns --warmup_steps 0.1 --logging_first_step")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py"), *words.split()], capture_output=True, text=True,
                          check=False, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert {"loss", "rewards/chosen"} <= lines[0].keys() and "eval_loss" in lines[-1]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
