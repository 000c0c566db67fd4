"""Run the public notebooks of a folder here, with only imports, model, dataset and number of steps replaced.

    python -m bench.notebooks FOLDER

FOLDER holds notebooks as their authors publish them. Each runs in a process and a temporary folder of its own.
`changed` counts what is replaced: install and import lines, and assertions about versions (`imports`); the `model`, by
the one in the package (Qwen-VL, by the one that reads images; gpt-oss, by a small random one in MXFP4), names of layers
that only the replaced one has, by its most similar ones, and the turns of its chat template; the `dataset`, by made
rows with the same columns; the number of `steps`, by two. `device`: without a card, requests for one become requests
for the CPU. `login`: there is no login to the hub, to wandb or to trackio, nothing is shown or uploaded there, and what
was uploaded, under the author's name or a placeholder such as <your-model-id>, is read from this machine, with the
small model's tokenizer if none was uploaded. `length`: the small model has a token for each byte, so `max_length` of
SFTConfig and `max_model_len` of vLLM's own LLM are four times as long; for gpt-oss, whose template writes much of its
own, also `max_seq_length` and `max_prompt_length`. It knows <think> and </think>, as many of the replaced models do. If
a notebook stops, the verdict says in which cell (from 0) and why. Other files of FOLDER are copied beside each
notebook, in place of those that it downloads. `reason`: the notebook runs, the package refuses it by name (and for
which wish), or whose error it was. `beside_lora`: the largest change of the values of an embedding or a head that a
notebook trains beside LoRA; a notebook whose named embedding or head kept its values does not count as running.
"""

import ast
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Collection, Container, Iterator
from pathlib import Path
from typing import Any

import click
import nbformat
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common import public_code as public
from bench.common.tables import markdown
from lowmem_grpo.config.beside_lora import WHOLE
from lowmem_grpo.trainer.loop import Trainer
from lowmem_grpo.utils import GIB

OURS = {"DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer", "ORPOConfig", "ORPOTrainer", "SFTConfig", "SFTTrainer",
        "SamplingParams"}  # names of TRL and vLLM, here too
MADE_ROWS = "bench.made_rows"
SETTINGS = ("DPOConfig", "GRPOConfig", "ORPOConfig", "SFTConfig", "TrainingArguments", "UnslothTrainingArguments")
UPLOADS = ("notebook_login", "login", "push_to_hub")
TRACKERS = (["wandb"], ["trackio"])
OFFLINE = {"trackio_space_id": "None", "push_to_hub": "False", "report_to": "'none'"}  # an option, and its value here
PLACEHOLDER = re.compile(r"<([\w-]+)>")  # of the reader's own repository
UPLOAD = "__import__('bench.notebooks', fromlist=['upload']).upload({}, {}, {!r})"
THINKING = ("<think>", "</think>")
BYTES = 4  # of a token of the replaced models
LENGTHS = (("SFTConfig", "max_length"), ("LLM", "max_model_len"))  # the second one is vLLM's
OF_GPT_OSS = (("from_pretrained", "max_seq_length"), ("GRPOConfig", "max_prompt_length"))
POSITIONS = BYTES * 131072  # of the small gpt-oss
STRETCHED = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": POSITIONS / 4096, "beta_fast": 32.0,
             "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
PARTS = {"instruction_part": "<|im_start|>user\n", "response_part": "<|im_start|>assistant\n"}  # of the small model
LAYERS = {  # of a replaced model: the most similar layer of the small one
    **dict.fromkeys(("in_proj", "c_attn"), "q_proj"), **dict.fromkeys(("out_proj", "c_proj"), "o_proj"),
    "w1": "gate_proj", **dict.fromkeys(("w2", "fc2", "shared_mlp.output_linear"), "down_proj"),
    **dict.fromkeys(("w3", "fc1", "gate_up_proj", "shared_mlp.input_linear"), "up_proj"),
}
QWEN_VL = re.compile(r"(?i)qwen(2[._]5|3)[-_]VL")  # models of images that load here
GPT_OSS = re.compile(r"(?i)gpt.oss")
FAMILIES = (  # of models that the package refuses by name (docs/families.md), by the model's name
    ("the model's family", "(?i)gemma-?2[-_]|LFM2|Falcon.H1|granite-4.0-h|Nemotron-3|Qwen3.[56]-35B|ERNIE-4.5-21B|"
                           "gemma-4-26B"),)
