"""Demonstrations in several turns: a tokenizer and a chat template that know tools, and batches of conversations."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from bench.tiny_models.from_scratch import Batch, Row, make_model, make_tokenizer, padded
from lowmem_grpo.models.stored_model import resolve

TOOL_MARKS = ["<tool_call>", "</tool_call>"]  # single tokens, as in other models that call tools
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}{% set it = tool.function or tool %} {{ it.name }}"
    "({{ it.parameters.properties.keys() | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{% set it = call.function or call %}<tool_call>\n"
    '{"name": "{{ it.name }}", "arguments": {{ it.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")  # tied: one tensor
Talk = list[dict[str, Any]]  # messages
Tools = list[dict[str, Any]]  # schemas
Source = Callable[[], tuple[Talk, Tools | None]]  # gives one demonstration, and the tools that it has


def talk_tokenizer(
    sources: Iterator[Source], vocab_size: int, words: Iterable[str] = (), phrases: Iterable[str] = (),
    count: int = 3000,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, learned from `count` demonstrations. Each of `words` is one token
    where it stands as a whole word, and each of `phrases` wherever it stands."""
    talks = (source()[0] for source, _ in zip(sources, range(count), strict=False))
    texts = [f"{message['role']}\n{message['content']}\n{json.dumps(message.get('tool_calls', ''))}\nsystem\nTools: "
             for talk in talks for message in talk]
    added: list[str | AddedToken] = [
        *TOOL_MARKS, *(AddedToken(word, single_word=True, normalized=False) for word in words),
        *(AddedToken(phrase, normalized=False) for phrase in phrases),
    ]
    tokenizer = make_tokenizer(texts, vocab_size - len(added))
    tokenizer.add_tokens(added)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def called(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a turn of the assistant that calls a tool."""
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def encode_talk(tokenizer: PreTrainedTokenizerFast, talk: Talk, tools: Tools | None) -> Row:
    """Return the ids of a whole conversation, and which of them the assistant wrote."""
    ids: list[int] = []
    own: list[bool] = []
    for place, message in enumerate(talk):
        if message["role"] == "assistant":
            for end, mine in ((place, False), (place + 1, True)):
                text = str(tokenizer.apply_chat_template(
                    talk[:end], tools=tools, tokenize=False, add_generation_prompt=not mine,  # type: ignore[arg-type]
                ))
                new = tokenizer.encode(text.removesuffix("\n") if mine else text, add_special_tokens=False)[len(ids):]
                ids += new
                own += [mine] * len(new)
    return ids, own


def talk_batches(tokenizer: PreTrainedTokenizerFast, sources: Iterator[Source], size: int) -> Iterator[Batch]:
    """Yield batches without end, each of one source; only the assistant's turns are trained."""
    for source in sources:
        yield padded(tokenizer, [encode_talk(tokenizer, *source()) for _ in range(size)])


def begun(start: str, tokenizer: PreTrainedTokenizerFast, seed: int, shape: dict[str, Any]) -> Qwen2ForCausalLM:
    """Return the model `start` with embeddings for another tokenizer: tokens of both vocabularies keep theirs."""
    folder = resolve(start)
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    known = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
    model = make_model(tokenizer, seed, shape)
    new = model.model.embed_tokens.weight.detach().clone()
    for token, place in tokenizer.get_vocab().items():
        if token in known:
            new[place] = old.model.embed_tokens.weight[known[token]]
    weights = old.state_dict() | dict.fromkeys(EMBEDDINGS, new)
    model.load_state_dict(weights)
    return model
