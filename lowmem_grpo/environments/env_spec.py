"""The setup of a row's episode: its environment, its tools (schemas and functions), and the renderer of its chat."""

import asyncio
import copy
import inspect
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import (
    DataError,
    Prompt,
    PromptEncoder,
    effort_of,
    is_chat,
    is_message,
    no_chat,
    odd_role,
)
from lowmem_grpo.environments.protocol import Answer, EnvironmentFailedError, short, tools_of
from lowmem_grpo.environments.renderer import PlainRenderer, Renderer, renderer_for
from lowmem_grpo.environments.template import RendererError
from lowmem_grpo.environments.tools.results import TokenLimit
from lowmem_grpo.environments.tools.toolbox import Toolbox
from lowmem_grpo.types import Message, owned

logger = logging.getLogger(__name__)
HELD_OUT = 1 << 30  # the smallest seed of held-out rows


class Factories:
    """The `environment_factory`: a callable, or a dict of callables by the names in the column `environment`."""

    def __init__(self, value: Any) -> None:
        """Call each factory once, as a check. TypeError if a factory does not make an environment."""
        self.several = isinstance(value, Mapping)
        factories: Mapping[str, Any] = value if isinstance(value, Mapping) else {"": value}
        if not factories or not all(callable(factory) for factory in factories.values()):
            fix = f" (write {type(value).__name__}, not {type(value).__name__}())" if hasattr(value, "reset") else ""
            raise TypeError(f"environment_factory is {short(value)}; pass a class{fix}, or a dict of classes by name, "
                            "from which environments are made without arguments")
        self.by_name = {str(name): factory for name, factory in factories.items()}
        self.examples = {name: sample(factory, name) for name, factory in self.by_name.items()}

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the factory that a row asks for; ValueError if there is no such factory."""
        name = row.get("environment") if self.several else ""
        if str(name) not in self.by_name:
            raise ValueError(f"the row's environment is {name!r}, which is not among the environments; "
                             f"environment_factory has {', '.join(self.by_name)}")
        return str(name)

    def lacking(self, row: Mapping[str, Any]) -> str:
        """Return an error message if a row lacks a column that `reset` needs, else ""."""
        reset = self.examples[self.name_of(row)].reset
        needed = [parameter.name for parameter in inspect.signature(reset).parameters.values()
                  if parameter.default is parameter.empty
                  and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
        missing = next((name for name in needed if name not in row), None)
        if missing is None:
            return ""
        return (f"{reset.__qualname__} needs {missing!r}, and the row has {', '.join(row)}; rename the parameter or "
                "the column, or give the parameter a default")

    def make(self, row: Mapping[str, Any]) -> Any:
        factory = self.by_name[self.name_of(row)]
        try:
            made = factory()
        except Exception as error:
            raise EnvironmentFailedError(f"{short(factory)}() raised {type(error).__name__}: {short(error)}") from error
        if made is self.examples[self.name_of(row)]:
            raise EnvironmentFailedError(f"{short(factory)}() returned the same {type(made).__name__} twice; episodes "
                                         "run side by side, so each needs an environment of its own")
        return made

    def columns_for(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: owned(value) for name, value in row.items() if not (self.several and name == "environment")}

    @property
    def paying(self) -> list[type]:
        """The environment classes that give rewards, by `step` or `get_reward`."""
        return list({type(environment): None for environment in self.examples.values() if any(
            callable(getattr(environment, name, None)) for name in ("step", "get_reward"))})


def sample(factory: Callable[[], Any], name: str) -> Any:
    """Make an environment, close it and return it for inspection; TypeError if the factory makes something else."""
    label = f"environment_factory[{name!r}]" if name else "environment_factory"
    try:
        made = factory()
    except Exception as error:
        raise TypeError(f"{label}() raised {type(error).__name__}: {short(error)}; environments are made without "
                        "arguments (functools.partial gives them theirs)") from error
    if not callable(getattr(made, "reset", None)):
        raise TypeError(f"{label} made a {type(made).__name__} without a method reset(**row)")
    for method in ("get_reward", "state_key"):
        if isinstance(inspect.getattr_static(made, method, None), (property, cached_property, Real, str)):
            raise TypeError(f"{label} made a {type(made).__name__} whose {method} is no method, so nothing would "
                            f"call it; write it as a method: def {method}(self)")
    close_quietly(made)  # it is not played
    return made


def close_quietly(made: Any) -> None:
    """Close an environment, and only log a failure."""
    async def waiting(ended: Any) -> None:
        await ended

    try:
        ended = made.close() if callable(getattr(made, "close", None)) else None
        if inspect.isawaitable(ended):
            asyncio.run(waiting(ended))
    except Exception as error:  # noqa: BLE001  (user code may raise anything, and nothing depends on it)
        logger.warning("%s.close raised %s: %s", type(made).__name__, type(error).__name__, short(error))


class EnvSpecs:
    """The toolboxes and renderers of a run, shared by the rows that have the same environment."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Callable[..., Any]], factories: Factories | None,
        max_tool_tokens: int, template_kwargs: dict[str, Any], parse: Callable[..., Any] | str | None = None,
    ) -> None:
        """`tools` are available in every row, in addition to those of its environment."""
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers keep the options of their last call, so none is shared
        self.tools, self.factories, self.limit = list(tools), factories, TokenLimit(tokenizer, max_tool_tokens)
        self.template_kwargs = template_kwargs
        self.other: Renderer | PlainRenderer | None = None  # renders questions to the base model
        self.renderers: dict[tuple[Any, ...], Renderer | PlainRenderer] = {}  # by what they depend on of a row
        examples = {"": None} if factories is None else factories.examples
        functions = {name: [*tools, *([] if made is None else tools_of(made))] for name, made in examples.items()}
        self.toolboxes = {  # with the functions of the sample environment of each kind
            name: Toolbox(each, self.tokenizer, max_tool_tokens, parse, template_kwargs) if each else None
            for name, each in functions.items()}

    def name_of(self, row: Mapping[str, Any]) -> str:
        return "" if self.factories is None else self.factories.name_of(row)

    def renderer(self, row: Mapping[str, Any]) -> Renderer | PlainRenderer:
        """Return the renderer of a row's messages. Raises as `renderer_for`."""
        prompt = row.get("prompt") or []
        effort = effort_of(row, self.tokenizer)
        key = (self.name_of(row), isinstance(prompt, str), *effort.values())
        if key not in self.renderers:
            toolbox = self.toolbox_for(row)
            schemas = toolbox.schemas if toolbox else None
            self.renderers[key] = renderer_for(prompt, self.tokenizer, schemas, self.template_kwargs | effort)
        return self.renderers[key]

    def toolbox_for(self, row: Mapping[str, Any], made: Any = None) -> Toolbox | None:
        """Return a row's toolbox, whose functions call the environment `made`, by default a sample environment."""
        toolbox = self.toolboxes[self.name_of(row)]
        if toolbox is None or made is None:
            return toolbox
        return toolbox.with_functions([*self.tools, *tools_of(made)])

    def within(self, answer: Answer) -> Answer:
        """Return an answer with each message cut to `max_tool_tokens`."""
        answer.messages = [message | {"content": self.limit.cut(message["content"])} for message in answer.messages]
        return answer

    def asking(self, messages: list[Message]) -> list[int]:
        """Return the prompt (P,) of a question to the base model. Its text cannot become special tokens."""
        if self.other is None:
            prompt = [] if self.tokenizer.chat_template else ""
            self.other = renderer_for(prompt, self.tokenizer, None, self.template_kwargs)
        return self.other.first(messages, 0)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        schemas = [schema for toolbox in self.toolboxes.values() if toolbox for schema in toolbox.schemas]
        return schemas or None