NAMED = re.compile(r"(Unsupported|Value|Data|Preflight|Sandbox|EngineUnavailable|GGUF|Merge|ToolForm)Error|"
                   "TypeError: .*has no option")  # errors that say what to do
WISHES = (  # what would have to be there, and words of the refusal
    ("images", r"\b[Ii]mages\b"), ("preferences", "Take DPOTrainer"), ("full fine-tuning", "full_finetuning"),
    ("trained embeddings", "embedding stay frozen|Embeddings stay frozen|modules_to_save"),
    ("code run in the trainer's process", "Code that a model wrote"), ("OpenEnv's server", "No server of OpenEnv"),
    ("code of the model's repository", "trust_remote_code"), ("llama.cpp, which is not installed", "llama.cpp"))
ASKS = (  # of what a notebook makes use, if it stops before that is refused
    ("images", re.compile(r"""["']type["']\s*:\s*["']image["']|ForConditionalGeneration|ImageTextToText|Vision2Seq""")),
    ("preferences", re.compile(r"\bCPOTrainer\(")))
MEMORY = 10 * GIB  # bytes that a notebook may take of the host
CPU = "__import__('types').SimpleNamespace(name='CPU', total_memory=1 << 30)"  # in place of a card's properties
COLUMNS = ("notebook", "steps", "cells", "changed", "time", "verdict")


