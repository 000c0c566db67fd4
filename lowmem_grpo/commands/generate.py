"""`lowmem-grpo generate`: ask a model one question."""

import json
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.views.terminal import plain_errors, quiet

CONTEXT = 2048  # tokens of prompt and answer


@click.command(short_help="Ask a model one question.")
@click.argument("prompt")
@click.option("--model", default="tiny", show_default=True, help="A model on the hub, a folder, or the embedded tiny.")
@click.option("--adapter", type=click.Path(path_type=Path), help="Folder of a saved adapter.")
@click.option("-n", "--samples", default=1, show_default=True, help="Number of answers.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--max-tokens", default=256, show_default=True, help="Longest answer.")
@click.option("--seed", type=int, default=None)
@click.option("--load-in-4bit", is_flag=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each answer.")
def generate(prompt: str, model: str, adapter: Path | None, as_json: bool, load_in_4bit: bool, **sampling: Any) -> None:
    """Answer PROMPT as a chat message, with the base model or with a saved adapter."""
    with plain_errors():
        from lowmem_grpo.commands.asked import check_folder, check_model
        from lowmem_grpo.config.sampling import SamplingParams

        params = SamplingParams(n=sampling.pop("samples"), **sampling)
        check_model(model)
        check_folder(adapter)
    quiet()
    with plain_errors():
        from lowmem_grpo.loader import FastLanguageModel

        loaded: Any = None
        loaded, _ = FastLanguageModel.from_pretrained(model, max_seq_length=CONTEXT, load_in_4bit=load_in_4bit)
        request = None
        if adapter is not None:
            loaded = FastLanguageModel.get_peft_model(loaded, use_gradient_checkpointing=False)
            request = loaded.load_lora(adapter)
        (output,) = loaded.fast_generate([[{"role": "user", "content": prompt}]], params, request)
        for completion in output.outputs:
            record = {"text": completion.text, "tokens": len(completion.token_ids), "finish": completion.finish_reason}
            click.echo(json.dumps(record, ensure_ascii=False) if as_json else completion.text)
