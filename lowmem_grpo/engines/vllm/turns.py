"""The turns of a conversation in vLLM: each enters between two steps of the engine, and leaves once it is drawn."""

from typing import Any

import torch

from lowmem_grpo.engines.base import Calls, Conversation, Request
from lowmem_grpo.engines.vllm.process_state import torch_undisturbed
from lowmem_grpo.engines.vllm.requests import Sampling, number_of
from lowmem_grpo.engines.vllm.steps import Steps
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.types import Rollout


class Turns(Calls):
    """The turns of one call of `converse` that are asked for and not given yet, in the order in which they came."""

    def __init__(self, conversation: Conversation, sampling: Sampling, device: torch.device) -> None:
        self.conversation, self.sampling, self.device = conversation, sampling, device
        self.open: dict[int, tuple[Request, Any]] = {}  # by the key of the episode, with vLLM's settings
        self.routes: dict[int, tuple[list[int], Routes]] = {}  # of the last turn of a key, and the tokens they are of
        self.keys: dict[str, int] = {}  # of the open turns, by the number of vLLM's request

    def run(self, steps: Steps, version: int) -> None:
        """Decode until the conversation has no more. Turns that were lost with another engine are asked for again;
        those that the conversation leaves behind with an error are taken back."""
        self.keys = {}
        self.enter(steps, list(self.open.values()))
        try:
            while self.more(steps):
                with torch_undisturbed(self.device):  # not the conversation, whose environments may draw numbers
                    outputs = steps.step()
                for output in outputs:
                    steps.was_read(self.give(output, version))
        except Exception:
            if self.failed_outside is not None:
                steps.abort(list(self.keys))
            raise

    def more(self, steps: Steps) -> bool:
        """Let the turns in that are ready now; whether there are turns to decode."""
        with self.outside_the_engine():
            asked = self.conversation.take(busy=bool(self.open))
            new = list(zip(asked, self.sampling.settings(asked), strict=True)) if asked else []
            assert not [request.key for request in asked if request.key in self.open], "one turn of a key at a time"
        self.open |= {request.key: (request, settings) for request, settings in new}
        self.enter(steps, new)
        return bool(self.open)

    def enter(self, steps: Steps, turns: list[tuple[Request, Any]]) -> None:
        """Ask vLLM for these turns."""
        if turns:
            names = steps.enqueue([request.ids for request, _ in turns], [settings for _, settings in turns])
            self.keys |= {number_of(name): request.key for name, (request, _) in zip(names, turns, strict=True)}

    def give(self, output: Any, version: int) -> int:
        """Give a turn that is drawn; whatever happens then, it is not given again. Returns how many tokens of its
        prompt were computed."""
        key = self.keys.pop(number_of(output.request_id))
        request, _ = self.open.pop(key)
        cached = output.num_cached_tokens or 0
        with self.outside_the_engine():
            rollout = self.sampling.rollout(output.outputs[0], request.ids, version, cached)
            self.go_on(request, rollout)
            self.conversation.give(key, rollout)
        return len(request.ids) - cached

    def go_on(self, request: Request, rollout: Rollout) -> None:
        """Let the routes of a turn share those of the last turn that it goes on from."""
        if rollout.routes is not None:
            ids, known = self.routes.get(request.key, ([], Routes(())))
            if request.ids[: len(ids)] == ids:
                rollout.routes = known.then(rollout.routes)
            self.routes[request.key] = [*request.ids, *rollout.completion_ids[:-1]], rollout.routes
