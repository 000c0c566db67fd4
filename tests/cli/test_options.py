"""Wrong command lines are refused at once, in words: before torch, transformers or a data library is imported, and with
nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lowmem_grpo.cli.options import parsed

PLAN, TINY = "plan --model qwen3-8b --gpu t4", "eval tiny --recipe arithmetic"
WRONG = {  # command line: words of the refusal
    "ruun": "Did you mean 'run'?",
    "run nosuch": "no recipe 'nosuch'", "run gsm-8k": "did you mean gsm8k?",
    "run ./nosuch.py": "./nosuch.py is not a recipe (no such file)",
    "run ./nosuch.py --help": "cannot be read as a recipe: [Errno 2] No such file",
    "run ./bad.py --help": "cannot be read as a recipe: invalid syntax",
    "run ./bad.py": "SyntaxError: invalid syntax",
    "run ./mine.py nmae=1": "no option 'nmae'; did you mean name?",
    "run 'my rows.jsonl'": "`lowmem-grpo new NAME --data 'my rows.jsonl'` writes",
    "run rows.jsonl": "rows.jsonl is data, and no recipe: `lowmem-grpo new NAME --data rows.jsonl` writes a recipe",
    "run arithmetic lerning_rate=1": "no option 'lerning_rate'; did you mean learning_rate",
    "run arithmetic learning_rate=abc": "learning_rate is 'abc'; it must be a number",
    "run arithmetic learning_rate=-1": "learning_rate is -1.0; it must be 0 or above",
    "run arithmetic num_generations=1": "num_generations is 1",
    "run arithmetic max_steps": "cannot read 'max_steps': write key=value",
    "run arithmetic --train-size many": "train_size is 'many'; it must be a whole number",
    "run arithmetic train_size=1000000000": "train_size is 1000000000; it must be a whole number, from 1 to 1,000,000",
    "run arithmetic loss_type=ppo": "loss_type is 'ppo'; it must be one of grpo, bnpo",
    "run arithmetic loss_type=gspo importance_sampling_level=token": "loss_type 'gspo' does not use it",
    "run arithmetic resume=perhaps": "resume is 'perhaps'; it must be true or false",
    "run arithmetic chat_template_kwargs=abc": "is 'abc'; it must be a dict of the chat template's own variables",
    "run arithmetic engine=fast": "engine is 'fast'; allowed: auto, transformers, vllm",
    "run arithmetic use_vllm=true engine=transformers": "contradict each other; leave one of them out",
    "run arithmetic gpu=99": "gpu is '99'; allowed are auto, cpu",
    "run arithmetic card_share=0": "card_share is 0.0; it must be above 0 and at most 1",
    "run arithmetic load_in_fp8=true load_in_4bit=true": "contradict each other",
    "run arithmetic kv_cache_dtype=int8": "kv_cache_dtype is 'int8'; it must be one of auto, fp8, fp8_e4m3, fp8_e5m2",
    "run arithmetic kv_cache_dtype=fp8 engine=transformers": "only vLLM holds its cache in 8 bits",
    "run arithmetic lora_alpha=-1": "lora_alpha is -1; it must be above 0",
    "run arithmetic fp16=true bf16=true": "bf16 and fp16 are both set; set one of them",
    "run arithmetic pass_at_k=9": "does not use it; leave it out, or set advantage_estimator='passk'",
    "run arithmetic lora_rank=0": "lora_rank is 0; it must be a whole number, at least 1",
    "run arithmetic model=./mine": "no model './mine': there is no such folder",
    "run arithmetic model=nobody/nothing": "no model 'nobody/nothing': it is not in the cache",
    "run arithmetic max_seq_length=8": "(64) and a prompt of 1 tokens do not fit the context of 8 tokens",
    "run arithmetic max_seq_length=100000": "max_seq_length is 100000; this model's context is 2048",
    "run arithmetic max_completion_length=9999": "do not fit the context of 128 tokens",
    "run arithmetic steps_per_generation=3": "it must be a multiple of gradient_accumulation_steps (4)",
    "run arithmetic per_device_train_batch_size=100000000": "a step of 400,000,000 completions; at most 1,000,000 are",
    "run arithmetic train_while_sampling=perhaps": "it must be one of False, True, parallel",
    "run arithmetic train_while_sampling=true": "the rewards correct_answer, answer_line are computed after",
    "run arithmetic train_while_sampling=true num_iterations=2": "train_while_sampling=True trains a group before",
    "run arithmetic report_to=wnadb": "report_to names 'wnadb'; allowed are none, all, wandb",
    "run arithmetic report_to=absent": "report_to names 'absent'",
    "run arithmetic reward_weights=1": "reward_weights has 1 number for 2 reward functions (correct_answer,",
    "run gsm8k dataset=good.jsonl reward_weights=1,2": "reward_weights has 2 numbers for 5 reward functions",
    "run arithmetic output_dir=old": "old already holds a run (metrics.jsonl, summary.json)",
    "run arithmetic output_dir=rows.jsonl": "is a file; choose another output_dir",
    "run arithmetic output_dir=": "output_dir is ''; it must be a folder's name",
    "run gsm8k": "no dataset 'openai/gsm8k': it is not in the cache, and HF_HUB_OFFLINE allows no download",
    "run gsm8k dataset=a/b/c": "'a/b/c' is no name on the hub",
    "run gsm8k dataset=empty.csv": "no rows from 'empty.csv': it has no rows",
    "run gsm8k dataset=broken.jsonl": "no rows from 'broken.jsonl': line 2 is not JSON",
    "run gsm8k dataset=broken.json": "no rows from 'broken.json': it is not JSON: Expecting property name",
    "eval tiny --dataset broken.json --reward number_match": "no rows from 'broken.json': it is not JSON",
    "new it --data broken.json": "no rows from 'broken.json': it is not JSON",
    "run arithmetic model=broken.json": "no model 'broken.json': it is a file; give a folder that holds a config.json",
    "eval plain --recipe arithmetic": "no model 'plain': it is a file", "generate hi --model plain": "it is a file",
    "export lora --out made --base ./plain": "no model './plain': it is a file",
    "serve --model plain --port 0": "no model 'plain': it is a file; give a folder",
    "run arithmetic output_dir=damaged resume=true": "damaged/summary.json is not JSON",
    "generate ''": "give a PROMPT to answer", "eval moved --recipe ''": "no recipe ''",
    f"{TINY} --seed {10**30}": "it must be a whole number, from -2**63 to 2**64 - 1",
    f"{TINY} --max-seq-length 999999": "max_seq_length is 999999; this model's context is 2048",
    "export moved --out made --format merged --gguf-type q8_0": "--gguf-type has no effect on an export with",
    "export moved --out made --llama-cpp empty": "--llama-cpp has no effect on an export with --format merged; leave",
    "export moved --out made --format adapter --fp8": "--fp8 has no effect on an export with --format adapter",
    "export moved --out made --load-in-4bit --fp8": "contradict each other",
    "export mute --out made": "mute/base_model.json cannot be read (the text is no JSON",
    "generate hi --adapter mute": "mute/base_model.json cannot be read",
    "plan --model empty --gpu t4": "no model 'empty': the folder holds no config.json",
    "plan --model tiny --gpu 0GiB": "the card is '0GiB'; its memory must be above 0",
    "run gsm8k dataset=broken.parquet": "no rows from 'broken.parquet': it is not a parquet file",
    "run gsm8k dataset=nothing": "no file 'nothing' that can be read; allowed are .jsonl",
    "run gsm8k dataset=rows.jsonl": "rows.jsonl has no column question; it has prompt, answer",
    "run code seconds=soon": "seconds is 'soon'; it must be a number",
    "run code seconds=0": "seconds is 0.0; it must be a finite number, at least 0.05",
    "run code isolation=docker": "isolation is 'docker'; it must be one of bubblewrap, process, or None",
    "run code workers=0": "workers is 0; it must be a whole number, at least 1, or None",
    "run countdown min_numbers=9": "min_numbers is 9; it must be a whole number, from 2 to 6",
    "run countdown max_numbers=7": "max_numbers is 7; it must be a whole number, from 2 to 6",
    "run countdown largest_number=100": "largest_number is 100; it must be a whole number, from 4 to 99",
    "run countdown largest_target=2": "largest_target is 2; it must be a whole number, from 4 to 999",
    "run countdown operators=-/": "operators is '-/'; it must be some of +-*/, with + or *",
    "run dpo answers=1": "answers is 1; it must be a whole number, at least 2",
    "run dpo most_pairs=0": "most_pairs is 0; it must be a whole number, at least 1",
    "run email longest_words=-1": "longest_words is -1; it must be a whole number, at least 0",
    "run game2048 side=5": "side is 5; it must be one of 3, 4, or None",
    "run game2048 goal=33": "goal is 33; it must be one of 8, 16, 32, 64",
    "run game2048 moves=0": "moves is 0; it must be a whole number, at least 1, or None",
    "run guess largest=1": "largest is 1; it must be a whole number, at least 2",
    "run guess tries=0": "tries is 0; it must be a whole number, at least 1",
    "run inbox mailbox=huge": "mailbox is 'huge'; it must be one of small, large, or None",
    "run inbox calls=1": "calls is 1; it must be a whole number, at least 2, or None",
    "run inbox reward=best": "reward is 'best'; it must be one of rules, ruler",
    "run inbox reward=ruler judge=gpt": "judge is 'gpt'; it must be \"self\", or an address that begins with http",
    "run instructions instructions=7": "instructions is 7; it must be a whole number, from 1 to 6, or None",
    "run instructions kinds=no_comma,haiku": "kinds is 'no_comma,haiku'; it must be some of english_lowercase, english",
    "run judge judge=gpt": "judge is 'gpt'; it must be \"self\", or an address that begins with http",
    "run new_tokens sft_steps=-1": "sft_steps is -1; it must be a whole number, at least 0",
    "run proximity sft_steps=-1": "sft_steps is -1; it must be a whole number, at least 0",
    "run reward_model paid_by=me": "paid_by is 'me'; it must be one of reward_model, verifier",
    "run self_distill reading_steps=0": "reading_steps is 0; it must be a whole number, at least 1",
    "run tictactoe strengths=half": "strengths is 'half'; it must be numbers from 0 (random) to 1 (perfect), with",
    "run tictactoe strengths=0,2": "strengths is '0,2'; it must be numbers from 0 (random) to 1 (perfect), with",
    "run tictactoe test_strength=-1": "test_strength is -1.0; it must be a share, from 0 to 1",
    "run twenty_questions world=animals": "world is 'animals'; it must be one of numbers, things, or None",
    "run twenty_questions turns=0": "turns is 0; it must be a whole number, at least 1, or None",
    "run ./mine.py size=0": "size is 0; it must be a whole number, at least 1",
    "generate --recipe guess largest=1": "largest is 1; it must be a whole number, at least 2",
    "eval tiny --recipe instructions kinds=haiku": "kinds is 'haiku'; it must be some of",
    "generate": "give a PROMPT to answer", "generate hi --recipe guess": "not both",
    "generate --recipe ''": "no recipe ''",
    "generate hi --you beside": "--you is for --recipe", "generate --recipe gues": "did you mean guess",
    "generate --recipe guess -n 2": "lowmem-grpo eval MODEL",
    "generate --recipe guess --you beside --json": "leave one of them out",
    "generate --recipe arithmetic": "one completion is the whole answer",
    "generate --recipe ./bad.py": "SyntaxError: invalid syntax",
    "generate hi --model ../nowhere": "no model '../nowhere': there is no such folder",
    "generate hi --model nobody/nothing": "no model 'nobody/nothing': it is not in the cache, and HF_HUB_OFFLINE",
    "generate hi --adapter /no/such": "there is no /no/such; give the folder of a run, of a checkpoint or of a saved",
    "generate hi --adapter nothing": "nothing is neither a run nor an adapter",
    "generate hi --adapter torn": "cannot be read",
    "generate hi --temperature -1": "temperature is -1.0; it must be 0 (greedy), or 1e-6 or above",
    "generate hi --max-tokens -1": "max_tokens is -1", "generate hi --samples 0": "n is 0; it must be",
    "generate hi --fp8 --load-in-4bit": "load_in_4bit=True and load_in_fp8=True contradict each other",
    "eval tiny": "name the problems: --recipe NAME", "eval tiny --dataset x.jsonl": "--dataset needs --reward NAME",
    "eval tiny --recipe arithmatic": "no recipe 'arithmatic'; did you mean arithmetic?",
    "eval tiny --recipe options": "no recipe 'options'", "eval tiny --recipe ./nope.py": "(no such file)",
    "run gsm8k dataset=": "dataset is empty; give a value, or leave it out for openai/gsm8k",
    "run instructions kinds=": "kinds is ''; it must be some of", "run judge judge_model=": "judge_model is empty",
    "run countdown 'operators= '": "operators is ' '; it must be some of +-*/, with + or *",
    "eval tiny --recipe judge judge_key=": "judge_key is empty; give a value",
    "eval tiny --recipe gsm8k": "no dataset 'openai/gsm8k': it is not in the cache",
    "eval tiny --recipe gsm8k --dataset nope.jsonl": "no file 'nope.jsonl' that can be read",
    "eval tiny --recipe gsm8k dataset=rows.jsonl": "rows.jsonl has no column question",
    "eval moved --recipe gsm8k": "no file '/gone/rows.jsonl' that can be read",
    "eval runs/nope": "no model 'runs/nope': there is no such folder (there is no folder runs)",
    "report old/nope": "'old/nope' does not exist. Choose another; old has no folders.",
    "pairs moved/nope": "'moved/nope' does not exist. Choose another; moved has adapter.",
    "generate hi --adapter moved/nope": "give the folder of a run, of a checkpoint or of a saved adapter (moved has ad",
    "eval tiny --recipe countdown max_number=3": "max_number is no option of the problems of countdown; did you mean",
    "eval tiny --recipe countdown max_numbers=x": "max_numbers is 'x'; it must be a whole number",
    "eval tiny --recipe countdown 3": "cannot read '3': write key=value",
    "eval tiny --recipe shapes learning_rate=1": "its options are train_size, eval_problems",
    "eval tiny --dataset rows.jsonl --reward number_match kinds=title": "is for the problems of a recipe: give",
    "generate hi there": "PROMPT is one text: write 'hi there'",
    "generate --recipe guess largst=3": "largst is no option of the problems of guess; did you mean largest?",
    "eval tiny --recipe ./bare.py": "has no EXAM", "eval empty --recipe arithmetic": "neither a run nor an adapter",
    f"{TINY} --adapter old": "has no checkpoint that is whole", f"{TINY} --adapter ia3": "only LoRA",
    f"{TINY} --samples 0": "n is 0; it must be a whole number, at least 1",
    f"{TINY} --temperature -1": "temperature is -1.0; it must be 0 (greedy), or 1e-6 or above",
    f"{TINY} --fp8 --load-in-4bit": "contradict each other", f"{TINY} --k 9": "--k 9 needs at least as many answers",
    f"{TINY} --out plain": "--out is 'plain', and", f"{TINY} --dataset rows.jsonl": "makes its own problems",
    f"{TINY} --split test": "--split has no effect beside --recipe",
    f"{TINY} --prompt-column test": "--prompt-column has no effect beside --recipe",
    "eval nobody/nothing --recipe arithmetic": "no model 'nobody/nothing': it is not in the cache",
    "eval tiny --dataset nobody/nothing --reward number_match": "no dataset 'nobody/nothing': it is not in the cache",
    "eval tiny --dataset empty.jsonl --reward number_match": "no rows from 'empty.jsonl': it has no rows",
    "eval tiny --dataset x.jsonl --reward number_mach": "no reward 'number_mach'",
    "eval tiny --dataset x.jsonl --reward nofile.py:score": "there is no file nofile.py",
    "eval tiny --dataset x.jsonl --reward nomodule:score": "there is no module 'nomodule' here",
    "eval tiny --dataset rows.jsonl --reward math_match --prompt-column q": "has no column 'q'; it has prompt, answer",
    "export old --out made": "the run in old never finished",
    "export /no/such --out made": "there is no /no/such; give the folder of a run",
    "export ia3 --out made": "is of type IA3; only LoRA can be loaded", "export torn --out made": "cannot be read",
    "export .": "Missing option '--out'",
    "export . --out made --format onnx": (
        "'onnx' is not one of 'adapter', 'merged', 'merged_4bit', 'merged_mxfp4', 'gguf'"),
    "export . --out made --push badname": "the repository is 'badname'; a name on the hub has the form OWNER/NAME",
    "export lora --out plain": "plain is a file",
    "export lora --out empty": "empty is not empty; choose another folder",
    "export lora --out made --device tpu": "--device is 'tpu'", "export lora --out made --base empty": "no config.json",
    "export lora --out made --format gguf --llama-cpp empty": "empty",
    "export moved --out made --format gguf": "the embedded model 'tiny' cannot be a GGUF file: llama.cpp does not know",
    "export lora --out made --format gguf --base tiny-games": "the embedded model 'tiny-games' cannot be a GGUF file",
    "eval tiny --recipe arithmetic --adapter '~/no'": "there is no /home/nobody/no; give the folder of a run",
    "eval '~/no' --recipe arithmetic": "no model '/home/nobody/no': there is no such folder",
    "eval tiny --dataset '~/no.jsonl' --reward number_match": "no file '/home/nobody/no.jsonl'",
    "new it --data '~/no.jsonl'": "no file '/home/nobody/no.jsonl'",
    "run '~/no.py'": "~/no.py is not a recipe (no such file)",
    **dict.fromkeys(("serve --folder ''", "export lora --out ' '", "export '' --out made", "report ''", "watch ''",
                     f"{TINY} --out ''", "new it --out ''", "eval '' --recipe arithmetic", "jobs --server ''",
                     "generate hi --adapter ''", "plan --model '' --gpu t4"), "it is empty; name a file or a folder"),
    "serve --folder plain/inside --port 0": "--folder is 'plain/inside', and", "serve --port 70000": "70000 is not in",
    "serve --folder plain --port 0": "'plain' is a file", "serve --host 0.0.0.0 --folder made": "give --key-file FILE",
    "serve --model nowhere": "no model 'nowhere': it is not in the cache",
    "serve --model empty --port 0": "holds no config.json",
    "serve --model lora --folder made": "lowmem-grpo export lora --out FOLDER",
    "serve --model no/such --folder made --engine vllm": "tested with our own engine only: leave --engine out",
    "serve --model no/such --folder made --fp8 --16bit": "--fp8 and --16bit contradict each other",
    "watch empty --port 0 --host 9.9.9.9 --key-file keys": "name an address of this machine",
    "watch empty --host 0.0.0.0": "give --key-file FILE", "watch empty --key-file latin": "latin is no key file",
    "watch missing": "'missing' does not exist", "watch empty --key-file empty": "is a directory",
    "jobs --server broken.jsonl": "does not say where a server is", "submit arithmetic --share 7": "share is 7.0",
    "plan --model nobody/nothing --gpu t4": "From the hub: no model 'nobody/nothing': it is not in the cache",
    "plan --model runs/nope --gpu t4": "no model 'runs/nope'. Give one of gemma-4-e4b",
    "plan --model tiny --gpu zzz": "no card 'zzz'. Known are",
    "plan --model lama-3.1-8b --gpu t4": "did you mean llama-3.1-8b", "plan --model tiny": "Missing option '--gpu'",
    "plan --model tiny --gpu t4 --modules-to-save wte": "it must be some of embed_tokens and lm_head",
    "plan --model tiny --gpu 4900": "no card '4900'; did you mean",
    "plan --model list --gpu 4090": "holds no object of fields",
    "plan --model tiny --gpu t4 --kv-cache-dtype int8": "'int8' is not one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2'",
    f"{PLAN} --fp8 --16bit": "--fp8 and --16bit contradict each other", f"{PLAN} --context -5": "context is -5",
    f"{PLAN} --prompts 0": "prompts is 0; it must be a whole number, from 1 to",
    f"{PLAN} --prompt-length 2048": "do not fit a context of 2048",
    f"{PLAN} --completion-length 1900": "give a mean of at most",
    f"{PLAN} --context 99999": "this model's is 40960 at most", f"{PLAN} --generations 0": "num_generations is 0",
    f"{PLAN} --optim sgd": "optim is 'sgd'; it must be one of",
    "report /no/such": "Directory '/no/such' does not exist", "report stepless": "line 1 has no step",
    "report .": "no metrics.jsonl; expected the folder of a run",
    "doctor --yaml": "No such option '--yaml'",
    "new": "Missing argument 'NAME'", "new 9lives": "'9lives' cannot be a recipe's name", "new ''": "'' cannot be a",
    "new my-recipe": "has letters, digits and _, and no digit first; write my_recipe", "new mine.py": "write mine",
    "new sub/mine": "write mine, and its folder as --out FOLDER", "new ../up": "write up",
    f"new {'x' * 300}": "cannot be a recipe's name", "new class": "is a word of Python itself",
    "new gsm8k": "is a recipe of the package", "new torch": "would hide the Python module 'torch'",
    "new random": "would hide the Python module 'random'", "new it --answers poem": "'poem' is not one of",
    "new it --prompt-column question": "--prompt-column is about --data FILE, which is not given",
    "new it --data nope.csv": "no file 'nope.csv' that can be read", "new it --data .": "no file '.' that can be",
    "new it --data rows.jsnl": "there is no file 'rows.jsnl'",
    "new it --data ''": "no file '.' that can be read",
    "new it --agent --data ''": "so --data has nothing to say",
    "new it --data empty.jsonl": "no rows from 'empty.jsonl': it has no rows",
    "new it --data one.jsonl": "one.jsonl has one row, and a recipe needs two or more, to train on and to test with",
    "new it --data one.json": "one.json has one row, and", "new it --data one.csv": "one.csv has one row, and",
    "new it --agent --data rows.jsonl": "so --data has nothing to say",
    "new it --agent --answers number": "so --answers has nothing to say",
    "new it --out rows.jsonl": "--out rows.jsonl is no folder",
    "new it --out rows.jsonl/deeper": "nothing can be written to rows.jsonl/deeper",
}
CALLS = {  # options of FastLanguageModel.from_pretrained, in JSON
    '{"model_name": "/no/such"}': "no model '/no/such': there is no such folder",
    '{"model_name": "nobody/nothing"}': "no model 'nobody/nothing': it is not in the cache",
    '{"load_in_5bit": true}': "has no option 'load_in_5bit'; did you mean load_in_8bit or load_in_4bit?",
    '{"load_in_4bit": true, "load_in_16bit": true}': "contradict each other",
    '{"fast_inference": "sglang"}': "fast_inference is 'sglang'; allowed are True, False",
    '{"gpu_memory_utilization": "half"}': "gpu_memory_utilization is 'half'; it must be in (0, 1]",
    '{"sampling_weights": "8bit"}': "sampling_weights is '8bit'; it must be one of 4bit, 16bit, or None",
    '{"device": "gpu"}': "device is 'gpu'; allowed are 'cpu', 'cuda' and one card",
    '{"device_map": "nowhere"}': "device_map is 'nowhere'; allowed are 'auto'",
    "{}": 'from_pretrained needs model_name: a name on the hub, such as "Qwen/Qwen2.5-1.5B-Instruct", a folder, or',
    '{"model_name": "tiny", "dtype": "int8"}': "dtype is 'int8'; it must be float32, bfloat16, float16 or",
    '{"model_name": 5}': "model_name is 5; it must be a folder's name, which is not empty",
    '{"model_name": "tiny", "max_seq_length": "256"}': "max_seq_length is '256'; it must be a whole number, at least 1",
    '{"model_name": "tiny", "max_seq_length": 1000000}': "max_seq_length is 1000000; this model's context is 2048",
    '{"model_name": "tiny", "load_in_4bit": "yes"}': "load_in_4bit is 'yes'; it must be True or False",
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "vocab_size": 64}
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # fields of config.json, options, what is said
    **{method: ({"quantization_config": {"quant_method": method}}, {}, f"is stored in {method.upper()}, which is not "
                "trained here. Allowed are checkpoints in 16 or 32 bits") for method in ("gptq", "awq", "mxfp4")},
    "hybrid": ({"model_type": "qwen3_5_text"}, {"dtype": "float16"}, "overflows in float16: the loss would be NaN"),
    "gpt-oss": ({"model_type": "gpt_oss"}, {"dtype": "float16"}, "gpt-oss overflows in float16"),
    "gemma2": ({"model_type": "gemma2"}, {}, "Gemma 2: its attention has soft-capped scores"),
    "broken": ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, {}, "stored in FP8 of the kind e5m2"),
}
PROGRAM = """
import click, json, shlex, sys
from types import SimpleNamespace
from lowmem_grpo import FastLanguageModel
from click.testing import CliRunner
from lowmem_grpo.__main__ import main
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
from lowmem_grpo.utils import at_least
@dataclass
class Mine(RecipeOptions):
    name: str = "x"
    size: int = 3
    RANGES = RecipeOptions.RANGES | {"size": at_least(1), "name": ("a text", lambda value: True)}
