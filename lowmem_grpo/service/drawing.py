"""`Drawing`: the completions that one request asks for, drawn by the desk."""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.request_output import Logprob
from lowmem_grpo.service.call import Call
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.waiting import DeskClosedError
from lowmem_grpo.types import Turn


class Asked(Protocol):
    """What a request says of how its completions are drawn."""

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def sampling(self) -> dict[str, Any]: ...


class Drawing:
    """Calls that wait at the desk, or are drawn."""

    def __init__(self, desk: Desk, calls: Sequence[Call]) -> None:
        self.desk, self.calls = desk, calls
        self.futures: list[Future[Turn]] = [desk.submit(call) for call in calls]

    async def turn(self, place: int, count: int | None) -> tuple[Turn, list[dict[int, Logprob]] | None]:
        """The turn of a call, as soon as it is drawn, and with a `count` above 0 the likeliest tokens at each of its
        places. ChatError says why there is none."""
        try:
            turn = await asyncio.wrap_future(self.futures[place])
            if not count:
                return turn, None
            return turn, await asyncio.wrap_future(self.desk.likeliest(self.calls[place], turn, count))
        except DeskClosedError as error:
            raise ChatError(503, str(error)) from error
        except ValueError as error:  # such as a temperature that vLLM would change
            raise ChatError(400, str(error)) from error
        except Exception as error:
            if isinstance(adapter := self.calls[place].adapter, Path) and not adapter.exists():
                raise ChatError(404, "the weights of this model were deleted before it could answer", "model",
                                "model_not_found") from error
            raise ChatError(500, f"the engine could not answer ({type(error).__name__}: {error})") from error

    def end(self) -> None:
        """Nobody waits for what is not drawn yet."""
        for future in self.futures:
            future.cancel()


def params_of(asked: Asked, prompt: int, place: int, context: int, most: int | None, field: str) -> SamplingParams:
    """How completion number `place` is drawn behind a prompt of so many tokens, which `field` of the request holds.
    ChatError with the code context_length_exceeded where there is no room."""
    room = context - prompt
    if room < 1:
        raise ChatError(
            400, f"This model's maximum context length is {context} tokens. However, your {field} resulted in {prompt} "
            f"tokens. Please reduce the length of the {field}, or load the model with a larger max_seq_length", field,
            "context_length_exceeded")
    bounds = (room, asked.max_tokens, most)
    seed = None if asked.seed is None else random.Random(f"{asked.seed}-{place}").getrandbits(62)
    return SamplingParams(max_tokens=min(one for one in bounds if one is not None), seed=seed, **asked.sampling)


def version_of(model: str) -> int | None:
    """The version of the policy that a model's name says, as in `RUN@12`."""
    step = model.rpartition("@")[2]
    return int(step) if step.isdecimal() else None
