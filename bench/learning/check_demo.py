"""Check the files and the accuracy of finished runs of the embedded model (`arithmetic` or `proximity`), with plain
transformers and peft instead of our own code.

    python -m bench.learning.check_demo runs/arithmetic [RUN ...]
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.recipes.arithmetic import correct_answer, make_dataset

FILES = ("summary.json", "metrics.jsonl", "completions.jsonl", "report.html", "adapter/adapter_model.safetensors")
SUMMARY = ("accuracy_before", "accuracy_after", "train_seconds", "steps", "seed")
LIMITS = {"arithmetic": (0.45, 0.90), "proximity": (0.55, 0.80)}  # highest accuracy before, lowest after
NOISE = 0.05  # allowed between accuracies over 256 sampled problems or more: above two standard errors


def plain_accuracy(run: Path, seed: int, problems: int) -> float:
    """Return the share of held-out problems that are right at temperature 1, sampled by `model.generate`."""
    folder = resolve("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    base = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    model = PeftModel.from_pretrained(base, run / "adapter").eval()
    test = make_dataset("test", problems, seed)
    prompts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in test["prompt"]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = correct_answer(texts, list(test["answer"]))
    return sum(right) / len(right)


def main() -> None:
    assert sys.argv[1:], __doc__
    for run in sys.argv[1:]:
        check(Path(run))


def check(run: Path) -> None:
    missing = [name for name in FILES if not (run / name).is_file()]
    assert not missing, f"{run} lacks {missing}"
    summary = json.loads((run / "summary.json").read_text())
    assert not [name for name in SUMMARY if summary.get(name) is None], summary
    most, least = LIMITS[summary["recipe"]]
    assert summary["accuracy_before"] <= most, summary["accuracy_before"]
    assert summary["accuracy_after"] >= least, summary["accuracy_after"]
    assert summary.get("taught_format_after", 1.0) >= 0.9, summary
    plain = plain_accuracy(run, summary["seed"], summary["eval_problems"])
    assert abs(plain - summary["accuracy_after"]) <= NOISE, (plain, summary["accuracy_after"])
    print(
        f"accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%} in "
        f"{summary['train_seconds']:.0f} s; by plain transformers and peft {plain:.1%}"
    )


if __name__ == "__main__":
    main()
