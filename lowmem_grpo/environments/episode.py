"""One episode as tokens: the turns of the policy, and between them the messages of tools and the environment. Sampled
tokens are trained as they are, never decoded and encoded again."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.engines.base import Request
from lowmem_grpo.environments.protocol import Answer, AskBase, EnvHandle, EnvironmentFailedError
from lowmem_grpo.environments.renderer import PlainRenderer, Renderer
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.environments.tools.results import FinalResult, ToolError
from lowmem_grpo.environments.workers import WorkerJob
from lowmem_grpo.types import Message, Rollout, Split, ToolCall, Turn

logger = logging.getLogger(__name__)

UNREADABLE = 3  # consecutive turns with only unreadable tool calls that end an episode


@dataclass(frozen=True)
class EpisodeBounds:
    """The limits of an episode, in turns, tokens and seconds."""

    turns: int | None  # None: only the token limits hold
    completion: int  # tokens after the prompt
    context: int  # tokens in all
    turn: int | None  # tokens in one turn
    call_seconds: float
    episode_seconds: float
    append: bool = True  # the history keeps the sampled tokens; False: the template re-renders it for each turn


@dataclass
class Episode:
    """An episode in progress; `key` identifies it to the engine and to workers."""

    key: int
    row: dict[str, Any]
    messages: list[Message]  # the prompt's, and all that followed
    bounds: EpisodeBounds
    renderer: Renderer | PlainRenderer
    toolbox: Any  # None: there are no tools
    handle: EnvHandle | None  # None: there is no environment
    seeds: Callable[[int], int]  # number of the turn -> seed
    within: Callable[[Answer], Answer] = lambda answer: answer  # cuts the messages of an environment's step
    opening: list[Message] = field(default_factory=list)  # all messages before the first turn
    prompt: list[int] = field(default_factory=list)  # (P,) the prompt of the first turn
    ids: list[int] = field(default_factory=list)  # the sequence in progress, prompt included
    after: list[int] = field(default_factory=list)  # (C,) as in `Rollout.completion_ids`
    logprobs: list[float] = field(default_factory=list)  # (C,)
    trained: list[bool] = field(default_factory=list)  # (C,)
    splits: list[Split] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    state: str | None = None
    empty: bool = False  # the first prompt's messages are all empty, as TRL's environments allow
    ending: str = ""
    trusted: int = 0  # number of leading messages that come from the dataset
    given: list[Message] = field(default_factory=list)  # the messages of the row's prompt
    asked: int = 0  # questions to the base model
    unread: int = 0  # replies of the base model that could not be read
    unreadable: int = 0  # consecutive turns with only unreadable calls
    seconds: float = 0.0  # spent by workers

    # Before the first turn

    def reset(self, job: WorkerJob) -> Answer:
        return Answer() if self.handle is None else self.bound(job).reset(self.row)

    def open_prompt(self, answer: Answer) -> None:
        """Make the first prompt from the row's messages and the observation."""
        self.given, self.state = self.messages, answer.state
        self.prompt = self.first(answer.messages)
        self.opening, self.ids = list(self.messages), list(self.prompt)
        if self.room < 1:
            self.ending = "context"

    def first(self, observation: list[Message]) -> list[int]:
        """Restart the conversation with the row's messages and an observation, and return its prompt (P,)."""
        self.messages = joined(self.given, observation)
        # an observation may contain text like an end-of-turn token; only the dataset's messages are trusted with it
        self.trusted = sum(message is other for message, other in zip(self.messages, self.given, strict=False))
        self.empty = not any(message.get("content") or message.get("tool_calls") for message in self.messages)
        if self.empty and (self.handle is None or self.handle.steps):
            raise EnvironmentFailedError("reset returned nothing and the row has no prompt, so the policy would read "
                                         "nothing; let reset return a text, or give the rows a prompt")
        return self.renderer.first(self.messages, self.trusted)

    def pass_reply(self, job: WorkerJob, ask: AskBase, said: str) -> Answer:
        """Pass the base model's reply to the environment and return its answer. Runs in a worker."""
        answer, read = self.bound(job).pass_reply(ask, said, first=not self.turns)
        self.unread += not read
        return self.within(answer) if self.turns else answer

    def bound(self, job: WorkerJob) -> EnvHandle:
        assert self.handle is not None
        self.handle.run = job.call
        return self.handle

    # The policy's turn

    @property
    def room(self) -> int:
        """The number of tokens that the policy may still sample in this turn."""
        left = min(self.bounds.completion - self.length, self.bounds.context - len(self.ids))
        return left if self.bounds.turn is None else min(left, self.bounds.turn)

    @property
    def length(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def spent(self) -> bool:
        return self.bounds.turns is not None and len(self.turns) >= self.bounds.turns

    @property
    def steps(self) -> bool:
        return self.handle is not None and self.handle.steps

    def request(self) -> Request:
        return Request(self.key, self.ids, self.room, self.seeds(len(self.turns)))

    def add_turn(self, drawn: Rollout) -> Callable[[WorkerJob], Answer] | None:
        """Add a sampled turn. Return the function that a worker calls to answer it; None if the episode has ended."""
        turn = Turn(self.ids, drawn.completion_ids, drawn.rollout_logprobs, drawn.finish_reason, drawn.text,
                    drawn.policy_version, drawn.cached_tokens, state=self.state, routes=drawn.routes)
        self.turns.append(turn)
        self.add(drawn.completion_ids, drawn.rollout_logprobs, trained=True)
        reading: Reading = (self.toolbox or self.renderer).read(drawn.completion_ids, drawn.text)
        said = drawn.text if self.renderer.channels is None else reading.content
        calls, errors = reading.calls, reading.errors
        turn.message = reading.message()
        turn.calls, turn.failures = len(calls) + len(errors), len(errors)
        self.messages.append(turn.message)
        self.unreadable = self.unreadable + 1 if errors and not calls else 0
        if self.unreadable >= UNREADABLE:
            self.ending = "parse_error"
        elif (calls or errors) and self.spent and not self.steps:
            self.ending = "max_turns"  # the policy would not read the results, so tools are not run, as in TRL
        elif calls or errors:
            return lambda job: self.call_tools(job, calls, errors)
        elif self.steps:
            return lambda job: self.within(self.bound(job).step(said))
        else:
            self.ending = "max_tokens" if drawn.finish_reason == "length" else "answer"
        return None

    def call_tools(self, job: WorkerJob, calls: list[ToolCall], errors: list[str]) -> Answer:
        """Return the results of tool calls in order, then the errors of unreadable calls. Runs in a worker."""
        answer = Answer(calls=len(calls) + len(errors))
        if self.handle is not None:
            self.handle.run = job.call
        for call in calls:
            try:
                content = self.toolbox.run(call, job.call)
            except ToolError as error:
                content, answer.failures = str(error), answer.failures + 1
            answer.done |= isinstance(content, FinalResult)
            answer.messages.append(self.toolbox.message(call, content))
        answer.messages += [{"role": "tool", "name": "error", "content": error} for error in errors]
        answer.failures += len(errors)
        answer.state = None if self.handle is None else self.handle.state()
        return answer

    def answered(self, answer: Answer, seconds: float) -> None:
        """Add the answer to the last turn, and end the episode or make the next prompt."""
        turn = self.turns[-1]
        turn.reward, turn.failures = answer.reward, answer.failures
        turn.seconds += seconds
        self.state = answer.state
        if answer.done:
            self.ending = "done"
        elif self.spent:
            self.ending = "max_turns"
        elif turn.finish_reason == "length" and self.room < 1:
            self.ending = "max_tokens"
        elif not answer.messages:
            answer.messages = [{"role": "user", "content": ""}]
        if answer.done or not self.ending:
            turn.replies = answer.messages
        if not self.ending:
            self.go_on(answer.messages, answer.anew)

    def go_on(self, replies: list[Message], anew: bool = False) -> None:
        """Make the next prompt with `replies` (`anew`: without earlier turns), or end the episode if it is too long."""
        kept, self.messages = self.messages, [*self.messages, *replies]
        if anew:
            ids = self.first(replies)
        elif self.bounds.append:
            ended = self.renderer.closed(self.turns[-1].completion_ids, replies)
            ids = [*self.ids, *self.renderer.bridge(replies, ended)]
        else:
            ids = self.renderer.render_anew(self.messages, self.trusted)
        if len(ids) - len(self.prompt) >= self.bounds.completion or len(ids) >= self.bounds.context:
            self.ending, self.messages, self.turns[-1].replies = "context", kept, []
        elif ids[: len(self.ids)] == self.ids:
            self.add(ids[len(self.ids) :])
        else:
            self.split(ids)

    def split(self, ids: list[int]) -> None:
        """Begin a new sequence, because the prompt `ids` does not extend the current sequence."""
        begins = len(self.prompt) > 0 and ids[: len(self.prompt)] == self.prompt
        self.splits.append(Split(len(self.after), None if begins else ids))
        self.ids = list(self.prompt) if begins else ids
        if begins:
            self.add(ids[len(self.prompt) :])

    def add(self, ids: list[int], logprobs: list[float] | None = None, trained: bool = False) -> None:
        self.ids = [*self.ids, *ids]
        self.after += ids
        self.logprobs += logprobs if trained and logprobs is not None else [0.0] * len(ids)
        self.trained += [trained] * len(ids)

    # The end

    def finish(self, job: WorkerJob) -> float | None:
        """Return the result of `get_reward`, and close the environment. Runs in a worker."""
        if self.handle is None:
            return None
        try:
            return self.bound(job).pay()
        finally:
            self.close(job)

    def close(self, job: WorkerJob) -> None:
        """Close the environment; a failure is only logged. Runs in a worker."""
        if self.handle is not None:
            try:
                self.bound(job).close()
            except EnvironmentFailedError as error:
                logger.warning("an environment could not be closed: %s", error)

    def rollout(self, prompt: list[int]) -> Rollout:
        """Return the episode as a rollout of a group whose prompt is `prompt` (P,)."""
        last = self.turns[-1] if self.turns else None
        splits = self.splits
        if self.prompt != prompt:  # the environment gave this episode another first observation
            splits = [Split(0, self.prompt), *(Split(split.start, split.prompt_ids or self.prompt) for split in splits)]
        return Rollout(
            self.after, self.logprobs, last.finish_reason if last and self.ending == "max_tokens" else "stop",
            last.text if last else "", min((turn.policy_version for turn in self.turns), default=0),
            sum(turn.cached_tokens for turn in self.turns), trained=self.trained, splits=splits, turns=self.turns,
            opening=self.opening, ending=self.ending, environment=None if self.handle is None else self.handle.made,
            asked=self.asked, unread=self.unread,
        )


def joined(prompt: list[Message], observation: list[Message]) -> list[Message]:
    """Return the prompt's messages and the first observation. An observation of one user message is appended to the
    prompt's last message, as in TRL, unless the assistant wrote that message."""
    begun = bool(prompt) and prompt[-1]["role"] == "assistant"
    if len(observation) != 1 or observation[0].get("role") != "user" or not prompt or begun:
        said = (message for message in prompt if message.get("content") or message.get("tool_calls") or not observation)
        return [*said, *observation]
    last = prompt[-1]
    return [*prompt[:-1], last | {"content": last["content"] + observation[0]["content"]}]
