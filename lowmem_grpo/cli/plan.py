"""`lowmem-grpo plan` predicts memory and time of a run without a card; `doctor` checks this machine."""

import json
import logging
import math
import textwrap
from dataclasses import asdict, replace
from typing import Any

import click

from lowmem_grpo.config.teacher import EMA, OF_MODEL, STORED, is_url
from lowmem_grpo.memory.cards import AUTO, CACHE_DTYPES
from lowmem_grpo.memory.layer_forms import FORMS, NF4
from lowmem_grpo.runs.views.terminal import UserPath, columns, echo, plain_errors, was_given
from lowmem_grpo.utils import COUNT, check_given, size_text, up_to

MOST_PROMPTS = 100_000  # the most prompts of a step
SQUARE = 512 * 512  # pixels
CHECKPOINTING: dict[str, bool | str] = {"auto": "auto", "offload": "offload", "true": True, "false": False}


@click.command(short_help="Plan the memory and time of a run, without a card.")
@click.option("--model", required=True, type=UserPath(str), help="A built-in shape, a model on the hub, or a "
              "folder or file with a config.json.")
@click.option("--gpu", required=True, help="A card (t4, 4090, a100-40, ...) or a memory size (16GiB).")
@click.option("--gpus", default=1, show_default=True, type=click.IntRange(min=1), help="Such cards, which share the "
              "prompts of a step; memory and time are of one of them.")
@click.option("--context", default=2048, show_default=True, help="Tokens of the longest sequence.")
@click.option("--generations", "num_generations", default=8, show_default=True, help="Completions for each prompt.")
@click.option("--rank", "lora_rank", default=32, show_default=True, help="Rank of LoRA on all linear layers.")
@click.option("--expert-lora", is_flag=True, help="LoRA of this rank on each expert of a mixture too.")
@click.option("--modules-to-save", help="Trained whole, beside LoRA: embed_tokens, lm_head, or both with a comma.")
@click.option("--trained-rows", default=0, help="Trained rows of embedding and head, beside LoRA.")
@click.option("--gpu-memory-utilization", type=float, help="Share of the card that the run may use.")
@click.option("--load-in-4bit/--16bit", "load_in_4bit", default=True, show_default=True)
@click.option("--fp8", "load_in_fp8", is_flag=True, help="Weights in FP8, as load_in_fp8=True, in place of 4 bits.")
@click.option("--offload-embedding", "host_embedding", is_flag=True, default=None, help="The input embedding is looked "
              "up on the host.  [default: chosen by the plan]")
