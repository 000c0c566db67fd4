"""Tokens in a reply: their texts and bytes."""

from small_models import TINY
from transformers import AutoTokenizer

from lowmem_grpo.server.openai.pending import TokenTexts


def test_an_id_that_pads_the_vocabulary_has_no_text_and_every_token_has_its_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = TokenTexts(tokenizer)
    assert texts.entry(371, -1.5) == {"token": "", "bytes": [], "logprob": -1.5}
    assert [texts.bytes_of(token).decode() for token in tokenizer(" What is 7?").input_ids] == [
        tokenizer.decode([token]) for token in tokenizer(" What is 7?").input_ids]
