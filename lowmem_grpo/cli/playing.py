"""Loading of models for `lowmem-grpo eval` and `generate`, and episodes on the terminal, in which a person may play."""

import json
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.cli.options import NO_EPISODES
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.loader import FastVisionModel
from lowmem_grpo.models.new_tokens import fit_vocabulary
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.recipes.eval_task import exam_as_trained, recorded_by, seed_in
from lowmem_grpo.recipes.presets import choose
from lowmem_grpo.recipes.recipe_file import find_recipe
from lowmem_grpo.runs.adapter_file import layers_of, read_all
from lowmem_grpo.runs.saved_adapter import base_of_adapter, find_adapter
from lowmem_grpo.runs.trajectory import ENDINGS, turn_records
from lowmem_grpo.runs.views.terminal import echo
from lowmem_grpo.trainer.play import Play
from lowmem_grpo.types import Rollout
from lowmem_grpo.utils import visible

CONTEXT = 2048  # tokens of prompt and answer
PATIENT = {"environment_timeout": 24 * 3600.0, "episode_timeout": 24 * 3600.0}  # seconds; leave time to think
COLOURS = {"model": "cyan", "you": "green"}


def adapter_and_base(adapter: Path | None) -> tuple[Path | None, str | None]:
    """Return the folder of the adapter in a run, checkpoint or adapter folder, and the name of its base model."""
    folder = None if adapter is None else find_adapter(adapter, unfinished=True).folder
    return folder, None if folder is None else base_of_adapter(folder).model


def load(model: str, adapter: Path | None, context: int, **options: Any) -> tuple[Any, Any]:
    """Load and return the model, and the LoRA request for its adapter (None without an adapter). `options` are those of
    FastVisionModel.from_pretrained, which loads models of text too."""
    saved, tokenizer = (None, None) if adapter is None else (read_all(adapter)[:2], tokenizer_beside(adapter))
    bare, _ = FastVisionModel.from_pretrained(model, max_seq_length=context, **options)
    if adapter is None or saved is None:
        return bare, None
    fit_vocabulary(bare, adapter, *saved)
    modules = sorted({name.rpartition(".")[2] for name in layers_of(saved[1])})
    wrapped = FastVisionModel.get_peft_model(bare, target_modules=modules, use_gradient_checkpointing=False)
    wrapped.take_up(adapter, tokenizer)
    return wrapped, wrapped.load_lora(adapter)


def play(
    recipe: str, you: str | None, model: str | None, adapter: Path | None, form: dict[str, bool],
    params: SamplingParams, longest: int | None, as_json: bool, words: Sequence[str] = (),
) -> None:
    """Play one episode of a held-out task, as in the adapter's run or with other options of the recipe (`words`).
    `longest` limits the episode's tokens (None: the recipe's limit)."""
    folder, base = adapter_and_base(adapter)
    presets = getattr(find_recipe(recipe), "PRESETS", None)
    name = model or base or (choose("auto", presets)[1].model if presets else "tiny")
    run = recorded_by(folder, recipe)
    exam, said = exam_as_trained(recipe, name, run, words)
    played = exam.play
    if played is None:
        raise ValueError(NO_EPISODES.format(recipe))
    if you == "against":
        played = against(played, recipe)
    if said:
        echo(f"the task is as in the run: {said}; KEY=VALUE gives others", err=True)
    usual = seed_in(run) if you is None else random.getrandbits(30)  # a person plays what they do not know
    seed = usual if params.seed is None else params.seed
    params = replace(params, max_tokens=longest or exam.max_tokens_of(name), seed=seed)
    (row,) = exam.problems_of(name)(1, seed, None)
    loaded, request = load(name, folder, max(CONTEXT, 2 * params.max_tokens), **form)
    tell = (lambda who, text: None) if as_json else say
    if you == "beside":
        click.echo("you play first; a call of a tool is written as name(key=value)")
        mine = played.episode(loaded, row, exam.right, params, tell, None, ask, PATIENT)
        click.echo(ended("you", *mine) + "\n\nnow the model, with the same task")
    rollout, right = played.episode(loaded, row, exam.right, params, tell, request, None, PATIENT if you else {})
    if as_json:
        click.echo(json.dumps({"right": right, "ending": rollout.ending, "seed": seed,
                               "turns": turn_records(rollout)}))
    else:
        for reply in rollout.turns[-1].replies if rollout.turns else ():
            say(str(reply.get("role")), str(reply.get("content", "")))
        click.echo(ended("the model", rollout, right) + f" (--seed {seed} plays the same task again, "
                   "another seed another one)")


def against(played: Play, recipe: str) -> Play:
    """Return `played` with a person as the opponent; ValueError if its environment has no attribute `opponent`."""
    factory = played.environment
    if not callable(factory) or not hasattr(factory(), "opponent"):
        raise ValueError(f"in {recipe!r} nobody plays against the model: its environment has no attribute `opponent` "
                         "(a function of what the opponent sees, which returns a reply). Use --you beside")

    def seated() -> Any:
        environment = factory()
        environment.opponent = answer_to
        return environment

    return replace(played, environment=seated)


def answer_to(told: str) -> str:
    say("environment", told)
    return ask()


def ask() -> str:
    """Read a line from the terminal. The end of the input stops the command, even in an environment's thread."""
    try:
        return input(click.style("you> ", fg=COLOURS["you"], bold=True))
    except EOFError:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt from None
        signal.raise_signal(signal.SIGINT)
        raise


def say(who: str, text: str) -> None:
    click.echo(click.style(f"{who}: ", fg=COLOURS.get(who, "yellow"), bold=True) + visible(text))


def ended(who: str, rollout: Rollout, right: bool | None) -> str:
    paid = sum(turn.reward or 0.0 for turn in rollout.turns)
    verdict = {True: "solved it", False: "did not solve it", None: "was not judged"}[right]
    turns = f"{len(rollout.turns)} turn{'' if len(rollout.turns) == 1 else 's'}"
    return f"{who} {verdict}: {turns}, reward {paid:g}; the end: {ENDINGS.get(rollout.ending, rollout.ending)}"
