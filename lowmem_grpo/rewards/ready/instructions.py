"""Instructions that a program can check, such as "at least 120 words" or "no commas".

    follows = rewards.follows_instructions()                  # a verifier; IFEval's two columns
    follows = rewards.follows_instructions("ground_truth")    # one column: Tulu 3's RLVR-IFeval, IFBench's training set
    reward_funcs = [follows.reward(), follows.share()]        # 1 if all are followed; the share of those followed

The 25 kinds are those of IFEval (arXiv 2311.07911, table 1), under its names.
"""

import ast
import json
import logging
from itertools import product
from typing import Any

from lowmem_grpo.rewards.ready.instruction_kinds import KINDS, has_sentence
from lowmem_grpo.rewards.reward import AMOUNT, Reward, Verdict, VerifiedReward, Verifier
from lowmem_grpo.rewards.texts import values_of
from lowmem_grpo.utils import TRUTH, as_python, require

logger = logging.getLogger(__name__)

LONGEST = 10**5  # characters of a cell that is read
Cell = Any  # a row's value in a column
Instruction = tuple[str, dict[str, Any]]  # the kind, and its arguments by IFEval's names
RLVR: dict[str, tuple[str, dict[str, str]]] = {  # by func_name of RLVR-IFeval: the kind, and IFEval's argument names
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {}),
    "verify_sentence_constraint": ("length_constraints:number_sentences",
                                   {"N": "num_sentences", "quantifier": "relation"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "validate_paragraphs": ("length_constraints:nth_paragraph_first_word",
                            {"N": "num_paragraphs", "i": "nth_paragraph"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_postscript": ("detectable_content:postscript", {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": ("detectable_format:multiple_sections",
                          {"N": "num_sections", "section_splitter": "section_spliter"}),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_title": ("detectable_format:title", {}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_end": ("startend:end_checker", {}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_frequency_capital_words": ("change_case:capital_word_frequency",
                                         {"N": "capital_frequency", "quantifier": "capital_relation"}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}


def instructions_of(cell: Cell, arguments: Cell = None) -> list[Instruction]:
    """Return the instructions of a row: IFEval's `instruction_id_list` with its `kwargs`; a dict with `func_name`; a
    dict with `instruction_id` and `kwargs`; a list of such dicts; or any of these as text in JSON or Python's form.
    ValueError, with the reason, for what cannot be read and for instructions that are not in KINDS."""
    cell, arguments = read(cell), read(arguments)
    if isinstance(cell, dict):
        if listed := next((key for key in ("instruction_id", "instruction_id_list") if key in cell), None):
            return listed_instructions(read(cell[listed]), read(cell.get("kwargs")))
        name = str(cell.get("func_name"))
        kind, renamed = RLVR.get(name, (name, {}))
        own = {renamed.get(str(key), str(key)): value for key, value in cell.items() if key != "func_name"}
        if name.endswith("_frequency"):  # the word or letter shall occur exactly N times
            own["relation" if "keyword" in name else "let_relation"] = "exactly"
        return [known(kind, own)]
    names = values_of(cell)
    if names and all(isinstance(name, dict) for name in names):
        return [each for name in names for each in instructions_of(name)]
    return listed_instructions(names, arguments)


def listed_instructions(cell: Cell, arguments: Cell) -> list[Instruction]:
    """Return the instructions of a list of names (or of one name), each with its own arguments or with the same."""
    names = values_of(cell)
    given = arguments if isinstance(arguments, list) else [arguments] * len(names)
    if len(given) != len(names):
        raise ValueError(f"it has {len(names)} instructions and arguments for {len(given)}")
    return [known(name, each or {}) for name, each in zip(names, given, strict=True)]


def read(cell: Cell) -> Any:
    """Return a cell's value: text that begins with a bracket is read as JSON, else as a Python literal."""
    cell = as_python(cell)
    if not isinstance(cell, str) or not cell.lstrip().startswith(("[", "{")):
        return cell or None
    for reader in (json.loads, ast.literal_eval):
        try:
            return reader(cell[:LONGEST])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise ValueError(f"it is neither JSON nor a Python literal: {cell:.80}")


def known(kind: Any, arguments: Any) -> Instruction:
    """Return an instruction with its arguments that are not None; ValueError if it cannot be checked."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"there is no check for {kind!r:.80}; there are {', '.join(KINDS)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {kind} are {arguments!r:.80}; they must be a dict")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        KINDS[kind]("A text.", **given)
    except ImportError:
        raise ValueError(f"{kind} needs a package: pip install py3langid") from None
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(f"{kind} cannot be checked with the arguments {given!r:.200}: {error}") from error
    return kind, given


def follows(text: str, instruction: Instruction, loose: bool) -> bool:
    """Return whether a text follows an instruction; with `loose`, also without its first or last line or asterisks."""
    kind, arguments = instruction
    lines = text.split("\n")
    forms = [text]
    if loose:
        parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
        forms = [form.replace("*", "") if bare else form for form, bare in product(parts, (False, True))]
    return any(form.strip() and KINDS[kind](form, **arguments) for form in forms)


def follows_instructions(
    column: str = "instruction_id_list", arguments: str | None = None, loose: bool = False, sentence: bool = False
) -> "InstructionVerifier":
    """Return a verifier: right if a completion follows all instructions of its row.

    `column` holds the instructions, and `arguments` their arguments (None: `kwargs` for IFEval's column, else no
    column). `loose` also accepts a text that follows without its first or last line, or without asterisks, as IFEval's
    loose accuracy. With `sentence`, a text without a sentence follows nothing: a policy that repeats the wanted words
    to the limit is not paid. Rows with an unknown instruction, or without any, get no verdict.
    """
    if arguments is None and column == "instruction_id_list":
        arguments = "kwargs"
    return InstructionVerifier((column,) if arguments is None else (column, arguments), loose, sentence)


class InstructionVerifier(Verifier):
    """The verifier that `follows_instructions` returns."""

    def __init__(self, columns: tuple[str, ...], loose: bool, sentence: bool) -> None:
        require("loose", loose, TRUTH)
        require("sentence", sentence, TRUTH)
        self.name, self.columns, self.loose, self.sentence = "follows_instructions", columns, loose, sentence

    def followed(self, text: str, *cells: Cell) -> list[bool] | None:
        """Return which instructions a text follows; None if the row has none, or one that cannot be checked."""
        try:
            wanted = instructions_of(*cells)
        except (ValueError, RecursionError):
            return None
        silent = self.sentence and not has_sentence(text)
        return [not silent and follows(text, each, self.loose) for each in wanted] or None

    def each(self, completions: list[str], columns: dict[str, list[Any]]) -> list[list[bool] | None]:
        rows = zip(*(columns[name] for name in self.columns), strict=True)
        return [self.followed(text, *cells) for text, cells in zip(completions, rows, strict=True)]

    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        return [None if told is None else all(told) for told in self.each(completions, columns)]

    def reward(self, right: float = 1.0, wrong: float = 0.0, name: str | None = None) -> "InstructionReward":
        """Return a reward: `right` if all instructions are followed, else `wrong`."""
        return InstructionReward(self, right, wrong, name or self.name)

    def share(self, amount: float = 1.0, name: str = "instructions_followed") -> "InstructionShare":
        """Return a reward of `amount` times the share of instructions that are followed."""
        return InstructionShare(self, amount, name)


class OfInstructions(Reward):
    """A reward from the instructions of a row."""

    verifier: InstructionVerifier

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        try:
            instructions_of(*(row.get(name) for name in self.columns))
        except (ValueError, RecursionError) as error:
            return f"the row's instructions in {self.columns[0]} cannot be checked: {error}"
        return None

    def say_unread(self, results: Any, labels: list[Any]) -> None:
        """Warn once of the first row whose instructions cannot be checked."""
        unread = [label for result, label in zip(results, labels, strict=False)
                  if result is None and any(str(each).strip() for each in values_of(label))]
        if unread and not self.said_unread:
            self.said_unread = True
            logger.warning("%s gives no verdict on %d of %d completions, as for %.200r in the column %r: "
                           "rewards.check(...) says what is wrong with such a row. Leave it out, or correct it",
                           self.__name__, len(unread), len(results), unread[0], self.columns[0])


class InstructionReward(OfInstructions, VerifiedReward):
    """Pays for verdicts."""

    verifier: InstructionVerifier


class InstructionShare(OfInstructions):
    """Pays for each instruction that is followed."""

    def __init__(self, verifier: InstructionVerifier, amount: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        require("amount", amount, AMOUNT)
        self.verifier, self.amount = verifier, float(amount)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        told = self.verifier.each(texts, columns)
        shares = [None if each is None else self.amount * sum(each) / len(each) for each in told]
        self.say_unread(shares, columns[self.columns[0]])
        return shares
