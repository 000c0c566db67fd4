"""A published model that is served, asked with OpenAI's client: what plain transformers says, whole and as a stream."""

from pathlib import Path
from typing import Any

import pytest
import torch
from published_model import published_model
from served import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
CHAT: list[Any] = [{"role": "system", "content": "You are brief."},
                   {"role": "user", "content": "Say hello in French, Spanish and Chinese (你好)."}]
TOKENS = 24


def test_a_served_model_streams_what_it_replies_and_what_transformers_says(tmp_path: Path) -> None:
    folder = str(published_model().folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said = plain.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt):].tolist()
    asked: dict[str, Any] = {"model": folder, "messages": CHAT, "max_tokens": TOKENS, "temperature": 0,
                             "logprobs": True, "extra_body": {"return_token_ids": True}}
    drawn = asked | {"temperature": 1.0, "seed": 5, "stop": ["."]}
    options: dict[str, Any] = {"context": 256, "dtype": torch.float32, "load_in_16bit": True}
    with serving(tmp_path, folder, **options) as served, served.openai() as client:
        whole: Any = client.chat.completions.create(**asked)
        chunks: list[Any] = list(client.chat.completions.create(stream=True, **asked))
        other: Any = client.chat.completions.create(**drawn)
        others: list[Any] = list(client.chat.completions.create(stream=True, **drawn))
    assert (whole.prompt_token_ids, whole.choices[0].token_ids) == (prompt, said)
    assert chunks[-1].choices[0].token_ids == said
    text = tokenizer.decode(said, skip_special_tokens=True)
    for reply, stream in ((whole, chunks), (other, others)):
        content = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert content == reply.choices[0].message.content
        told = [entry for chunk in stream if (found := chunk.choices[0].logprobs) for entry in found.content]
        assert told == reply.choices[0].logprobs.content
    assert whole.choices[0].message.content == text
