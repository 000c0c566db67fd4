"""`lowmem-grpo generate`: ask a model one question, or watch it play an episode of a recipe."""

import json
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import click

from lowmem_grpo.runs.views.terminal import UserPath, plain_errors, quiet
from lowmem_grpo.utils import visible

MAX_TOKENS = 256


@click.command(short_help="Ask a model one question, or watch it play.")
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option("--recipe", help="Play an episode of a recipe, or of your own ./FILE.py, instead of answering PROMPT.")
@click.option("--you", type=click.Choice(["beside", "against"]),
              help="With --recipe: play the same task before the model does, or play against it.")
@click.option("--model", type=UserPath(str), help="A model on the hub, a folder, or the embedded "
              "tiny.  [default: that of the adapter or of the recipe, else tiny]")
@click.option("--adapter", type=UserPath(), help="Folder of a saved adapter, a run or a checkpoint.")
@click.option("-n", "--samples", default=1, show_default=True, help="Number of answers.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--max-tokens", type=int, help="Longest answer, or longest episode.  [default: "
              f"{MAX_TOKENS}, or that of the recipe]")
@click.option("--seed", type=int, help="[default: with --recipe that of the adapter's run, or 0; else, and with --you, "
              "another each time]")
@click.option("--load-in-4bit", is_flag=True, help="Hold the base model in 4 bits.")
@click.option("--fp8", "load_in_fp8", is_flag=True, help="Hold the base model in 8-bit floats.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each answer or episode.")
def generate(
    words: tuple[str, ...], recipe: str | None, you: str | None, model: str | None, adapter: Path | None, as_json: bool,
    load_in_4bit: bool, load_in_fp8: bool, **sampling: Any,
) -> None:
    """Answer PROMPT as a chat message, with the base model or with a saved adapter.

    With --recipe, the model plays an episode, which is shown turn by turn. The task is as in the adapter's run; in
    place of PROMPT, KEY=VALUE gives other options of the recipe."""
    check_asked(words, recipe, you, sampling["samples"], as_json)
    with plain_errors():
        from lowmem_grpo.cli.options import check_adapter, check_exam, check_model, check_words
        from lowmem_grpo.config.loading import form_of_weights
        from lowmem_grpo.config.sampling import SamplingParams

        longest = sampling.pop("max_tokens")
        params = SamplingParams(n=sampling.pop("samples"), max_tokens=MAX_TOKENS if longest is None else longest,
                                **sampling)
        if recipe is not None:
            check_exam(recipe, plays=True)
            check_words(recipe, words)
        check_model(model)
        check_adapter(adapter)
        form = {"load_in_4bit": load_in_4bit, "load_in_fp8": load_in_fp8}
        form_of_weights(load_in_16bit=False, **form)  # raises if both are set
    quiet()
    with plain_errors():
        if recipe is not None:
            from lowmem_grpo.cli.playing import play

            play(recipe, you, model, adapter, form, params, longest, as_json, words)
        else:
            answer(words[0], model, adapter, form, params, as_json)


def check_asked(words: tuple[str, ...], recipe: str | None, you: str | None, samples: int, as_json: bool) -> None:
    """Raise click.UsageError for options that contradict each other."""
    if any("=" not in word for word in words) if recipe is not None else not "".join(words).strip():
        raise click.UsageError("give a PROMPT to answer, or --recipe NAME to play an episode" +
                               ("; not both" if recipe is not None else ""))
    if recipe is None and words[1:]:
        raise click.UsageError(f"PROMPT is one text: write {quote(' '.join(words))}")
    if you and recipe is None:
        raise click.UsageError("--you is for --recipe NAME, whose task is played")
    if you and as_json:
        raise click.UsageError("--json prints no questions, and with --you you are asked; leave one of them out")
    if recipe is not None and samples != 1:
        raise click.UsageError(f"--samples {samples} is for a PROMPT; of a recipe one episode is played. Many: "
                               f"lowmem-grpo eval MODEL --recipe {quote(recipe)} --samples {samples}")


def answer(
    prompt: str, model: str | None, adapter: Path | None, form: dict[str, bool], params: Any, as_json: bool
) -> None:
    """Print the answers to a prompt: as they are sampled, or one JSON object each."""
    from lowmem_grpo.cli.playing import CONTEXT, adapter_and_base, load

    folder, base = adapter_and_base(adapter)
    loaded, request = load(model or base or "tiny", folder, CONTEXT, **form)
    messages = [[{"role": "user", "content": prompt}]]
    if as_json:
        (output,) = loaded.fast_generate(messages, params, request)
        for completion in output.outputs:
            click.echo(json.dumps({"text": completion.text, "tokens": len(completion.token_ids),
                                   "finish": completion.finish_reason}))
    else:
        loaded.stream_text(messages, params, request, say)


def say(text: str) -> None:
    """Print a part of an answer; a file gets what was sampled."""
    click.echo(visible(text) if sys.stdout.isatty() else text, nl=False)