@click.option("--checkpointing", type=click.Choice(list(CHECKPOINTING)), default="auto", show_default=True,
              help="Gradient checkpointing: layer inputs on the host, but as many layers kept whole as have room; all "
              "on the host; on the card; none.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), help="What samples the completions.  [default: "
              "vllm; transformers on a card below sm_80, and for families that vLLM does not sample, as in a run]")
@click.option("--kv-cache-dtype", type=click.Choice(CACHE_DTYPES), default=AUTO, show_default=True,
              help="Of vLLM's keys and values: the model's dtype, or 8-bit floats.")
@click.option("--max-tokens", type=int, help="Tokens of a training micro-batch.  [default: chosen by the plan]")
@click.option("--mlp-tile", type=int, help="Tokens that an MLP computes at a time.  [default: chosen by the plan]")
@click.option("--optim", help="Optimizer, named as in GRPOConfig.  [default: chosen by the plan]")
@click.option("--prompts", type=int, help="Prompts in each step.  [default: 8]")
@click.option("--prompt-length", type=int, help="Mean tokens of a prompt.  [default: a fifth of the context]")
@click.option("--completion-length", type=int, help="Mean tokens of a completion.  [default: 40% of the longest]")
@click.option("--max-completion-length", type=int, help="Tokens of the longest completion.  [default: what the prompt "
              "leaves of the context]")
@click.option("--images", type=int, help="Images of a prompt, for a model of images.  [default: 1]")
@click.option("--image-pixels", type=int, help="Pixels of an image.  [default: 262144, which is 512 x 512]")
@click.option("--teacher", help="A teacher that compares whole vocabularies: base, ema, live, an adapter's folder "
              "(or the word adapter), or another model, as --model names it.")
@click.option("--max-context", is_flag=True, help="Find the longest context that fits.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, in bytes.")
def plan(
    model: str, gpu: str, gpu_memory_utilization: float | None, checkpointing: str, max_context: bool, as_json: bool,
    prompts: int | None, prompt_length: int | None, completion_length: int | None, max_completion_length: int | None,
    gpus: int, load_in_4bit: bool, load_in_fp8: bool, images: int | None, image_pixels: int | None,
    teacher: str | None, modules_to_save: str | None, **settings: Any,
) -> None:
    """Plan the memory of a run, choose settings that fit the card, and estimate how long a step takes.

    This needs no card and no weights. Prompts times generations is the number of completions in a step: all of them
    are sampled together, and no micro-batch holds more. The lengths only affect the estimate of time."""
    with plain_errors():
        from lowmem_grpo.config.loading import form_of_weights
        from lowmem_grpo.memory import planner
        from lowmem_grpo.memory.cards import MOST_SEQUENCES, device, engine_of
        from lowmem_grpo.memory.families import planned_as
        from lowmem_grpo.memory.plan import PROMPTS, RunSettings, Workload
        from lowmem_grpo.memory.time_plan import plan_time
        from lowmem_grpo.models.stored_model import config_of

        if load_in_fp8 and was_given("load_in_4bit"):
            raise ValueError(f"--fp8 and --{'load-in-4bit' if load_in_4bit else '16bit'} contradict each "
                             "other; give one of them")
        card, config = device(gpu, gpu_memory_utilization), config_of(model)
        shape = planner.shape_on(config, card)
        settings["engine"] = settings["engine"] or (engine_of(card) if shape.family.vllm else "transformers")
        if settings["expert_lora"] and shape.experts is None:
            raise ValueError("--expert-lora: this model has no experts; leave it out")
        settings["image_tokens"] = image_tokens(shape, images, image_pixels)
        settings["modules_to_save"] = tuple(name.strip() for name in (modules_to_save or "").split(",") if name)
        settings["saved_itemsize"] = 4 if engine_of(card) == "transformers" else 2  # float32 beside float16 models
        said = planned_as(config, model, settings["engine"])
        if shape.word == 4:
            said["note"] = (f"on {card.name}, which has no bfloat16, {shape.family.name} is trained and planned with "
                            "dtype=torch.float32, since it overflows in float16")
        form = held_in(form_of_weights(load_in_4bit and not load_in_fp8, False, load_in_fp8), config, model)
        asked = RunSettings(form=form, checkpointing=CHECKPOINTING[checkpointing], **settings)
        check_given({"prompts": prompts}, {"prompts": up_to(MOST_PROMPTS)})
        whole = PROMPTS if prompts is None else prompts
        if whole < gpus:
            raise ValueError(f"a step of {whole} prompts cannot be shared by {gpus} cards, each of which takes whole "
                             "prompts; raise --prompts, or plan fewer --gpus")
        prompts = math.ceil(whole / gpus)
        step = prompts * asked.num_generations
        asked = replace(asked, completions_per_step=step, sequences=min(step, MOST_SEQUENCES),
                        longest_completion=max_completion_length, ranks=gpus)
        longest = planner.max_context(config, asked, card) if max_context else None
        asked = replace(asked, context=longest or asked.context)
        places = step * (max_completion_length or asked.context)
        asked = replace(asked, **({} if teacher is None else teacher_settings(teacher, shape, form, places)))
        memory = planner.plan(config, asked, card, model)
        fitted = memory.settings
        work = Workload.within(fitted.context, prompts, fitted.num_generations, prompt_length, completion_length,
                               max_completion_length)
        time = plan_time(memory, shape, replace(work, forward_only=int(teacher is not None)))
        if as_json:
            extra = {"max_context": longest} if max_context else {}
            click.echo(json.dumps(memory.to_dict() | {"time": asdict(time), "family": said} | extra, indent=2))
        else:
            from lowmem_grpo.runs.views.tables import show

            show(memory, longest, time=time)
            echo("\n".join(f"{name}: {words}" for name, words in said.items()))
    if not memory.fits:
        raise SystemExit(1)


def image_tokens(shape: Any, images: int | None, pixels: int | None) -> int:
    """Return the tokens of a prompt's images, of which a line is printed; ValueError if the model reads text."""
    given = {name: value for name, value in (("--images", images), ("--image-pixels", pixels)) if value is not None}
    check_given(given, dict.fromkeys(given, COUNT))
    if shape.vision is None:
        if given:
            raise ValueError(f"{', '.join(given)}: this model reads text only; leave it out, or plan a model of images")
        return 0
    each = shape.vision.tokens(pixels or SQUARE)
    echo(f"an image of {pixels or SQUARE:,} pixels is {each:,} tokens of a prompt", err=True)
    return (images or 1) * each


def teacher_settings(teacher: str, student: Any, form: str, places: int) -> dict[str, Any]:
    """Return the settings of a plan with a teacher, whose last hidden states are kept at `places` tokens."""
    from lowmem_grpo.memory.model_shape import ModelShape
    from lowmem_grpo.models.stored_model import config_of
    from lowmem_grpo.runs.saved_adapter import adapter_at

    if teacher == STORED or is_url(teacher):
        raise ValueError(f"the teacher {teacher!r} takes no memory here; leave --teacher out")
    if teacher != "adapter" and adapter_at(teacher):
        teacher = "adapter"
    own = None if teacher in (*OF_MODEL, "adapter") else ModelShape.from_config(config_of(teacher))
    return {"keeps_teacher": teacher in (EMA, "adapter"), "teacher_hidden_bytes": 2 * places * (own or student).hidden,
            "teacher_bytes": 0 if own is None else own.weight_bytes(form) + own.table_bytes + own.host_bytes()}


def held_in(form: str, config: Any, model: str) -> str:
    """Return the form of weights asked for, or that in which a checkpoint stores them, of which a line is printed;
    ValueError for an unsupported quantization."""
    if not (config.get("quantization_config") if isinstance(config, dict) else hasattr(config, "quantization_config")):
        return form
    from lowmem_grpo.models.stored_model import stored_form

    stored = stored_form(config, model)
    if stored in (None, form):
        return form
    held = FORMS[stored]
    what = "experts are held" if held.only_experts else "weights are held"
    echo(f"{model} is stored in {held.words.partition(',')[0]}, in which its {what}", err=True)
    return form if held.only_experts and form == NF4 else stored


WIDTH = 100
LABEL = 22  # width of the labels in characters
UNITS = {"total_bytes": "memory", "free_bytes": "free memory", "available_bytes": "memory available",
         "disk_free_bytes": "disk free here", "model_cache_free_bytes": "disk free there", "count": "cards",
         "model_cache": "models are kept in", "capability": "compute capability", "bf16": "bfloat16"}


@click.command(short_help="Check libraries, card, memory and disk.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def doctor(as_json: bool) -> None:
    """Check libraries, card, memory and disk. Say what a run will use, what is missing, and how to get it.

    The exit status is 1 if training is not possible at all, else 0."""
    from lowmem_grpo.trainer.preflight.doctor import examine

    logging.disable(logging.WARNING)  # hides warnings of imported libraries: the report says what is wrong
    try:
        checkup = examine()
    finally:
        logging.disable(logging.NOTSET)
    echo(json.dumps(checkup.to_dict(), indent=2) if as_json else "\n".join(report(checkup)))
    if not checkup.can_train:
        raise SystemExit(1)


def report(checkup: Any) -> list[str]:
    """Return the checkup as lines of plain text, since the library that draws tables may be broken."""
    card = checkup.card if checkup.card.get("name") else {"name": "none", "driver": checkup.card.get("driver") or None}
    lines = section("Versions", checkup.versions) + section("Card", known(card))
    lines += section("Host", known(checkup.host)) + section("A run will use", checkup.used)
    lines.append("Missing, or worth a change")
    for line in checkup.advice or ["nothing"]:
        lines += textwrap.wrap(line, columns(WIDTH), initial_indent="  - ", subsequent_indent="    ")
    return [*lines, "", "Training is possible here." if checkup.can_train else "Training is NOT possible here."]


def known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def section(title: str, facts: dict[str, Any]) -> list[str]:
    lines = [title]
    for name, value in facts.items():
        start = f"  {UNITS.get(name, name):<{LABEL}}"
        words = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        text = size_text(value) if name.endswith("_bytes") else words
        lines += textwrap.wrap(text, columns(WIDTH) - len(start), initial_indent=start,
                               subsequent_indent=" " * len(start), break_on_hyphens=False) or [start.rstrip()]
    return [*lines, ""]
