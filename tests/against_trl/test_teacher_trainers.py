"""What TRL's scripts and callbacks expect of trainers with a teacher."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from small_models import shallow
from trainer_runs import ROWS, SMALL, load
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import TrlParser

from lowmem_grpo import DistillationConfig, DistillationTrainer, SDFTConfig, SDFTTrainer, SDPOConfig, SDPOTrainer

HINTS = [{**row, "privileged_context": f"It is {row['answer']}."} for row in ROWS]
SCRIPT = Path(trl.__file__).parent / "scripts" / "distillation.py"
IMPORTS = {
    "from trl import DistillationTrainer, get_dataset, ": "from lowmem_grpo import DistillationTrainer\n"
                                                          "    from trl import get_dataset, ",
    "from trl import DatasetMixtureConfig, DistillationConfig, ": "from lowmem_grpo import DistillationConfig\n"
                                                                  "    from trl import DatasetMixtureConfig, ",
}


class Noting(TrainerCallback):
    """Keeps what the hooks of TRL's self-distillation trainers are called with."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.read: list[dict[str, Any]] = []

    def on_generation_batch_built(self, **told: Any) -> None:
        self.built.append(told)

    def on_teacher_context_built(self, processing_class: Any, teacher_input_ids: Any, **told: Any) -> None:
        self.read.append(told | {"texts": processing_class.batch_decode(teacher_input_ids, skip_special_tokens=True)})


def first_succeeds(prompts: list[Any], **_: Any) -> list[float]:
    return [1.0 if place % 4 == 0 else 0.0 for place in range(len(prompts))]


def test_a_callback_would_not_be_told_what_the_teacher_reads(tmp_path: Path) -> None:
    noting = Noting()
    config = SDPOConfig(output_dir=str(tmp_path), **SMALL | {"max_steps": 1})
    SDPOTrainer(load(), first_succeeds, config, ROWS, callbacks=[noting]).train()
    (told,), (built,) = noting.read, noting.built
    assert built["generate_every"] == built["steps_per_generation"] == 1
    assert told["self_distillation_mask"].tolist() == [0.0, 1.0, 1.0, 1.0] * 2  # the success is not shown to itself
    assert ["Correct solution:" in text for text in told["texts"]] == [False, True, True, True] * 2
    width = told["completion_mask"].shape[1]
    assert torch.equal(told["teacher_attention_mask"][:, -width:], told["completion_mask"])


def test_a_command_line_of_trls_scripts_would_not_name_the_teacher(tmp_path: Path) -> None:
    def read(config: Any, words: str) -> Any:
        return TrlParser((config,)).parse_args_and_config([*words.split(), "--output_dir", str(tmp_path / "run")])[0]

    named = read(DistillationConfig, f"--teacher_model_name_or_path {shallow()} --teacher_model_revision main "
                                     "--teacher_model_init_kwargs {\"dtype\":\"bfloat16\"} --max_completion_length 8")
    made = DistillationTrainer(load(), args=named, train_dataset=ROWS)
    assert made.teacher_model is not made.model and next(made.teacher_model.parameters()).dtype == torch.bfloat16
    args = read(SDFTConfig, "--teacher_model_kind live --num_generations 1 --max_completion_length 8")
    made = SDFTTrainer(load(), args, HINTS)
    assert made.args.teacher == "live" and made.teacher_model is made.model
    with pytest.raises(ValueError, match=r"teacher_model_kind is 'old'; .*ema"):
        SDPOConfig(teacher_model_kind="old")


def test_options_for_loading_would_be_lost_where_the_teacher_is_loaded(tmp_path: Path) -> None:
    config = DistillationConfig(output_dir=str(tmp_path), max_completion_length=8,
                                teacher_model_init_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="teacher_model_init_kwargs is given, and the teacher is loaded already"):
        DistillationTrainer(load(), AutoModelForCausalLM.from_pretrained(shallow()), config, ROWS)


@pytest.mark.slow
def test_trls_script_of_distillation_would_not_run_with_changed_imports(tmp_path: Path) -> None:
    script = SCRIPT.read_text("utf-8")
    for theirs, ours in IMPORTS.items():
        assert theirs in script
        script = script.replace(theirs, ours)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"prompt": "What is 2 + 3?"}\n' * 8)
    words = (f"--model_name_or_path tiny --teacher_model_name_or_path {shallow()} --dataset_name rows --use_peft "
             "--lora_target_modules all-linear --max_steps 2 --max_completion_length 8 --output_dir out")
    done = subprocess.run([sys.executable, "script.py", *words.split()], cwd=tmp_path, text=True, capture_output=True,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Training completed" in done.stdout and (tmp_path / "out" / "adapter_model.safetensors").is_file()
