"""Agents that speak HTTP: an endpoint whose sessions yield trajectories."""

from typing import Any

from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.trajectories import History, Metadata, Trajectory
from lowmem_grpo.service.call import LIVE
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.endpoint import Endpoint, listening
from lowmem_grpo.service.gate import LOOPBACK
from lowmem_grpo.service.histories import Histories
from lowmem_grpo.service.limits import Limits
from lowmem_grpo.service.sessions import Conversation, Session

POLICY = "policy"  # the name of the model that is trained
CHAT_OPTIONS = ("max_turn_tokens", "template_kwargs", "parse")


class RolloutSession(Session):
    """The calls of one rollout, which make up its trajectory."""

    def trajectory(
        self, reward: float = 0.0, metrics: dict[str, float | int | bool] | None = None,
        metadata: dict[str, Metadata] | None = None, logs: list[str] | None = None,
    ) -> Trajectory:
        """All that the policy said in this session, its conversations as histories of one trajectory.

        Raises ValueError where it said nothing.
        """
        histories = [history_of(one) for one in self.conversations()]
        if not histories:
            raise ValueError("nothing was said in this session, so that there is nothing to train on: the agent must "
                             f"call {self.base_url} (base_url of the session, not that of the endpoint), with the name "
                             "of the model that is trained, and get a reply")
        first, *others = histories
        return Trajectory(
            messages_and_choices=first.messages_and_choices, tools=first.tools, additional_histories=others,
            reward=reward, metrics=metrics or {}, metadata=metadata or {}, logs=logs or [],
        )


class AgentEndpoint(Endpoint):
    """An endpoint for rollouts, as `model.serve()` and `serve()` give it."""

    def session(self) -> RolloutSession:
        """An address of its own for one rollout: a context manager, with `base_url`, `api_key` and `trajectory`."""
        return self.begin(RolloutSession)


def serve(
    model: Any, tokenizer: Any = None, *, name: str = POLICY, port: int = 0, limits: Limits | None = None,
    seed: int = 0, history: str = "append", **options: Any,
) -> AgentEndpoint:
    """Serve what FastLanguageModel returned, in a thread of this process: the model with its adapter as `name`, the
    base model under its own name. Without an adapter, the model under both.

    `history` is as in GRPOConfig. `options` are those of Chat: max_turn_tokens bounds each reply, template_kwargs go to
    the chat template, `parse` reads tool calls. One thread owns the model for as long as the endpoint is open: train in
    it, by `endpoint.chat.desk.run(function)`, or close the endpoint first.

    Raises TypeError for another model or option, ValueError for a value that cannot be, OSError for a port in use.
    """
    if not hasattr(model, "loaded"):
        raise TypeError(f"serve got a {type(model).__name__}; give the model that FastLanguageModel.from_pretrained or "
                        "get_peft_model returned")
    if unknown := sorted(set(options) - set(CHAT_OPTIONS)):
        raise TypeError(f"serve has no option {unknown[0]!r}; it has name, port, limits, seed, history, "
                        f"{', '.join(CHAT_OPTIONS)}")
    listening(LOOPBACK, port).close()  # a port that cannot be had is said before anything is made
    tokenizer = tokenizer or model.loaded.tokenizer
    kinds = {field: options.pop(field) for field in ("template_kwargs", "parse") if field in options}
    histories = Histories(tokenizer, history, **kinds)
    names = {name: LIVE} | {model.loaded.name: None if hasattr(model, "peft_config") else LIVE}
    desk = Desk(model, tokenizer, seed=seed)
    try:
        chat = Chat(desk, tokenizer, lambda: names, histories=histories, **options)
        return AgentEndpoint(chat, port=port, limits=limits, owned=[desk.close])
    except BaseException:
        desk.close()
        raise


def history_of(conversation: Conversation) -> History:
    """A recorded conversation in the form of ART."""
    said = [Choice.model_validate(one) if "turn" in one else one for one in conversation.messages_and_choices]
    return History(messages_and_choices=said, tools=conversation.tools)