class NotebookChanges(public.Changes):
    """The changes to a notebook; `model` is the small model to use instead of its own."""

    def __init__(self, model: str, has_card: bool, of_images: str = "", gpt_oss: str = "") -> None:
        super().__init__()
        self.model, self.has_card, self.of_images, self.gpt_oss = model, has_card, of_images or model, gpt_oss or model
        self.folders: set[str] = set()  # that were named so far
        self.models: list[str] = []  # that were replaced
        self.beside: set[str] = set()  # of embedding and head: those that are to be trained beside LoRA
        self.own_template = False  # whether the notebook relies on the chat template of the replaced model

    def visit_Import(self, node: ast.Import) -> Any:  # noqa: N802 - the names of ast.NodeTransformer
        names = [name.name for name in node.names]
        if names == ["unsloth"]:
            return self.statements("imports", "import lowmem_grpo")
        return self.statements("login", "pass") if names in TRACKERS else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:  # noqa: N802
        module, homes = node.module or "", dict[str, list[str]]()
        for name in node.names:
            homes.setdefault(home_of(module, name.name), []).append(ast.unparse(name))
        if [*homes] == [module] or node.level or "LLM" in homes.get("vllm", ()):  # what is given to vLLM's own
            return node
        lines = [f"from {home} import {', '.join(names)}" for home, names in homes.items()]
        return self.statements("dataset" if MADE_ROWS in homes else "imports", "\n".join(lines))

    def visit_Assert(self, node: ast.Assert) -> Any:  # noqa: N802
        return self.statements("imports", "pass") if "__version__" in ast.unparse(node.test) else node

    def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802
        self.generic_visit(node)
        for constant in assigned_models(node.targets[0], node.value):
            self.rename(constant)
        if local := uploaded(node.value, self.folders):
            node.value = self.expression("login", local)
        self.folders |= {each.value for each in ast.walk(node.value)
                         if isinstance(each, ast.Constant) and isinstance(each.value, str)}
        return node

    def rename(self, constant: ast.Constant) -> None:
        self.models.append(str(constant.value))
        name = str(constant.value)
        constant.value = (self.of_images if QWEN_VL.search(name) else self.gpt_oss if GPT_OSS.search(name)
                          else self.model)
        self.counts["model"] += 1

    def visit_Call(self, node: ast.Call) -> Any:  # noqa: N802
        self.generic_visit(node)
        owner = [ast.unparse(node.func.value)] if isinstance(node.func, ast.Attribute) else []
        if public.called(node) == "push_to_hub" and node.args and (local := uploaded(node.args[0])):
            return self.expression("login", UPLOAD.format(owner[0], local, self.model))
        if public.called(node) in UPLOADS or owner in TRACKERS:
            return self.expression("login", "None")
        for constant in model_names(node):
            self.rename(constant)
        for place, value in enumerate(node.args):
            if public.called(node) == "from_pretrained" and (local := uploaded(value)):
                node.args[place] = self.expression("login", local)
        for keyword in node.keywords:
            if keyword.arg == "model" and (local := uploaded(keyword.value)):
                keyword.value = self.expression("login", local)
        if public.called(node) in SETTINGS:
            self.limit_steps(node)
            for keyword in node.keywords:
                if keyword.arg in OFFLINE and not says_none(keyword.value):
                    keyword.value = self.expression("login", OFFLINE[keyword.arg])
        for keyword in node.keywords:
            if (public.called(node), keyword.arg) in OF_GPT_OSS and any(map(GPT_OSS.search, self.models)):
                keyword.value = self.expression("length", f"{BYTES} * ({ast.unparse(keyword.value)})")
            match keyword.value:
                case ast.Constant(value=int(length)) if (public.called(node), keyword.arg) in LENGTHS:
                    keyword.value = self.expression("length", str(BYTES * length))
            if self.own_template and keyword.arg in PARTS and not any(map(GPT_OSS.search, self.models)):
                keyword.value = self.expression("model", repr(PARTS[keyword.arg]))
            if keyword.arg in ("target_modules", "modules_to_save"):
                self.beside |= {*WHOLE} & {*texts_in(keyword.value)}
            if keyword.arg == "target_modules" and (names := small_names(keyword.value)):
                keyword.value = self.expression("model", repr(names))
        return node if self.has_card else self.on_cpu(node)

    def limit_steps(self, node: ast.Call) -> None:
        """Make a trainer's settings stop after two steps."""
        named = {keyword.arg: keyword for keyword in node.keywords}
        two = ast.keyword("max_steps", self.expression("steps", "2"))
        if chosen := named.get("max_steps") or named.get("num_train_epochs"):
            node.keywords[node.keywords.index(chosen)] = two
        else:
            node.keywords.insert(0, two)

    def on_cpu(self, node: ast.Call) -> ast.expr:
        """Return a call that uses the CPU in place of one that uses a card."""
        match node:
            case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant(value="cuda" | "cuda:0")]):
                node.args = [self.expression("device", "'cpu'")]
            case ast.Call(func=ast.Attribute(value=inner, attr="cuda"), args=[], keywords=[]):
                return self.expression("device", ast.unparse(inner))
            case ast.Call(keywords=keywords) if any(map(is_flash, keywords)):
                next(filter(is_flash, keywords)).value = self.expression("device", "'eager'")
            case ast.Call(func=ast.Name(id="LLM")):  # of vLLM, which takes 92% of a card's memory
                node.keywords.append(ast.keyword("gpu_memory_utilization", self.expression("device", "0.1")))
            case ast.Call(func=ast.Attribute(attr="get_device_properties")):
                return self.expression("device", CPU)
        return node


def home_of(module: str, name: str) -> str:
    """Return the module from which a name is imported here."""
    root, _, rest = module.partition(".")
    if (module, name) == ("unsloth_zoo.utils", "Version"):
        return "bench.common.public_code"
    if root in ("unsloth", "unsloth_zoo"):
        return "lowmem_grpo.chat_templates" if rest == "chat_templates" else "lowmem_grpo"
    if root in ("trl", "vllm") and name in OURS:
        return "lowmem_grpo"
    return MADE_ROWS if (module, name) == ("datasets", "load_dataset") else module


