"""Rows in place of public datasets for `bench.notebooks`: the same columns and shapes, made of arithmetic."""

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset, DatasetDict
from PIL import Image

from bench.common import public_code as public
from lowmem_grpo.recipes.tasks.arithmetic import problems

ROWS = 256  # some notebooks show the hundredth row that they keep
MORE = {"HuggingFaceH4/ultrafeedback_binarized": 2048}  # rows where a notebook keeps one of 200, and shows the ninth


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def sharegpt(question: str, answer: str) -> public.Row:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
            "source": "made", "score": 5.0}


def alpaca(question: str, answer: str) -> public.Row:
    return {"instruction": question, "input": "", "output": f"It is {answer}.",
            "text": f"Below is an instruction.\n\n### Instruction:\n{question}\n\n### Response:\nIt is {answer}."}


def picture() -> Image.Image:
    return Image.new("RGB", (32, 32), "white")


def asked(question: str) -> public.Row:
    """Return a question about an image."""
    return {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": question}]}


def told(answer: str) -> public.Row:
    return {"role": "assistant", "content": [{"type": "text", "text": answer}]}


TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
DATASETS: dict[str, Callable[[str, str], public.Row]] = {
    "openai/gsm8k": lambda question, answer: {"question": question, "answer": f"We calculate.\n#### {answer}"},
    "unsloth/OpenMathReasoning-mini": lambda question, answer: {
        "expected_answer": answer, "problem_type": "has_answer_extracted", "problem_source": "made",
        "generation_model": "none", "pass_rate_72b_tir": "0.5", "problem": question, "inference_mode": "cot",
        "generated_solution": f"<think>\nWe calculate.\n</think>\nIt is {answer}."},
    "open-r1/DAPO-Math-17k-Processed": lambda question, answer: {
        "prompt": question, "solution": answer, "data_source": "made", "ability": "MATH",
        "source_prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": answer, "style": "rule"}, "extra_info": {"index": "0"}},
    **dict.fromkeys(("unsloth/alpaca-cleaned", "yahma/alpaca-cleaned", "vicgalle/alpaca-gpt4"), alpaca),
    **dict.fromkeys(("FreedomIntelligence/alpaca-gpt4-korean", "mlabonne/FineTome-100k",
                     "philschmid/guanaco-sharegpt-style"), sharegpt),
    "Thytu/ChessInstruct": lambda question, answer: {"task": "Calculate.", "input": question, "expected_output": answer,
                                                     "KIND": "MADE"},
    "bebechien/SimpleToolCalling": lambda question, answer: {
        "user_content": question, "tool_name": "search_google", "tool_arguments": f'{{"query": "{answer}"}}'},
    "roneneldan/TinyStories": lambda question, answer: {"text": f"{question} It is {answer}."},
    "wikimedia/wikipedia": lambda question, answer: {"title": question, "text": f"It is {answer}."},
    "mlabonne/smoltldr": lambda question, answer: {"prompt": question, "completion": answer},
    "AI-MO/NuminaMath-TIR": lambda question, answer: {
        "problem": question, "solution": f"It is $\\boxed{{{answer}}}$.",
        "messages": messages(question, f"It is $\\boxed{{{answer}}}$.")},
    "HuggingFaceH4/Multilingual-Thinking": lambda question, answer: {
        "reasoning_language": "English", "developer": "", "user": question, "analysis": "We calculate.",
        "final": answer, "messages": [{**message, "thinking": ""} for message in messages(question, answer)]},
    "open-r1/codeforces-cots": lambda question, answer: {
        "problem": question, "generation": answer, "messages": messages(question, answer)},
    "agentica-org/DeepScaleR-Preview-Dataset": lambda question, answer: {
        "problem": question, "answer": answer, "solution": f"It is {answer}."},
    "LLM360/TxT360-3efforts": lambda question, answer: {"messages": json.dumps([
        {"role": "system", "content": "", "tools": [TOOL]}, {"role": "user", "content": question},
        {"role": "assistant", "content": answer, "think": "We calculate."}])},
    "google/mobile-actions": lambda question, answer: {
        "metadata": "train", "tools": [TOOL], "messages": messages(question, answer)},
    "Salesforce/xlam-function-calling-60k": lambda question, answer: {
        "query": question, "tools": json.dumps([{"name": "add", "description": "Adds.", "parameters": {}}]),
        "answers": json.dumps([{"name": "add", "arguments": {"a": 1, "b": 2}}])},
    "BaSalam/entity-attribute-dataset-GPT-3.5-generated-v1": lambda question, answer: {
        "instruction": question, "output": answer, "field": "made"},
    "qgallouedec/biogrid": lambda question, answer: {"Alt IDs Interactor A": question, "Score": answer},
    "qgallouedec/biogrid_qa": lambda question, answer: {"question": f"Does the gene {question}", "answer": "Yes"},
    **dict.fromkeys(("HuggingFaceTB/smoltalk", "HuggingFaceTB/smoltalk2"), lambda question, answer: {
        "messages": messages(question, answer), "full_topic": "made"}),
    "dair-ai/emotion": lambda question, answer: {"text": question, "label": int(answer) % 6},
    # preferences
    "reciperesearch/dolphin-sft-v0.1-preference": lambda question, answer: {
        "instruction": question, "input": "", "accepted": answer, "rejected": "I do not know."},
    "HuggingFaceH4/ultrafeedback_binarized": lambda question, answer: {
        "prompt": question, "chosen": messages(question, answer), "rejected": messages(question, "No.")},
    "trl-lib/ultrafeedback_binarized": lambda question, answer: {
        "chosen": messages(question, answer), "rejected": messages(question, "No."), "score_chosen": 2.0,
        "score_rejected": 1.0},
    "HuggingFaceH4/rlaif-v_formatted": lambda question, answer: {
        "images": [picture()], "prompt": [asked(question)], "chosen": [told(answer)], "rejected": [told("No.")]},
    # images
    "unsloth/LaTeX_OCR": lambda question, answer: {"image": picture(), "text": answer},
    "unsloth/Radiology_mini": lambda question, answer: {"image": picture(), "caption": answer},
    "AI4Math/MathVista": lambda question, answer: {
        "decoded_image": picture(), "image": "a.png", "question": question, "answer": answer},
    "unsloth/llava-instruct-mix-vsft-mini": lambda question, answer: {
        "images": [picture()], "messages": [asked(question), told(answer)]},
    "trl-lib/llava-instruct-mix": lambda question, answer: {
        "images": [picture()], "prompt": messages(question, answer)[:1], "completion": messages(question, answer)[1:]},
    "HuggingFaceM4/ChartQA": lambda question, answer: {
        "image": picture(), "query": question, "label": [answer], "human_or_machine": 0},
    "lmms-lab/multimodal-open-r1-8k-verified": lambda question, answer: {
        "image": picture(), "problem": question, "solution": f"<think>We calculate.</think><answer>{answer}</answer>",
        "original_question": question, "original_answer": answer},
    "euclid-multimodal/Geoperception": lambda question, answer: {
        "id": answer, "predicate": "LineComparison", "image": picture(), "question": question, "answer": answer},
    "XinNUS/Temporal_Caption_Bench": lambda question, answer: {
        "query": question, "video": {"path": "clip.mp4", "bytes": None}, "duration": 1.0,
        "facts": [{"tag": "shared", "text": answer}]},
}


def load_dataset(path: str, name: str | None = None, *, split: Any = None, streaming: bool = False,
                 column_names: Sequence[str] = (), **kwargs: Any) -> Any:
    """Return made rows in place of `datasets.load_dataset`, for the names in DATASETS and the columns of a table; a
    slice such as train[:5%] is ignored."""
    if isinstance(split, list):
        return [load_dataset(path, name, split=part) for part in split]
    row = (lambda *texts: dict(zip(column_names, texts, strict=False))) if column_names else DATASETS.get(path)
    if row is None:
        raise LookupError(f"there are no made rows for {path!r}; add its columns to {__name__}.DATASETS")
    drawn = islice(problems("train", 0), MORE.get(path, ROWS))
    made = [row(problem.question, str(problem.answer)) for problem in drawn]
    data = Dataset.from_list(made)
    data = data.to_iterable_dataset() if streaming else data
    return DatasetDict(dict.fromkeys(("train", "validation", "test"), data)) if split is None else data
