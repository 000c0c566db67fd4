"""The base model as judge: the run's rollout engine with the adapter off, so that no second model is needed."""

from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.config.shared import TEMPLATE_VARIABLES
from lowmem_grpo.data.prompt_inputs import chat_text, text_ids
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.rewards.judge.judge import Judge, Round
from lowmem_grpo.rewards.judge.question import BadReplyError, Question, without_controls
from lowmem_grpo.utils import POSITIVE, require

TOKENS_OF_A_RATING = 24  # the least room for a reply, in tokens for each answer
SECOND_TEMPERATURE = 0.7  # a second greedy reply would be the same


class SelfJudge(Judge):
    """Judges with the base weights of the trained model, so that training cannot change the judge."""

    after_sampling = True

    def __init__(
        self, model: Any, *, max_tokens: int = 1024, temperature: float = 0.0, seed: int = 0,
        chat_template_kwargs: dict[str, Any] | None = None, time_limit: float = 3600.0, cache_size: int = 10_000,
        **gone: Any,
    ) -> None:
        """`model` is the model from FastLanguageModel; a question and its reply must fit into its max_seq_length.
        max_tokens: the longest reply. chat_template_kwargs: e.g. {"enable_thinking": False}. time_limit: seconds for
        all questions of a step."""
        super().__init__("self", cache_size, **gone)
        if not hasattr(model, "loaded"):
            raise TypeError(f"SelfJudge got a {type(model).__name__}; give it the model from FastLanguageModel")
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)  # refuses what cannot be sampled with
        require("time_limit", time_limit, POSITIVE)
        require("chat_template_kwargs", chat_template_kwargs or {}, TEMPLATE_VARIABLES)
        self.model, self.max_tokens, self.temperature, self.seed = model, max_tokens, float(temperature), seed
        self.tokenizer = model.loaded.tokenizer  # the base model's; a trainer may use another one
        self.template_kwargs, self.time_limit = dict(chat_template_kwargs or {}), float(time_limit)
        self.memory = RunMemory()  # with its own batch bound, since questions are longer than the run's prompts

    def rate(self, questions: list[Question]) -> Round:
        now, waiting = self.begin(questions)
        faults: dict[Question, Any] = dict.fromkeys(waiting)
        for temperature in (self.temperature, max(self.temperature, SECOND_TEMPERATURE)):
            faults = self.ask(faults, temperature, now)
        if faults:
            now.report("babble", f"{len(faults)} of {len(questions)} replies have no scores that can be used: "
                       f"{next(iter(faults.values()))}", "take a larger model, raise max_tokens, or judge by URL: a "
                       "small model may not follow the form")
        return self.end(now)

    def ask(self, faults: dict[Question, Any], temperature: float, now: Round) -> dict[Question, BadReplyError]:
        """Ask the base model the questions in one batch. `faults` maps each question to the error of its previous reply
        (None at first). Return the errors of the new replies that have no scores, by question."""
        asked = {question: ids for question, bad in faults.items()
                 if (ids := self.encode(question, bad and bad.fault, now)) is not None}
        if not asked:
            return {}
        now.retried += sum(faults[question] is not None for question in asked)
        try:
            outputs = self.generate(list(asked.values()), SamplingParams(
                temperature=temperature, max_tokens=self.max_tokens, seed=self.seed).of_call(len(asked)))
        except (RuntimeError, ValueError, ArithmeticError) as error:  # too little memory, NaN logits, a dead engine
            now.report("engine", f"the engine could not answer ({type(error).__name__}: {error})",
                       "lower max_seq_length, num_generations or max_completion_length, or judge by URL")
            return {}
        bad_replies: dict[Question, BadReplyError] = {}
        for (question, ids), (reply,) in zip(asked.items(), outputs, strict=True):
            now.prompt_tokens += len(ids)
            now.completion_tokens += len(reply.completion_ids)
            try:
                if reply.finish_reason == "length":
                    raise BadReplyError("it was cut off at max_tokens", reply.text)
                self.learn(now, question, question.read(reply.text))
            except BadReplyError as bad:
                bad_replies[question] = bad
        return bad_replies

    def encode(self, question: Question, fault: str | None, now: Round) -> list[int] | None:
        """Return a question's token ids as one user turn (some templates have no system turn); None if too long."""
        tokenizer = self.tokenizer
        text = without_controls("\n\n".join(message["content"] for message in question.messages(fault)), tokenizer)
        if tokenizer.chat_template:
            text = chat_text(tokenizer, [{"role": "user", "content": text}], self.template_kwargs)
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        else:
            ids = text_ids(tokenizer, text)
        room = self.model.loaded.max_seq_length - len(ids)
        if room >= min(self.max_tokens, TOKENS_OF_A_RATING * len(question.answers)):
            return ids
        now.report("long", f"a question of {len(ids)} tokens leaves too little room for its reply in a context of "
                   f"{self.model.loaded.max_seq_length}",
                   "load with a larger max_seq_length, or lower num_generations or max_completion_length")
        return None

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        """Return the base model's rollouts for each prompt from the run's engine, and put the engine to sleep."""
        engine = self.model.engine()
        if engine.name == "transformers":  # a new engine each time: keep the limits found when memory ran out
            self.memory.watch(engine)
        try:
            with engine.policy.base_model():
                rollouts: list[Any] = engine.generate(prompts, params)
        finally:
            engine.sleep()
        return rollouts