def assigned_models(target: ast.expr, value: ast.expr) -> Iterator[ast.Constant]:
    """Yield the names of hub models that are assigned to a variable with "model" in its name."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for pair in zip(targets, values, strict=False):
                yield from assigned_models(*pair)
        case ast.Name(id=name), ast.Constant(value=str(text)):
            if "model" in name.lower() and public.HUB_NAME.fullmatch(text):
                yield value


def model_names(node: ast.Call) -> Iterator[ast.Constant]:
    """Yield the names of hub models in a call that loads one."""
    loads = public.called(node) in ("from_pretrained", "pipeline")
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("model", "model_name", "tokenizer")]
    for value in [*named, *(node.args if loads else [])]:
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and public.HUB_NAME.fullmatch(value.value):
            yield value


def uploaded(value: ast.expr, folders: Container[str] = ()) -> str | None:
    """Return the text of the local folder for a repository of the reader or the author: f"{folder}..." for
    f"owner/{folder}...", "name" for "<name>", and "folder" for "owner/folder" of these folders; else None."""
    match value:
        case ast.JoinedStr(values=[ast.Constant(value=str(owner)), *rest]) if owner.endswith("/"):
            return ast.unparse(ast.JoinedStr(rest))
        case ast.Constant(value=str(name)) if placeholder := PLACEHOLDER.fullmatch(name):
            return repr(placeholder[1])
        case ast.Constant(value=str(name)) if "/" in name and name.partition("/")[2] in folders:
            return repr(name.partition("/")[2])
    return None


def upload(part: Any, folder: str, model: str) -> None:
    """Save a model or a tokenizer in a folder, in place of a repository; with a model, the tokenizer of the small one
    if there is none yet."""
    part.save_pretrained(folder)
    if not Path(folder, "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(folder)


def is_flash(keyword: ast.keyword) -> bool:
    """Return whether an option asks for attention that only a card computes."""
    return keyword.arg == "attn_implementation" and ast.unparse(keyword.value) == "'flash_attention_2'"


def says_none(value: ast.expr) -> bool:
    """Return whether an option's value already keeps everything on this machine."""
    return isinstance(value, ast.Constant) and value.value in ("none", "tensorboard", None, False)


def texts_in(value: ast.expr) -> list[Any]:
    return [each.value for each in getattr(value, "elts", []) if isinstance(each, ast.Constant)]


def small_names(value: ast.expr) -> list[str] | None:
    """Return `target_modules` in the small model's names, if it has names of layers that only the replaced model has;
    every other name stays, so that it is trained or refused."""
    names = texts_in(value)
    return [*dict.fromkeys(LAYERS.get(name, name) for name in names)] if {*LAYERS} & {*names} else None


# What came of a notebook


def reason(row: public.Row) -> str:
    """Return in a few words what came of a notebook: it runs, the wish of which a refusal speaks, or whose error it
    was. A model whose family the package refuses counts as refused, although the small one in its place runs."""
    error, place = str(row.get("error", "")), str(row.get("raised_in", ""))
    models = " ".join([*row.get("models", ()), str(row.get("notebook"))])
    family = next((wish for wish, names in FAMILIES if re.search(names, models)), "")
    if family and public.ran(row):
        return f"refused: {family}"
    if public.ran(row):
        return "runs"
    if place.startswith("lowmem_grpo") or "lowmem_grpo" in error:
        return ("refused: " + next((wish for wish, words in WISHES if re.search(words, error)), "other")
                if NAMED.match(error) else "raw error of this package")
    if row.get("asks"):
        return f"stops before: {row['asks']}"
    return "stops elsewhere" if error else "trains nothing"


def reasons_table(rows: list[public.Row]) -> list[str]:
    """Return the number of notebooks for each reason, and their names, as lines of Markdown."""
    names: dict[str, list[str]] = {}
    for row in public.latest(rows, "notebook"):
        names.setdefault(row.get("reason") or reason(row), []).append(str(row["notebook"]))
    return ["", *markdown(("reason", "notebooks"), [
        [why, str(len(found))] for why, found in sorted(names.items(), key=lambda each: -len(each[1]))])]


# One notebook, all of them, and their table