OPTIONS = Mine
def run(options):
    pass
"""
GOOD = '{"question": "1 + 1", "answer": "#### 2"}\n'
FILES = {  # by their paths below the folder in which the commands run
    "mine.py": RECIPE, "bad.py": "def (", "bare.py": "x = 1\n", "plain": "", "empty/.keep": "", "nothing/is.txt": "",
    "keys": f"ann tml-{'a' * 32}\n", "latin": "Ren\xe9 key\n", "empty.jsonl": "", "empty.csv": "question,answer\n",
    "broken.json": "{bad", "damaged/summary.json": "{", "mute/base_model.json": "{bad",
    "mute/adapter_config.json": '{"peft_type": "LORA"}',
    "broken.parquet": "x", "broken.jsonl": GOOD + '{"question": "1 +\n', "good.jsonl": GOOD,
    "one.jsonl": "\n" + GOOD, "one.json": f"[{GOOD}]", "one.csv": 'question,answer\na,"b\nc"\n',
    "rows.jsonl": "".join(f'{{"prompt": "{number}?", "answer": "{number}"}}\n' for number in range(4)),
    "old/metrics.jsonl": '{"step": 1, "elapsed": 1.0}\n', "old/summary.json": '{"status": "running", "steps": 1}',
    "stepless/metrics.jsonl": '{"loss": 1.0}\n', "list/config.json": "[1]",
    "ia3/adapter_config.json": '{"peft_type": "IA3"}', "lora/adapter_config.json": '{"peft_type": "LORA"}',
    "moved/summary.json": '{"recipe": "gsm8k", "status": "finished", "options": {"dataset": "/gone/rows.jsonl"}}',
    "moved/adapter/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "tiny"}',
    "torn/adapter_config.json": "{",
    **{f"{name}/adapter_model.safetensors": "" for name in ("ia3", "lora", "torn", "mute", "moved/adapter")},
}


def test_a_wrong_line_is_refused_in_words_before_anything_heavy_is_imported_or_written(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, "latin-1")
        (tmp_path / name).chmod(0o600)
    wrong = WRONG | CALLS
    for name, (fields, options, said) in FOLDERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA | fields))
        wrong |= {json.dumps({"model_name": f"./{name}", **options}): said}
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run([sys.executable, "-B", "-c", PROGRAM], input=json.dumps(list(wrong)), text=True,
                          capture_output=True, check=True, cwd=tmp_path, timeout=400,
                          env=os.environ | {"HOME": "/home/nobody"})
    told = json.loads(done.stdout).items()
    failures = [f"{line}: {found}" for line, found in told if not refused(wrong[line], *found)]
    assert not failures, "\n".join(failures)
    assert sorted(tmp_path.rglob("*")) == before


def refused(words: str, status: int, said: str, heavy: list[str]) -> bool:
    """Whether it ended with an error of these words, and imported nothing heavy."""
    return status in (1, 2) and words in " ".join(said.split()) and "Traceback" not in said and not heavy


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


@pytest.mark.parametrize(("text", "size", "words"), [
    ("x = 1", 3 << 30, "has 3.00 GiB; at most 1.0 MiB are read"), ("x=" + "-" * 10**5 + "1", 0, "cannot be read"),
    ("\0", 0, "null bytes"), ("x=" + "[" * 5000, 0, "too many nested parentheses")])
def test_a_recipe_too_large_or_too_deep_is_refused_in_a_line(
    text: str, size: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(text)
    if size:
        os.truncate(tmp_path / "mine.py", size)
        monkeypatch.setattr(Path, "open", Mock(side_effect=AssertionError("it is read")))
    with pytest.raises(ValueError, match=r"mine\.py cannot be read as a recipe") as refused:
        parsed(tmp_path / "mine.py")
    assert words in str(refused.value)
