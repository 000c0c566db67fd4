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
    "run arithmetic learning_rate=abc": "learning_rate is 'abc'; it must be a number",
    "run arithmetic learning_rate=-1": "learning_rate is -1.0; it must be 0 or above",
    "run arithmetic max_steps": "cannot read 'max_steps': write key=value",
    "run arithmetic --train-size many": "train_size is 'many'; it must be a whole number",
    "run arithmetic loss_type=ppo": "loss_type is 'ppo'; it must be one of grpo, bnpo",
    "run arithmetic temperature=-0.5": "temperature is -0.5; it must be",
    "run arithmetic scale_rewards=often": "scale_rewards",
    "run arithmetic kl_estimator=k4": "kl_estimator is 'k4'; it must be one of k1, k2, k3",
    "run arithmetic resume=perhaps": "resume is 'perhaps'; it must be true or false",
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
    "run code seconds=soon": "seconds is 'soon'; it must be a number",
    "generate": "give a PROMPT to answer",
    "generate hi --model ../nowhere": "no model '../nowhere': there is no such folder",
    "generate hi --adapter /no/such": "there is no /no/such; give the folder of a run, of a checkpoint or of a saved",
    "generate hi --adapter nothing": "nothing is neither a run nor an adapter",
    "eval tiny --recipe arithmetic --adapter old": "has no checkpoint that is whole",
    "eval tiny --recipe arithmetic --samples 0": "n is 0; it must be a whole number, at least 1",
    "eval tiny --recipe arithmetic --temperature -1": "temperature is -1.0; it must be 0 or above",
    "eval tiny --dataset empty.jsonl --reward number_match": "no rows from 'empty.jsonl': it has no rows",
    "export old --out made": "the run in old never finished",
    "export nothing --out made": "nothing is neither a run nor an adapter",
    "new it --data empty.jsonl": "no rows from 'empty.jsonl': it has no rows",
    "new it --data broken.jsonl": "line 2 is not JSON",
    "serve --model nowhere": "no model 'nowhere': it is not in the cache",
    "serve --model ./nowhere": "no model './nowhere': there is no such folder",
    "plan --model tiny --gpu t4 --prompts 100000000": "prompts is 100000000; it must be a whole number, from 1 to",
    "run rows.jsonl": "rows.jsonl is data, and no recipe: `lowmem-grpo new NAME --data rows.jsonl` writes a recipe",
    "run ./rows.jsonl": "`lowmem-grpo new NAME --data ./rows.jsonl` writes a recipe",
    "run gsm8k dataset=empty.jsonl": "no rows from 'empty.jsonl': it has no rows",
    "run gsm8k dataset=empty.csv": "no rows from 'empty.csv': it has no rows",
    "run gsm8k dataset=broken.jsonl": "no rows from 'broken.jsonl': line 2 is not JSON",
    "run gsm8k dataset=broken.parquet": "no rows from 'broken.parquet': it is not a parquet file",
    "run gsm8k dataset=nothing": "no file 'nothing' that can be read",
    "run gsm8k dataset=rows.jsonl": "rows.jsonl has no column answer and question; it has prompt",
    "run arithmetic output_dir=old": "old already holds a run (metrics.jsonl, summary.json)",
    "run arithmetic output_dir=rows.jsonl": "is a file; choose another output_dir",
    "run arithmetic output_dir=": "output_dir is ''; it must be a folder's name",
    "run arithmetic top_p=1.5": "top_p is 1.5; it must be in (0, 1]",
    "run guess min_p=2": "min_p is 2.0; it must be in [0, 1]",
    "run arithmetic report_to=wnadb": "report_to names 'wnadb'; allowed are none, all, wandb",
    "run arithmetic report_to=absent": "report_to names 'absent'",
    "run arithmetic reward_weights=1": "reward_weights has 1 number for 2 reward functions (correct_answer,",
    "run gsm8k dataset=good.jsonl reward_weights=1,2": "reward_weights has 2 numbers for 5 reward functions",
    "run arithmetic max_seq_length=8": "(64) and a prompt of 1 tokens do not fit the context of 8 tokens",
    "run arithmetic max_seq_length=100000": "max_seq_length is 100000; this model's context is 2048",
    "run arithmetic max_completion_length=9999": "do not fit the context of 128 tokens",
    "run arithmetic loss_type=gspo importance_sampling_level=token": "loss_type 'gspo' does not use it",
    "run arithmetic steps_per_generation=3": "it must be a multiple of gradient_accumulation_steps (4)",
    "run arithmetic fp16=true bf16=true": "bf16 and fp16 are both set; set one of them",
    "run arithmetic use_vllm=true engine=transformers": "contradict each other; leave one of them out",
    "run arithmetic lora_alpha=-1": "lora_alpha is -1; it must be above 0",
    "run arithmetic lora_rank=0": "lora_rank is 0; it must be a whole number, at least 1",
    "run arithmetic train_size=0": "train_size is 0; it must be a whole number, from 1 to 1,000,000",
    "run arithmetic train_size=1000000000": "train_size is 1000000000; it must be a whole number, from 1 to 1,000,000",
    "run arithmetic max_steps=abc": "max_steps is 'abc'; it must be a whole number",
    "run arithmetic per_device_train_batch_size=100000000": "a step of 400,000,000 completions; at most 1,000,000 are",
    "run arithmetic train_while_sampling=perhaps": "it must be one of False, True, parallel",
    "run arithmetic train_while_sampling=true": "the rewards correct_answer, answer_line are computed after",
    "run arithmetic train_while_sampling=true num_iterations=2": "train_while_sampling=True trains a group before",
    "run arithmetic chat_template_kwargs=abc": "it must be a value that only a recipe file can give",
    "run arithmetic hub_model_id=a/b/c": "hub_model_id is 'a/b/c'; it must be OWNER/NAME",
    "run arithmetic pass_at_k=9": "does not use it; leave it out, or set advantage_estimator='passk'",
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
    "{}": 'from_pretrained needs model_name: a name on the hub, such as "Qwen/Qwen2.5-1.5B-Instruct", a folder, or',
    '{"max_seq_length": 512}': "from_pretrained needs model_name",
    '{"model_name": "tiny", "dtype": "int8"}': "dtype is 'int8'; it must be float32, bfloat16, float16 or",
    '{"model_name": 5}': "model_name is 5; it must be a folder's name, which is not empty",
    '{"model_name": ""}': "model_name is ''; it must be",
    '{"model_name": "tiny", "max_seq_length": "256"}': "max_seq_length is '256'; it must be a whole number, at least 1",
    '{"model_name": "tiny", "max_seq_length": 0}': "max_seq_length is 0; it must be a whole number, at least 1",
    '{"model_name": "tiny", "max_seq_length": 1000000}': "max_seq_length is 1000000; this model's context is 2048",
    '{"model_name": "tiny", "load_in_4bit": "yes"}': "load_in_4bit is 'yes'; it must be True or False",
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
from lowmem_grpo.cli.main import main
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
FILES = {
    "empty.jsonl": "", "empty.csv": "question,answer\n", "broken.parquet": "x", "rows.jsonl": '{"prompt": "1 + 1"}\n',
    "broken.jsonl": '{"question": "1 + 1", "answer": "#### 2"}\n{"question": "1 +\n', "nothing/is.txt": "",
    "good.jsonl": '{"question": "1 + 1", "answer": "#### 2"}\n', "old/metrics.jsonl": '{"step": 1, "elapsed": 1.0}\n',
    "old/summary.json": '{"status": "running", "steps": 1}',
}


def test_a_wrong_line_is_refused_in_words_and_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    for name, content in (FILES | {"mine.py": RECIPE}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
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


def test_the_first_line_of_a_run_comes_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    program = """
import sys
from lowmem_grpo.cli import run

def stop():
    heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
    raise SystemExit(f"then: {heavy}")

run.quiet = stop
run.run(["arithmetic", "output_dir=here"])
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, cwd=tmp_path)
    assert done.stderr.splitlines() == [
        "recipe arithmetic, records in here; loading torch and other libraries ...", "then: []"]
