"""The kernels' README: its three lines work in a foreign training loop, its table names what there is."""

import re
import subprocess
import sys
from pathlib import Path

import lowmem_grpo.kernels

README = (Path(lowmem_grpo.kernels.__file__).parent / "README.md").read_text(encoding="utf-8")
BEFORE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
input_ids = torch.randint(10, 100, (2, 9))
"""
AFTER = """
logits = model(input_ids).logits[:, :-1].log_softmax(-1)
expected = logits.gather(-1, input_ids[:, 1:, None]).flatten()
torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
expected.sum().backward(inputs=[model.model.layers[0].mlp.up_proj.weight], retain_graph=True)
theirs = model.model.layers[0].mlp.up_proj.weight.grad.clone()
model.zero_grad()
logprobs.sum().backward(inputs=[model.model.layers[0].mlp.up_proj.weight])
torch.testing.assert_close(model.model.layers[0].mlp.up_proj.weight.grad, theirs, rtol=1e-3, atol=1e-4)
print("same")
"""


def test_the_three_lines_give_a_foreign_loop_its_log_probabilities_and_gradients() -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tiny = Path(lowmem_grpo.__file__).parent / "assets" / "tiny"
    done = subprocess.run([sys.executable, "-c", BEFORE + lines + AFTER, str(tiny)], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


def test_the_table_names_every_public_function() -> None:
    table = README.partition("| --- |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    public = {name for name in lowmem_grpo.kernels.__all__ if name[0].islower() and not name.endswith("_ref")}
    assert named == public
