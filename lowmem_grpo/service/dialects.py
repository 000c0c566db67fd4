"""`Dialects`: for each set of tools, what makes tokens of messages and what reads calls from completions."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.environments.tools.forms import Reads, parser_of
from lowmem_grpo.environments.tools.parsers import Reading, custom
from lowmem_grpo.service.messages import canonical

MOST = 64  # sets of tools that are remembered


@dataclass(frozen=True)
class Dialect:
    """For one set of tools and options of the template."""

    key: bytes
    renderer: Renderer
    parser: Reads | Callable[..., Any] | None

    def read(self, completion_ids: list[int], text: str) -> Reading:
        """What a completion says and calls."""
        if self.parser is None:
            return Reading(text)
        return custom(self.parser, text) if callable(self.parser) else self.parser.read(completion_ids, text)


class Dialects:
    """Those of one tokenizer, which nobody else may use meanwhile: it keeps the options of its last call."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None,
        parse: Callable[..., Any] | str | None = None,
    ) -> None:
        """`template_kwargs` hold where a request has none of its own; `parse` is as in `Toolbox`."""
        self.tokenizer = copy.deepcopy(tokenizer)
        self.template_kwargs, self.parse = dict(template_kwargs or {}), parse
        self.made: OrderedDict[bytes, Dialect] = OrderedDict()

    def of(self, tools: list[dict[str, Any]] | None, template_kwargs: Mapping[str, Any] | None = None) -> Dialect:
        """The dialect of some tools. RendererError without a chat template, ToolFormError where that has no calls."""
        kwargs = self.template_kwargs | dict(template_kwargs or {})
        key = canonical([tools or None, kwargs])
        if key not in self.made:
            self.made[key] = self.make(key, tools, kwargs)
        self.made.move_to_end(key)
        while len(self.made) > MOST:
            self.made.popitem(last=False)
        return self.made[key]

    def make(self, key: bytes, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> Dialect:
        """Look at the template once."""
        parser: Any = self.parse if tools and callable(self.parse) else None
        if tools and parser is None:
            parser = parser_of(self.tokenizer, tools, self.parse, kwargs)  # type: ignore[arg-type]
        return Dialect(key, Renderer(self.tokenizer, tools, kwargs), parser)