class EpisodeEncoder(PromptEncoder):
    """Encodes prompts with tools or an environment, without the environment's first observation."""

    by_text = False  # tools and environments add to it

    def __init__(self, inner: PromptEncoder, specs: EnvSpecs) -> None:
        super().__init__(inner.tokenizer, inner.max_prompt_length, inner.template_kwargs)
        self.specs = specs
        if inner.truncate:
            raise ValueError("truncate_prompts=True would cut off what says which tools there are; leave it out")

    def of_any_length(self, row: dict[str, Any]) -> Prompt | str:
        try:
            self.specs.name_of(row)
        except ValueError as error:
            raise DataError(str(error)) from error
        if self.specs.factories is not None and (problem := self.specs.factories.lacking(row)):
            raise DataError(problem)
        messages = messages_of(row)
        if not all(map(is_message, messages)):
            return no_chat(row.get("prompt"), "prompt")
        if why := odd_role(messages, self.tokenizer):
            return why
        if self.specs.factories is None and not is_chat(messages):
            return "empty prompt"
        try:
            ids = self.specs.renderer(row).first(messages)
        except RendererError as error:
            raise DataError(str(error)) from error
        return Prompt(row, ids, str(self.tokenizer.decode(ids)))


def seeded_rows(count: int, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Return `count` rows with an empty prompt and a `seed`, which all episodes of a group pass to `reset(seed=...)`.
    Held-out rows never have a seed of the other rows."""
    drawn, least = random.Random(f"{seed}-{held_out}"), HELD_OUT if held_out else 0
    return [{"prompt": [{"role": "user", "content": ""}], "seed": least + drawn.getrandbits(30)} for _ in range(count)]


@dataclass
class WithPrompts:
    """The rows of a dataset. A row without a prompt gets an empty user message, as its environment makes the prompt."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        return row if row.get("prompt") else row | {"prompt": [{"role": "user", "content": ""}]}

    @property
    def stored(self) -> bool:
        return bool(getattr(self.rows, "stored", True))

    @property
    def column_names(self) -> list[str]:
        names = getattr(self.rows, "column_names", None) or list(self.rows[0])
        return [*names, *(["prompt"] if "prompt" not in names else [])]


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row's prompt. A text becomes a user message, and a missing prompt an empty one."""
    prompt = row.get("prompt") or ""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
