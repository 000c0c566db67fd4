"""The recipes by name, each with its task."""

RECIPES = {
    "arithmetic": "multi-step arithmetic with the embedded tiny model, in minutes on a CPU",
    "gsm8k": "grade-school maths: openai/gsm8k, or your own file with dataset=FILE",
    "countdown": "reach a target from given numbers with + - * /: generated puzzles",
    "proximity": "learn a new answer format by SFT, then GRPO with higher rewards for closer answers",
    "distill": "learning a teacher's distribution at each token, without rewards: the teacher is an adapter or a model",
    "self_distill": "learning from itself, without rewards: as the teacher, the model reads a worked solution",
    "new_tokens": "what new tokens mean: their rows are trained beside LoRA, by SFT and then by GRPO",
    "instructions": "following instructions that a program can check, as in IFEval: generated prompts",
    "shapes": "questions about generated pictures, for models that read images",
    "email": "replies to e-mails, with a reward for each quality of a good reply",
    "code": "small Python functions that must pass their tests in a sandbox",
    "judge": "summaries that a language model compares and scores (RULER)",
    "guess": "a game of many turns, without data: find a hidden number from hints",
    "calculator": "calling a tool: problems from rows of data, and a calculator",
    "tictactoe": "winning against an opponent: tic-tac-toe as X",
    "game2048": "2048 on a small board: the policy sees only the current board, so each move is a sequence",
    "twenty_questions": "asking questions to find a secret: the base model answers them, and is not trained",
    "inbox": "answering questions by searching mails: full-text search in SQLite, scored by rules or by RULER",
}
