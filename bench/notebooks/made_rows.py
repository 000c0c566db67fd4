"""Rows in place of public datasets: the same columns and shapes, made of arithmetic."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from datasets import Dataset, DatasetDict

from lowmem_grpo.recipes.problems.arithmetic import problems

ROWS = 128  # notebooks look at the hundredth, too


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def sharegpt(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
            "source": "made", "score": 5.0}


def thinking(question: str, answer: str) -> dict[str, Any]:
    return {"reasoning_language": "English", "developer": "", "user": question, "analysis": "We calculate.",
            "final": answer, "messages": [{**message, "thinking": ""} for message in messages(question, answer)]}


def alpaca(question: str, answer: str) -> dict[str, Any]:
    return {"instruction": question, "input": "", "output": f"It is {answer}.",
            "text": f"Below is an instruction.\n\n### Instruction:\n{question}\n\n### Response:\nIt is {answer}."}


def solved(question: str, answer: str) -> dict[str, Any]:
    return {"expected_answer": answer, "problem_type": "has_answer_extracted", "problem_source": "made",
            "generation_model": "none", "pass_rate_72b_tir": "0.5", "problem": question, "inference_mode": "cot",
            "generated_solution": f"<think>\nWe calculate.\n</think>\nIt is {answer}."}


def dapo(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": question, "solution": answer, "data_source": "made", "ability": "MATH",
            "source_prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": answer, "style": "rule"}, "extra_info": {"index": "0"}}


def numina(question: str, answer: str) -> dict[str, Any]:
    said = f"It is $\\boxed{{{answer}}}$."
    return {"problem": question, "solution": said, "messages": messages(question, said)}


def tool_call(question: str, answer: str) -> dict[str, Any]:
    tool = {"name": "calculator", "description": "Calculates.", "parameters": {"expression": {"type": "string"}}}
    return {"messages": messages(question, answer), "tools": [tool], "query": question, "answers": answer}


DATASETS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai/gsm8k": lambda question, answer: {"question": question, "answer": f"We calculate.\n#### {answer}"},
    "unsloth/OpenMathReasoning-mini": solved,
    "open-r1/DAPO-Math-17k-Processed": dapo,
    "unsloth/alpaca-cleaned": alpaca,
    "yahma/alpaca-cleaned": alpaca,
    "vicgalle/alpaca-gpt4": alpaca,
    "FreedomIntelligence/alpaca-gpt4-korean": sharegpt,
    "mlabonne/FineTome-100k": sharegpt,
    "philschmid/guanaco-sharegpt-style": sharegpt,
    "Thytu/ChessInstruct": lambda question, answer: {"task": "Calculate.", "input": question, "expected_output": answer,
                                                     "KIND": "MADE"},
    "roneneldan/TinyStories": lambda question, answer: {"text": f"{question} It is {answer}."},
    "wikimedia/wikipedia": lambda question, answer: {"title": question, "text": f"It is {answer}."},
    "mlabonne/smoltldr": lambda question, answer: {"prompt": question, "completion": answer},
    "AI-MO/NuminaMath-TIR": numina,
    "HuggingFaceH4/Multilingual-Thinking": thinking,
}


def load_dataset(name: str, config: str | None = None, *, split: str | None = None, **kwargs: Any) -> Any:
    """As `datasets.load_dataset`, for the names in `DATASETS`; a share such as train[:5%] is not taken."""
    if name not in DATASETS:
        raise LookupError(f"there are no made rows for {name!r}; add its columns to {__name__}.DATASETS")
    made = [DATASETS[name](problem.question, str(problem.answer)) for problem in islice(problems("train", 0), ROWS)]
    data = Dataset.from_list(made)
    return DatasetDict(dict.fromkeys(("train", "validation", "test"), data)) if split is None else data
