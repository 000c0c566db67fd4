"""`lowmem-grpo export`: exports an adapter, a merged model or a GGUF file from a run."""

import re
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.models.export.gguf import TYPES, find_converter
from lowmem_grpo.runs.files import check_folder
from lowmem_grpo.runs.views.terminal import UserPath, echo, plain_errors, quiet, was_given
from lowmem_grpo.utils import count_text, size_text

DEVICE = re.compile(r"cpu|mps|(cuda|xpu)(:\d+)?")


@click.command(short_help="Export an adapter, a merged model or a GGUF file.")
@click.argument("run", type=UserPath())
@click.option("--format", "kind", type=click.Choice(["adapter", "merged", "merged_4bit", "merged_mxfp4", "gguf"]),
              default="merged", show_default=True,
              help="The files of PEFT, the whole model in 16 bits, in bitsandbytes' 4 bits or with the experts of "
                   "gpt-oss in MXFP4, or a GGUF file (with the extra gguf).")
@click.option("--out", type=UserPath(), required=True, help="Folder for the export.")
@click.option("--base", help="Base model, if the adapter does not name it or it has moved.")
@click.option("--load-in-4bit/--16bit", "load_in_4bit", default=None,
              help="How the base model was held in training, if the adapter does not say.")
@click.option("--fp8", "load_in_fp8", is_flag=True, default=None, help="The same: in FP8, a scale for each row.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]),
              help="Of a merged model.  [default: that of the run, else bfloat16]")
@click.option("--gguf-type", type=click.Choice(TYPES), default="bf16", show_default=True)
@click.option("--llama-cpp", type=UserPath(), help="Folder of a llama.cpp, in place of the extra gguf.")
@click.option("--device", help="Where weights are merged: cpu or cuda:0.  [default: the card, if there is one]")
@click.option("--unfinished", is_flag=True, help="Export the last good checkpoint of a run that never finished.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in the same folder.")
@click.option("--push", "repo", metavar="OWNER/NAME", help="Upload the folder to the Hugging Face hub.")
@click.option("--public", is_flag=True, help="Make a new hub repository public.")
def export(
    run: Path, kind: str, out: Path, unfinished: bool, overwrite: bool, repo: str | None, public: bool, **chosen: Any
) -> None:
    """Export the adapter of RUN, which is the folder of a run, of a checkpoint, or of a saved adapter.

    The files are read back and checked before their folder gets its final name. A model is merged one tensor at a time,
    so this needs no card, and no memory for the whole model."""
    if public and repo is None:
        raise click.UsageError("--public is about the repository of --push OWNER/NAME, which is not given")
    unused: tuple[str, ...] = () if kind == "gguf" else ("gguf_type", "llama_cpp")
    unused += ("dtype", "device", "base", "load_in_4bit", "load_in_fp8") if kind == "adapter" else ()
    for name in filter(was_given, unused):
        option = "fp8" if name == "load_in_fp8" else name.replace("_", "-")
        raise click.UsageError(f"--{option} has no effect on an export with --format {kind}; leave it out")
    with plain_errors():
        check_asked(run, kind, out, unfinished, overwrite, repo, **chosen)
    quiet()
    with plain_errors():
        from lowmem_grpo.models.export.formats import ExportSettings, export

        done = export(run, kind, out, ExportSettings(**chosen), unfinished, overwrite, repo, private=not public)
    for line in summary(done):
        echo(line)


def check_asked(
    run: Path, kind: str, out: Path, unfinished: bool, overwrite: bool, repo: str | None, device: str | None,
    base: str | None, llama_cpp: Path | None, gguf_type: str, load_in_4bit: bool | None, load_in_fp8: bool | None,
    **_: Any,
) -> None:
    """Raise the errors that `export` would raise for these options, before a heavy library is loaded."""
    from lowmem_grpo.cli.options import check_adapter, check_model
    from lowmem_grpo.config.loading import form_of_weights
    from lowmem_grpo.models.card_check import driver_version
    from lowmem_grpo.models.export.folder import check_out
    from lowmem_grpo.models.hub import check_repo
    from lowmem_grpo.runs.saved_adapter import base_of_adapter, find_adapter

    if repo is not None:
        check_repo(repo)
    if device is not None and not DEVICE.fullmatch(device):
        raise ValueError(f"--device is {device!r}; write cpu, or cuda:0 for the first card")
    if device is not None and device.startswith("cuda") and driver_version() is None:
        raise ValueError(f"--device is {device!r}, and there is no driver of a card here; write cpu, or leave it out")
    form_of_weights(load_in_4bit, False, load_in_fp8 or False)  # raises if both are set
    check_adapter(run, unfinished)
    record = base_of_adapter(find_adapter(run, unfinished).folder)
    if kind == "gguf":
        find_converter(llama_cpp, [gguf_type], base or record.model)
    check_model(base)
    check_out(out, overwrite, None)
    check_folder(out, "--out")


def summary(done: Any) -> list[str]:
    """Return the lines on an export: its folder and size, and what was read back and compared."""
    of = f" and {done.base}" if done.base else ""
    lines = [f"{done.format}: {done.folder} ({size_text(done.bytes)}), from the {done.source}{of}"]
    checks = done.checks
    if "tensors_equal" in checks:
        lines.append(f"read back with PEFT: {checks['layers']} layers, all {checks['tensors_equal']} tensors equal")
    if "merged" in checks:
        lines.append(f"read back: {checks['tensors']} tensors within half a unit of {checks['dtype']}, "
                     f"{checks['merged']} of them merged; {checks['update_kept']:.1%} of the update is left")
    if checks.get("trained"):
        lines.append(f"with the adapter's own embedding or head, in {count_text(checks['trained'], 'tensor')}")
    if "logits_difference" in checks:
        lines.append(f"loaded back: logits differ from the adapter's by {checks['logits_difference']:.3g} (root mean "
                     f"square; rounding to {checks['dtype']} explains {checks['logits_rounding']:.3g}), the likeliest "
                     f"token is the same in {checks['logits_same_choice']:.1%} of places")
    elif "merged" in checks:
        lines.append("too large to be loaded twice: its weights were compared, its logits were not")
    if "in_4bit" in checks:
        lines.append(f"in 4 bits (NF4, double quantization): {checks['in_4bit']} linear layers, "
                     "whose values are rounded again")
    if "in_mxfp4" in checks:
        lines.append(f"experts in MXFP4: {checks['in_mxfp4']} matrices, {checks['requantized']} of them quantized "
                     f"again, with an error of {checks['requantized_error']:.2g} times the update")
    if "gguf_tensors" in checks:
        lines.append(f"GGUF read back: {checks['gguf_architecture']}, {checks['gguf_tensors']} tensors")
    return lines + ([f"pushed: {done.address}"] if done.address else [])
