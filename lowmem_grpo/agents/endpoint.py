"""Agents that speak HTTP: an endpoint whose sessions yield trajectories."""

from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.trajectories import History, Metadata, Trajectory
from lowmem_grpo.service.endpoint import Endpoint
from lowmem_grpo.service.sessions import Conversation, Session


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
    """An endpoint for rollouts, as `model.serve()` gives it."""

    def session(self) -> RolloutSession:
        """An address of its own for one rollout: a context manager, with `base_url`, `api_key` and `trajectory`."""
        return self.begin(RolloutSession)


def history_of(conversation: Conversation) -> History:
    """A recorded conversation in the form of ART."""
    said = [Choice.model_validate(one) if "turn" in one else one for one in conversation.messages_and_choices]
    return History(messages_and_choices=said, tools=conversation.tools)
