"""`lowmem-grpo eval`: measures the accuracy of a model, and how an adapter changes it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.runs.views.terminal import UserPath, echo, plain_errors, quiet, was_given
from lowmem_grpo.utils import is_gguf

FILE = "eval.json"
MAX_TOKENS, CONTEXT, PROMPT_ROOM = 512, 2048, 1024


@dataclass(frozen=True)
class Candidate:
    """A model to test: a base model, with or without an adapter."""

    model: str
    adapter: Path | None
    load_in_4bit: bool
    out: Path  # the default of --out
    note: str = ""
    revision: str | None = None  # the base model's, on the hub
    load_in_fp8: bool | str = False  # as in training

    def load(self, engine: str, context: int) -> tuple[Any, Any]:
        """Load and return the model, and the LoRA request for its adapter (None without one)."""
        from torch import cuda

        from lowmem_grpo.cli.playing import load

        chosen = engine if engine != "auto" else cuda.is_available() or "transformers"
        return load(self.model, self.adapter, context, load_in_4bit=self.load_in_4bit, load_in_fp8=self.load_in_fp8,
                    revision=self.revision, fast_inference=chosen)


@click.command(name="eval", short_help="Measure how often a model or an adapter is right.")
@click.argument("target", type=UserPath(str))
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--adapter", type=UserPath(),
              help="Folder of a run, a checkpoint or a saved adapter, if TARGET is a model.")
@click.option("--recipe", help="Use the held-out problems of a recipe or of your own ./FILE.py, and what it counts "
              "as right.  [default: that of the run]")
@click.option("--dataset", type=UserPath(str),
              help="A jsonl, json, csv or parquet file, or a dataset on the hub.")
@click.option("--split", default="test", show_default=True, help="Split of a hub dataset.")
@click.option("--prompt-column", default="prompt", show_default=True)
@click.option("--reward", "rewards", multiple=True, metavar="NAME",
              help="A function of lowmem_grpo.rewards, or FILE.py:FUNCTION. The first decides what is right (above 0); "
              "the mean of each further one is reported.")
@click.option("--samples", "-n", default=1, show_default=True, help="Number of answers to each prompt.")
@click.option("--limit", type=click.IntRange(1),
              help="Most prompts.  [default: the run's or the recipe's number, or the whole dataset]")
@click.option("--k", "ks", multiple=True, type=click.IntRange(1),
              help="k of pass@k; may be given several times.  [default: 1, 2, 4 ... up to --samples]")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1),
              help=f"Longest answer.  [default: as in training, the recipe's, or {MAX_TOKENS}]")
@click.option("--max-seq-length", type=click.IntRange(1), help="Longest prompt and answer together.  [default: "
              f"{CONTEXT}, or {PROMPT_ROOM} more than the longest answer]")
@click.option("--seed", type=int, help="[default: that of the run, or 0]")
@click.option("--load-in-4bit/--16bit", "load_in_4bit", default=None,
              help="How the base model is held.  [default: as in training, else 16 bit]")
@click.option("--fp8", "load_in_fp8", is_flag=True, help="The same: in FP8, a scale for each row.")
@click.option("--engine", type=click.Choice(["auto", "transformers", "vllm"]), default="auto", show_default=True)
@click.option("--show", type=click.IntRange(0), default=3, show_default=True,
              help="Number of prompts whose answers are shown.")
@click.option("--out", type=UserPath(),
              help=f"Folder for {FILE}.  [default: that of the run or adapter]")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def evaluate(target: str, as_json: bool, show: int, out: Path | None, **chosen: Any) -> None:
    """Test TARGET on prompts with known answers. TARGET is a model (hub name or folder), a run, a checkpoint or an
    adapter.

    With an adapter, the base model and the adapter answer the same prompts. All answers are written to eval.json. A run
    is tested on the problems of its own recipe, with the options with which it was started; KEY=VALUE, as in
    `lowmem-grpo run`, gives other options of the recipe."""
    with plain_errors():
        from lowmem_grpo.cli.options import check_model
        from lowmem_grpo.recipes.recipe_file import unknown_recipe

        if is_gguf(target) or not Path(target).is_dir():
            check_model(target)
        if chosen["recipe"] is not None and (problem := unknown_recipe(chosen["recipe"])):
            raise ValueError(problem)
        chosen["recipe"] = chosen["recipe"] or (None if chosen["dataset"] else recipe_of(chosen["adapter"] or target))
    check_source(chosen)
    with plain_errors():
        from lowmem_grpo.cli.options import check_adapter, check_data, check_exam, check_rows, check_words
        from lowmem_grpo.config.loading import form_of_weights
        from lowmem_grpo.config.sampling import SamplingParams
        from lowmem_grpo.data.files import check_prompt_column, columns_of, is_file_name
        from lowmem_grpo.models.stored_model import check_stored, resolve
        from lowmem_grpo.recipes.recipe_file import refuse_unknown
        from lowmem_grpo.runs.files import check_folder

        SamplingParams(n=chosen["samples"], temperature=chosen["temperature"], seed=chosen["seed"])  # raises if invalid
        if chosen["recipe"]:
            check_exam(chosen["recipe"], chosen["dataset"])
            check_words(chosen["recipe"], chosen["options"])
        for name in chosen["rewards"]:
            refuse_unknown(name)
        form_of_weights(chosen["load_in_4bit"], False, chosen["load_in_fp8"])  # raises if both are set
        if not chosen["recipe"]:
            check_data(chosen["dataset"])
            if is_file_name(chosen["dataset"]):
                columns = columns_of(Path(chosen["dataset"]))
                check_prompt_column(chosen["dataset"], columns, chosen["prompt_column"])
        subject = find_subject(target, chosen["adapter"], chosen["load_in_4bit"], chosen["load_in_fp8"])
        check_adapter(subject.adapter)
        check_stored(resolve(subject.model), subject.model, None, chosen["max_seq_length"], vision=True)
        if chosen["recipe"]:
            check_rows(chosen["recipe"], chosen["dataset"], chosen["options"],
                       summary_of(subject) if subject.adapter else {})
        folder = out or subject.out
        check_folder(folder, "--out")
        place = folder.absolute()  # what is evaluated may change the working directory
    quiet()
    with plain_errors():
        result = run(subject, chosen)
        from lowmem_grpo.runs.records import finite, replace_text

        replace_text(place / FILE, json.dumps(finite(result), indent=1, ensure_ascii=False) + "\n")
        numbers = {name: value for name, value in result.items() if name != "rows"}
        if as_json:
            click.echo(json.dumps(finite(numbers | {"file": str(folder / FILE)}), indent=2))
        else:
            from lowmem_grpo.runs.views.tables import show_result

            show_result(result, subject.note, show)
            echo(f"all answers: {folder / FILE}")


def check_source(chosen: dict[str, Any]) -> None:
    """Raise click.UsageError unless the options name the problems and the function that judges answers."""
    if not chosen["recipe"] and not chosen["dataset"]:
        raise click.UsageError("name the problems: --recipe NAME, or --dataset FILE with --reward NAME")
    if not chosen["recipe"] and not chosen["rewards"]:
        raise click.UsageError("--dataset needs --reward NAME: the function that says what a right answer is")
    if chosen["options"] and not chosen["recipe"]:
        raise click.UsageError(f"{chosen['options'][0]} is for the problems of a recipe: give --recipe NAME with it")
    for name in ("split", "prompt_column"):
        if chosen["recipe"] and was_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect beside --recipe, which reads splits and "
                                   "columns in its own way; leave it out, or write --dataset FILE --reward NAME "
                                   "without --recipe")
    if too_large := [k for k in chosen["ks"] if k > chosen["samples"]]:
        raise click.UsageError(f"--k {too_large[0]} needs at least as many answers: --samples {too_large[0]}")


def recipe_of(place: str | Path) -> str | None:
    """Return the recipe of the package that trained the run, checkpoint or adapter in a folder; None if there is none.
    click.UsageError for a recipe file, which is not run unasked."""
    from lowmem_grpo.runs.saved_adapter import read_summary

    folder = Path(place).absolute()
    name = (read_summary(folder) or read_summary(folder.parent)).get("recipe")
    if isinstance(name, str) and name not in RECIPES:
        raise click.UsageError(f"{place} was trained with the recipe {name} of your own: name its file, such as "
                               f"--recipe ./{name}.py")
    return name if isinstance(name, str) else None


def find_subject(target: str, adapter: Path | None, load_in_4bit: bool | None, load_in_fp8: bool = False) -> Candidate:
    """Return model and adapter of TARGET and --adapter; quantization and revision are by default as in training."""
    from lowmem_grpo.runs.saved_adapter import RunError, base_of_adapter, find_adapter

    path = Path(target)
    named = adapter is not None or not path.exists() or (path / "config.json").is_file() or is_gguf(target)
    if named and adapter is None:
        place = Path("runs") / f"eval-{target.strip('/').rpartition('/')[2]}"
        return Candidate(target, None, bool(load_in_4bit), place, load_in_fp8=load_in_fp8)
    place = path if adapter is None else adapter
    saved = find_adapter(place, unfinished=True)
    record = base_of_adapter(saved.folder)
    model = target if named else record.model
    if model is None:
        raise RunError(f"{path} does not say which model it was trained on; write eval MODEL --adapter {path}")
    in_fp8: bool | str = load_in_fp8
    if load_in_4bit is None and not load_in_fp8:
        load_in_4bit, in_fp8 = record.load_in_4bit, record.load_in_fp8 or False
    revision = record.revision if record.model == model else None
    return Candidate(model, saved.folder, bool(load_in_4bit), place, saved.note, revision, in_fp8)


def run(subject: Candidate, chosen: dict[str, Any]) -> dict[str, Any]:
    """Let the model, and its adapter if there is one, answer the problems; return what eval.json holds."""
    from lowmem_grpo.config.sampling import SamplingParams
    from lowmem_grpo.rollout.assessment import answer
    from lowmem_grpo.runs.accuracy import answered_rows, compared, described, powers_of_two

    chosen = chosen | {"seed": seed_of(subject, chosen)}
    rows, functions, max_tokens, play = problems(subject, chosen)
    params = SamplingParams(n=chosen["samples"], temperature=chosen["temperature"], max_tokens=max_tokens,
                            seed=chosen["seed"])
    context = chosen["max_seq_length"] or max(CONTEXT, max_tokens + PROMPT_ROOM)
    model, request = subject.load(chosen["engine"], context)
    measure = answer if play is None else play.answers
    measured = {"base": measure(model, rows, functions, params)}
    if request is not None:
        measured["adapter"] = measure(model, rows, functions, params, request)
    ks = sorted(set(chosen["ks"])) or powers_of_two(params.n)
    return {
        "model": subject.model, "revision": subject.revision,
        "adapter_folder": None if subject.adapter is None else str(subject.adapter),
        "load_in_4bit": subject.load_in_4bit, "load_in_fp8": subject.load_in_fp8,
        "dtype": str(model.inner.dtype).removeprefix("torch."),
        "recipe": chosen["recipe"], "options": list(chosen["options"]), "dataset": chosen["dataset"],
        "prompts": len(rows), "samples": params.n, "temperature": params.temperature, "max_tokens": max_tokens,
        "seed": params.seed, **{name: described(answers, ks) for name, answers in measured.items()},
        **({"difference": compared(measured["base"], measured["adapter"])} if len(measured) > 1 else {}),
        "rows": answered_rows(rows, measured),
    }


def summary_of(subject: Candidate) -> dict[str, Any]:
    """Return summary.json of the run that saved the adapter; empty without one."""
    from lowmem_grpo.runs.saved_adapter import read_summary

    return {} if subject.adapter is None else read_summary(subject.adapter.absolute().parent)


def seed_of(subject: Candidate, chosen: dict[str, Any]) -> int:
    """Return the seed that was asked for, or with which a run of this recipe was started; else 0."""
    from lowmem_grpo.recipes.eval_task import recorded_by, seed_in

    if chosen["seed"] is not None or not chosen["recipe"]:
        return chosen["seed"] or 0
    return seed_in(recorded_by(subject.adapter, chosen["recipe"]))


def tokens_of_run(subject: Candidate) -> int | None:
    """Return max_completion_length of the run that saved the adapter, and print it; None if unknown."""
    config = summary_of(subject).get("config")
    longest = config.get("max_completion_length") if isinstance(config, dict) else None
    if not isinstance(longest, int):
        return None
    echo(f"answers of up to {longest} tokens, as the run was trained; --max-tokens changes it", err=True)
    return longest


def problems(subject: Candidate, chosen: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any], int, Any]:
    """Return rows, reward functions (the first decides which answers are right), the most tokens of an answer, and the
    recipe's `Play` (None without episodes)."""
    from lowmem_grpo.recipes.recipe_file import find_function
    from lowmem_grpo.rollout.assessment import rows_of

    functions = [find_function(name) for name in chosen["rewards"]]
    if not chosen["recipe"]:
        from lowmem_grpo.data.files import read_dataset

        dataset = read_dataset(chosen["dataset"], chosen["split"], chosen["prompt_column"])
        rows = rows_of(dataset, chosen["limit"])
        return rows, functions, chosen["max_tokens"] or tokens_of_run(subject) or MAX_TOKENS, None
    from lowmem_grpo.cli.options import OWN_PROBLEMS
    from lowmem_grpo.recipes.eval_task import exam_as_trained, recorded_by

    trained = recorded_by(subject.adapter, chosen["recipe"])
    exam, said = exam_as_trained(chosen["recipe"], subject.model, trained, chosen["options"])
    if chosen["dataset"] and not exam.takes_source:
        raise ValueError(OWN_PROBLEMS.format(chosen["recipe"]))
    size = chosen["limit"] or exam.size
    if trained:
        said = f"{f' with {said}' if said else ''}, seed {chosen['seed']}"
        echo(f"problems as in the run{said}; KEY=VALUE, --limit and --seed change them", err=True)
    rows = rows_of(exam.problems_of(subject.model)(size, chosen["seed"], chosen["dataset"]), size)
    longest = chosen["max_tokens"] or tokens_of_run(subject) or exam.max_tokens_of(subject.model)
    return rows, [exam.right, *functions], longest, exam.play
