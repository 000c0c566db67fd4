"""A judge in place of a model."""

from lowmem_grpo.rewards.judge.judge import Judge, Prices, Round, unanswered
from lowmem_grpo.rewards.judge.question import Question


class Scripted(Judge):
    """Scores answers by their length, in place of a model; notes what it was asked."""

    time_limit = 10.0

    def __init__(self, fails: bool = False) -> None:
        super().__init__("scripted", 100, None, Prices(1.0, None))
        self.asked: list[Question] = []
        self.fails = fails

    def rate(self, questions: list[Question]) -> Round:
        now, waiting = self.begin(questions)
        self.asked += waiting
        for question in waiting:
            now.meter.prompt_tokens += 10
            if self.fails:
                now.troubles.append(unanswered("babble", "it babbles", "take another"))
            else:
                self.learn(now, question, [(min(len(text), question.high), text[:3]) for text in question.answers])
        return self.end(now)
