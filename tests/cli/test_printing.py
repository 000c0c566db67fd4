"""Answers are printed while they are sampled, and are those of `fast_generate`."""

from typing import Any

import pytest

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.cli.printing import print_answers
from lowmem_grpo.config.sampling import SamplingParams

CHAT = [[{"role": "user", "content": "Start with 17. Add 8. Subtract 13. What is the result?"}]]


@pytest.fixture(scope="module")
def model() -> Any:
    return FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, max_seq_length=512)[0]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"n": 3, "temperature": 1.3}, {"stop": ["Answer", "="]}])
def test_the_parts_are_the_answers_in_their_order_and_come_before_the_end(model: Any, options: Any) -> None:
    params, said = SamplingParams(max_tokens=40, seed=3, **options), list[str]()
    print_answers(model, CHAT, params, None, said.append)
    (output,) = model.fast_generate(CHAT, params)
    assert "".join(said) == "".join(f"{completion.text}\n" for completion in output.outputs)
    assert len(said) > 5 or "stop" in options
