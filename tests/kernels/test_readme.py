"""The kernels' README: its three lines work in a foreign training loop, and its table names every function."""

import re
import runpy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import lowmem_grpo.kernels

README = (Path(lowmem_grpo.kernels.__file__).parent / "README.md").read_text(encoding="utf-8")
TINY = Path(lowmem_grpo.__file__).parent / "assets" / "tiny"


def test_the_three_lines_give_a_foreign_loop_its_log_probabilities_and_gradients(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "lines.py").write_text(lines, encoding="utf-8")
    model, input_ids = AutoModelForCausalLM.from_pretrained(TINY), torch.randint(10, 100, (2, 9))
    weight = model.model.layers[0].mlp.up_proj.weight
    found = runpy.run_path(str(tmp_path / "lines.py"), init_globals={"model": model, "input_ids": input_ids})
    logits = model(input_ids).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, input_ids[:, 1:, None]).flatten()
    torch.testing.assert_close(found["logprobs"], expected, rtol=1e-4, atol=1e-4)
    (theirs,) = torch.autograd.grad(expected.sum(), weight)
    (ours,) = torch.autograd.grad(found["logprobs"].sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_table_names_every_public_function() -> None:
    table = README.partition("| --- |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    public = {name for name in lowmem_grpo.kernels.__all__ if name[0].islower() and not name.endswith("_ref")}
    assert named == public
