"""An engine and a judge that say what a script says, trainers that play with it, and environments that hang."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from template_tokenizers import tokenizer_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptEncoder
from lowmem_grpo.engines.base import Conversation
from lowmem_grpo.engines.decoding import in_rounds
from lowmem_grpo.environments.env_spec import EnvSpecs, EpisodeEncoder, Factories
from lowmem_grpo.environments.episode import EpisodeBounds
from lowmem_grpo.environments.tools.toolbox import Toolbox
from lowmem_grpo.environments.workers import WorkerJob
from lowmem_grpo.rewards.calling.background import BackgroundLoop
from lowmem_grpo.rewards.judge.judge import Judge, Round
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.rollout.episodes import Episodes
from lowmem_grpo.types import OnGroup, Rollout, ToolCall

TEMPLATE = "qwen2_5"
FREE: dict[str, Any] = {"turns": None, "completion": 4096, "context": 8192, "turn": None, "call_seconds": 60.0,
                        "episode_seconds": 600.0}


class ScriptedEngine:
    """Answers a prompt, decoded, with what `says` makes of it; each token has the log-probability -0.5. What is said
    may have special tokens of a `template`, and then ends with the end token unless it ends with a call's."""

    name = "transformers"
    capabilities = frozenset({"on_group", "converse"})

    def __init__(self, says: Callable[[str], str], template: str = TEMPLATE) -> None:
        self.tokenizer, self.says = tokenizer_of(template), says
        self.asked: list[list[int]] = []

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        found = [[self.answer(ids, params.max_tokens)] for ids in prompts]
        self.asked += prompts
        for index, rollouts in enumerate(found):
            if on_group is not None:
                on_group(index, rollouts)
        return found

    def answer(self, prompt: list[int], most: int) -> Rollout:
        text = self.says(self.tokenizer.decode(prompt))
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        ids, ended = ids[:len(ids) - text.endswith("<|call|>")], len(ids) <= most
        text = self.tokenizer.decode(ids[:most], skip_special_tokens=True) if "<|channel|>" in text else text
        return Rollout(ids[:most], [-0.5] * len(ids[:most]), "stop" if ended else "length", text)

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        in_rounds(self, conversation, params, self.tokenizer)


def played(
    says: Callable[[str], str], rows: list[dict[str, Any]], factory: Any = None, tools: Any = (), n: int = 2,
    append: bool = True, max_tool_tokens: int = 1024, template: str = TEMPLATE, slots: int | None = None,
    **bounds: Any,
) -> list[list[Rollout]]:
    """The episodes of rows, `n` of each, by what a script says."""
    tokenizer = tokenizer_of(template)
    factories = None if factory is None else Factories(factory)
    specs = EnvSpecs(tokenizer, tools, factories, max_tool_tokens, {})
    encoder = EpisodeEncoder(PromptEncoder(tokenizer, 4096), specs)
    prompts = [encoder.encode(row) for row in rows]
    assert all(isinstance(prompt, Prompt) for prompt in prompts), prompts
    engine: Any = ScriptedEngine(says, TEMPLATE if template == "qwen3" else template)
    engine.slots = slots
    episodes = Episodes(specs, EpisodeBounds(**FREE | bounds, append=append))
    return episodes.play(engine, prompts, SamplingParams(n=n, seed=1, max_tokens=4096))  # type: ignore[arg-type]


LOOP = BackgroundLoop("tools")


def run_tool(box: Toolbox, name: str, seconds: float = 60.0, /, **arguments: Any) -> str:
    """The result of a call, made as an episode makes it."""
    return box.run(ToolCall(name, arguments), WorkerJob(0, print, seconds, LOOP).call)


class Hang:
    """Called inside of a call of an environment, it lasts longer than the call may, on a machine of any speed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.over = threading.local(), threading.Event()
        self.threads: list[threading.Thread] = []
        call = WorkerJob.call

        def noted(job: WorkerJob, *given: Any) -> Any:
            self.here.job = job
            return call(job, *given)

        monkeypatch.setattr(WorkerJob, "call", noted)

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        self.here.job.deadline = 0.0
        assert self.over.wait(60)

    def end(self) -> None:
        """Let go what hangs, and wait until its threads have ended."""
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        self.over = threading.Event()


class Scripted(Judge):
    """Scores answers by their length, in place of a model; notes what it was asked."""

    time_limit = 10.0

    def __init__(self, fails: bool = False) -> None:
        super().__init__("scripted", 100)
        self.asked: list[Question] = []
        self.fails = fails

    def rate(self, questions: list[Question]) -> Round:
        now, waiting = self.begin(questions)
        self.asked += waiting
        for question in waiting:
            now.prompt_tokens += 10
            if self.fails:
                now.report("babble", "it babbles", "take another")
            else:
                ratings = [(min(len(text), question.high), text[:3]) for text in question.answers]
                self.learn(now, question, ratings)
        return self.end(now)
