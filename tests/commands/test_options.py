"""Wrong command lines are refused at once: before torch, transformers or a data library is imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WRONG = {  # command line: words of the refusal
    "ruun": "Did you mean 'run'?",
    "run nosuch": "no recipe 'nosuch'",
    "run ./nosuch.py": "./nosuch.py is not a recipe (no such file)",
    "run ./mine.py nmae=1": "no option 'nmae'; did you mean name?",
    "run arithmetic lerning_rate=1": "no option 'lerning_rate'; did you mean learning_rate?",
    "run arithmetic learning_rate=abc": "learning_rate='abc': Input should be a valid number",
    "run arithmetic learning_rate=-1": "learning_rate is -1.0; it must be 0 or above",
    "run arithmetic max_steps": "cannot read 'max_steps': write key=value",
    "run arithmetic --train-size many": "train_size='many': Input should be a valid integer",
    "run arithmetic loss_type=ppo": "loss_type is 'ppo'; it must be one of grpo, bnpo",
    "run arithmetic temperature=-0.5": "temperature is -0.5; it must be",
    "run arithmetic scale_rewards=often": "scale_rewards",
    "run arithmetic kl_estimator=k4": "kl_estimator is 'k4'; it must be one of k1, k2, k3",
    "run arithmetic resume=perhaps": "resume='perhaps': Input should be a valid boolean",
    "run arithmetic engine=fast": "engine is 'fast'; allowed: auto, transformers, vllm",
    "run arithmetic gpu=99": "gpu is '99'; allowed are auto, cpu",
    "run arithmetic model=/no/such/model": "no model '/no/such/model': there is no such folder",
    "run arithmetic model=./mine": "no model './mine': there is no such folder",
    "run gsm8k dataset=/no/such.jsonl": "no file '/no/such.jsonl' that can be read",
    "run gsm8k": "no dataset 'openai/gsm8k': it is not in the cache, and HF_HUB_OFFLINE allows no download",
    "run gsm8k dataset=a/b/c": "'a/b/c' is no name on the hub",
    "run gsm8k dataset=nope": "no dataset 'nope': it is not in the cache",
    "run gsm8k dataset=nobody/nothing": "no dataset 'nobody/nothing': it is not in the cache",
    "eval tiny --dataset nobody/nothing --reward number_match": "no dataset 'nobody/nothing': it is not in the cache",
    "run code seconds=soon": "seconds='soon': Input should be a valid number",
    "generate": "give a PROMPT to answer",
    "generate hi --model ../nowhere": "no model '../nowhere': there is no such folder",
    "generate hi --adapter /no/such": "/no/such is not a folder",
    "generate hi --fp8 --load-in-4bit": "load_in_4bit=True and load_in_fp8=True contradict each other",
    "eval tiny --recipe arithmetic --fp8 --load-in-4bit": "contradict each other",
    "run arithmetic load_in_fp8=true load_in_4bit=true": "contradict each other",
    "run arithmetic card_share=0": "card_share is 0.0; it must be above 0 and at most 1",
    "run arithmetic kv_cache_dtype=int8": "kv_cache_dtype is 'int8'; it must be one of auto, fp8, fp8_e4m3, fp8_e5m2",
    "run arithmetic kv_cache_dtype=fp8 engine=transformers": "only vLLM holds its cache in 8 bits",
    "plan --model tiny --gpu t4 --kv-cache-dtype int8": "'int8' is not one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2'",
    "generate hi --temperature -1": "temperature is -1.0; it must be 0 or above",
    "generate hi --samples 0": "n is 0; it must be",
    "generate hi --model nobody/nothing": "no model 'nobody/nothing': it is not in the cache, and HF_HUB_OFFLINE",
    "run arithmetic model=nobody/nothing": "no model 'nobody/nothing': it is not in the cache",
    "eval nobody/nothing --recipe arithmetic": "no model 'nobody/nothing': it is not in the cache",
    "eval tiny": "name the problems: --recipe NAME",
    "eval tiny --recipe nosuch": "no recipe 'nosuch'",
    "eval /no/such --recipe arithmetic": "no model '/no/such': there is no such folder",
    "eval tiny --dataset /no/such.jsonl --reward number_match": "no file '/no/such.jsonl' that can be read",
    "eval tiny --dataset x.jsonl --reward number_mach": "no reward 'number_mach'",
    "eval tiny --recipe arithmetic --k 9": "--k 9 needs at least as many answers",
    "export /no/such --out made": "there is no /no/such; give the folder of a run",
    "export .": "Missing option '--out'",
    "export . --out made --format onnx": "'onnx' is not one of 'adapter', 'merged', 'gguf'",
    "export . --out made --push badname": "the repository is 'badname'; one of the hub is named OWNER/NAME",
    "plan --model nobody/nothing --gpu t4": "From the hub: no model 'nobody/nothing': it is not in the cache",
    "plan --model tiny": "Missing option '--gpu'",
    "plan --model tiny --gpu rtx9999": "rtx9999",
    "plan --model nosuch --gpu t4": "nosuch",
    "plan --model tiny --gpu t4 --context many": "'many' is not a valid integer",
    "report /no/such": "Directory '/no/such' does not exist",
    "report .": "no metrics.jsonl; expected the folder of a run",
    "new it --data /no/such.jsonl": "no file '/no/such.jsonl' that can be read",
    "doctor --yaml": "No such option '--yaml'",
    "new": "Missing argument 'NAME'",
    "new 1st": "'1st' cannot be a recipe's name",
}
CALLS = {  # options of FastLanguageModel.from_pretrained, in JSON
    '{"model_name": "/no/such"}': "no model '/no/such': there is no such folder",
    '{"model_name": "nobody/nothing"}': "no model 'nobody/nothing': it is not in the cache",
    '{"load_in_5bit": true}': "has no option 'load_in_5bit'; did you mean load_in_8bit or load_in_4bit?",
    '{"load_in_4bit": true, "load_in_16bit": true}': "contradict each other",
    '{"fast_inference": "sglang"}': "fast_inference is 'sglang'; allowed are True, False",
    '{"max_num_seqs": "8"}': "max_num_seqs is '8'; it must be a whole number, at least 1",
    '{"gpu_memory_utilization": 1.5}': "gpu_memory_utilization is 1.5; it must be in (0, 1]",
    '{"gpu_memory_utilization": "half"}': "gpu_memory_utilization is 'half'; it must be in (0, 1]",
    '{"sampling_weights": "8bit"}': "sampling_weights is '8bit'; it must be one of 4bit, 16bit, or None",
    '{"device": "gpu"}': "device is 'gpu'; allowed are 'cpu', 'cuda' and one card",
    '{"device_map": "nowhere"}': "device_map is 'nowhere'; allowed are 'auto'",
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "vocab_size": 64}
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # fields of config.json, options, what is said
    **{method: ({"quantization_config": {"quant_method": method}}, {}, f"is stored in {method.upper()}, which is not "
                "trained here. Allowed are checkpoints in 16 or 32 bits") for method in ("gptq", "awq", "mxfp4")},
    "hybrid": ({"model_type": "qwen3_5_text"}, {"dtype": "float16"}, "overflows in float16: the loss would be NaN"),
    "gemma2": ({"model_type": "gemma2"}, {}, "Gemma 2: its attention has soft-capped scores"),
    "broken": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, {}, "stored in FP8 of the kind e5m2"),
}
PROGRAM = """
import click, json, shlex, sys
from types import SimpleNamespace
from lowmem_grpo import FastLanguageModel
from click.testing import CliRunner
from lowmem_grpo.cli import main
found = {}
for line in json.load(sys.stdin):
    if line.startswith("{"):
        result = CliRunner().invoke(click.command()(lambda: FastLanguageModel.from_pretrained(**json.loads(line))))
        result = SimpleNamespace(exit_code=result.exit_code, output=str(result.exception))
    else:
        result = CliRunner().invoke(main, shlex.split(line))
    heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
    found[line] = result.exit_code, result.output, heavy
print(json.dumps(found))
"""
RECIPE = """
import torch
from dataclasses import dataclass
from lowmem_grpo.recipes.options import RecipeOptions
@dataclass
class Mine(RecipeOptions):
    name: str = "x"
OPTIONS = Mine
def run(options):
    pass
"""


def test_a_wrong_line_is_refused_in_words_and_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    wrong = WRONG | CALLS
    for name, (fields, options, said) in FOLDERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | fields))
        wrong |= {json.dumps({"model_name": f"./{name}", **options}): said}
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(list(wrong)), text=True,
                          capture_output=True, check=True, cwd=tmp_path)
    for line, (status, said, heavy) in json.loads(done.stdout).items():
        assert status in (1, 2) and wrong[line] in said and "Traceback" not in said, (line, status, said)
        assert not heavy, f"{line}: imported {heavy}"
