"""The recipes: their names, and what each teaches."""

RECIPES = {
    "arithmetic": "multi-step arithmetic with the embedded tiny model, on a CPU in minutes",
    "gsm8k": "grade-school maths: openai/gsm8k, or dataset=PATH to a jsonl, json, csv or parquet file; gpu=16|24|48|80",
    "countdown": "make a target from given numbers: generated puzzles, any model, max_numbers=3|4 and more",
    "proximity": "a new answer format by fine-tuning, then GRPO in which closer answers earn more: sft_steps=N",
    "email": "replies to e-mails: keyword, recipient, length and signature paid one by one, longest_words=N",
    "code": "small Python functions that must pass their tests in a sandbox: isolation=bubblewrap|nsjail|process",
    "judge": "summaries scored side by side by a judge (RULER): judge=self, or judge=URL judge_model=NAME",
}
