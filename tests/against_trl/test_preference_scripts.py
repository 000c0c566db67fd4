"""TRL's own scripts for preferences run here with only their imports, model, rows and number of steps replaced."""

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
REWARDS = {"loss", "rewards/chosen"}
EXAMPLES = {"orpo": '''
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from trl import ModelConfig, ScriptArguments, get_peft_config
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, ORPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    trainer = ORPOTrainer(
        model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )

    trainer.train()

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
''', "reward_modeling": '''
import torch
from accelerate import logging
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, HfArgumentParser

from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, get_peft_config, get_quantization_config


logger = logging.get_logger(__name__)


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, RewardConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()

    dtype = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    model_kwargs = dict(
        revision=model_args.model_revision,
        use_cache=False if training_args.gradient_checkpointing else True,
        dtype=dtype,
    )
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        model_kwargs["quantization_config"] = quantization_config

    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, num_labels=1, **model_kwargs
    )

    if model_args.use_peft and model_args.lora_task_type != "SEQ_CLS":
        logger.warning("You are using a `task_type` that is different than `SEQ_CLS` for PEFT.")

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)

    trainer = RewardTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()

    trainer.save_model(training_args.output_dir)

    if training_args.eval_strategy != "no":
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
'''}  # from examples/scripts of TRL 1.16 (Apache License 2.0), which its package does not have; comments are left out


def with_ours(text: str, names: set[str]) -> str:
    """The script with these names of TRL imported from here."""
    found: set[str] = set()

    def parted(line: re.Match[str]) -> str:
        given = line[3].split(", ")
        ours = sorted(names & {*given})
        found.update(ours)
        others = [name for name in given if name not in ours]
        parts = [("lowmem_grpo", ours), (line[2], others)]
        return "\n".join(f"{line[1]}from {home} import {', '.join(some)}" for home, some in parts if some)

    changed = re.sub(r"^( *)from (trl\S*) import (.*)$", parted, text, flags=re.MULTILINE)
    assert found == names
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "rows", "measured"), [
    ("dpo", "DPO", PAIRS, REWARDS), ("kto", "KTO", LABELLED, REWARDS), ("orpo", "ORPO", PAIRS, REWARDS),
    ("reward", "Reward", PAIRS, {"loss", "accuracy"}), ("reward_modeling", "Reward", PAIRS, {"loss", "accuracy"})])
def test_trls_script_runs(name: str, kind: str, rows: list[dict[str, Any]], measured: set[str], tmp_path: Path) -> None:
    text = EXAMPLES.get(name) or (Path(trl.__file__).parent / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / "script.py").write_text(with_ours(text, {f"{kind}Trainer", f"{kind}Config"}), encoding="utf-8")
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"--dataset_name {tmp_path / 'rows'} --model_name_or_path {shallow()} --use_peft --lora_r 4 "
             f"--lora_target_modules all-linear --output_dir {tmp_path / 'out'} --max_steps 2 --learning_rate 1e-3 "
             "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --logging_steps 1 --eval_strategy steps "
             "--eval_steps 2 --report_to none --warmup_steps 0.1 --logging_first_step "
             + "--no_remove_unused_columns" + " --lora_task_type SEQ_CLS" * (kind == "Reward"))
    done = subprocess.run([sys.executable, str(tmp_path / "script.py"), *words.split()], capture_output=True, text=True,
                          check=False, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert measured <= lines[0].keys() and "eval_loss" in lines[-1]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