def run(notebook: str, folder: str) -> public.Row:
    """Run the cells in `folder` until one fails; return the steps of each trainer and how far the notebook got."""
    sources = [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    os.chdir(folder)
    if not torch.cuda.is_available():  # a class of another model, made from the small one's config, may be of full size
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for beside in Path(notebook).parent.iterdir():  # files that a shell line would have downloaded
        if beside.is_file() and beside.suffix != ".ipynb":
            shutil.copy(beside, folder)
    changes = NotebookChanges(small_model(Path(folder, "tiny")), torch.cuda.is_available(),
                              public.long_copy("tiny-shapes", Path(folder, "shapes")),
                              small_gpt_oss(Path(folder, "gpt-oss")) if any(map(GPT_OSS.search, sources)) else "")
    changes.own_template = not any("get_chat_template(" in source for source in sources)
    texts = [changes.rewrite(source) for source in sources]
    script = "\n\n".join(f"# %% [{place}]\n{text}" for place, text in enumerate(texts))
    Path("notebook.py").write_text(script, encoding="utf-8")  # shows what was changed
    trainers: dict[int, Any] = {}
    began = time.perf_counter()
    found = public.run_cells(texts, lambda names: trainers.update(
        {id(value): value for value in names.values() if isinstance(value, Trainer)}))
    beside = changes_of([*trainers.values()][-1].model, changes.model, changes.beside) if trainers else {}
    if not all(beside.values()) and not found:
        found = {"error": f"to be trained beside LoRA, and unchanged: {beside}", "raised_in": "lowmem_grpo"}
    row = {"steps": [trainer.state.global_step for trainer in trainers.values()], **found, "cells": len(texts),
           "seconds": round(time.perf_counter() - began, 1), "changes": dict(changes.counts),
           "models": sorted({*changes.models} - {changes.model, changes.of_images, changes.gpt_oss}),
           "asks": next((wish for wish, words in ASKS if any(map(words.search, sources))), ""),
           **({"beside_lora": beside} if beside else {})}
    return row | {"reason": reason(row)}


def changes_of(model: Any, stored: str, names: Collection[str]) -> dict[str, float]:
    """Return the largest change of a value, since the small model was stored, of the embedding and the head in
    `names`."""
    if not names:
        return {}
    base = AutoModelForCausalLM.from_pretrained(stored, trust_remote_code=False)
    parts = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}
    pairs = {name: [getattr(each, parts[name])().weight.detach().cpu() for each in (model, base)] for name in names}
    return {name: float((now.float() - before.to(now.dtype).float()).abs().max())
            for name, (now, before) in sorted(pairs.items())}


def small_model(folder: Path) -> str:
    """Return the path of a copy of the small model with a BOS token, which most of the replaced models have, and tokens
    for <think> and </think>, which take unused rows of its embedding."""
    path = public.long_copy("tiny", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": settings["eos_token"]} | settings))
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_tokens(list(THINKING))
    tokenizer.save_pretrained(path)
    return path


def small_gpt_oss(folder: Path) -> str:
    """Return the path of a small random gpt-oss, with experts in MXFP4 and a token for each byte."""
    from tests.support.gpt_oss import gpt_oss_folder

    return str(gpt_oss_folder(folder, experts=8, max_position_embeddings=POSITIONS, rope_parameters=STRETCHED))


def shown(row: public.Row) -> list[str]:
    """Return a notebook's cells for the table."""
    return public.cells(row, "notebook", " + ".join(map(str, row["steps"])) or "-", str(row.get("cells", "")))


def notebooks_table(rows: list[public.Row]) -> list[str]:
    """Return the section of RESULTS.md with the newest row of each notebook."""
    lines = public.section(
        rows, "notebook", "notebooks with imports, model, dataset and steps",
        "`device`: the CPU in place of a card. `login`: no login to the hub. "
        "`length`: a context four times as long, for a token a byte.", COLUMNS, shown)
    return [*lines[:4], *reasons_table(rows), *lines[4:]]


@click.command(help=__doc__)
@public.options_for("notebooks", "notebooks", 600.0)
def main(folder: Path, only: str, seconds: float, output: Path, as_json: bool) -> None:
    chosen = {path.stem: {"notebook": path.resolve()} for path in sorted(folder.glob("*.ipynb")) if only in path.name}
    if not chosen:
        raise click.UsageError(f"{folder} has no .ipynb file" + (f" with {only!r} in its name" if only else ""))
    public.run_each("notebook", "bench.notebooks:run", chosen, seconds, output, as_json, shown, steps=[])


if __name__ == "__main__":
    main()
