"""The recipes by name, and what each of them teaches."""

RECIPES = {
    "arithmetic": "multi-step arithmetic with the embedded tiny model, in minutes on a CPU",
    "gsm8k": "grade-school maths: openai/gsm8k, or your own file with dataset=FILE",
    "countdown": "reach a target from given numbers with + - * /: generated puzzles",
    "proximity": "learn a new answer format by fine-tuning, then GRPO that pays more for closer answers",
    "email": "replies to e-mails, with a reward for each quality of a good reply",
    "code": "small Python functions that must pass their tests in a sandbox",
    "judge": "summaries that a language model compares and scores (RULER)",
    "guess": "a game of many turns, without data: find a hidden number by listening",
    "calculator": "calling a tool: problems from rows of data, and a calculator",
    "tictactoe": "winning against an opponent: tic-tac-toe as X",
    "game2048": "2048 on a small board: the policy sees the last board only, so each of its moves is a sequence",
    "twenty_questions": "asking what helps to find out what the base model thinks of, which answers and is not trained",
    "inbox": "answering questions by searching mails: full-text search in SQLite, scored by rules or by RULER",
}
