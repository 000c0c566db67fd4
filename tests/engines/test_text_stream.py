"""The text that a stream gives piece by piece: whole characters, no part of a stop string, in sum the whole text."""

import random
from typing import Any

import pytest
from small_models import TINY
from template_tokenizers import tokenizer_of
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import cut_at_stop
from lowmem_grpo.engines.text_stream import TextStream

WORDS = ["▁", "▁Hi", "▁there", "a", "b", ".", "▁.", "c", "<end>"]


def with_byte_fallback() -> Any:
    """As Llama 2 and Gemma decode: a run of bytes that is no text becomes a mark for each of its bytes."""
    vocabulary = {word: number for number, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def that_tidies() -> Any:
    """As BERT's: spaces before points are taken out of the whole text."""
    inner = Tokenizer(models.WordPiece({word: at for at, word in enumerate(["a", ".", "##b", "n't", "?", "do", "<e>"])},
                                       unk_token="<e>"))
    inner.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>", clean_up_tokenization_spaces=True)


TOKENIZERS = {"bytes": lambda: tokenizer_of("qwen2_5"), "embedded": lambda: AutoTokenizer.from_pretrained(TINY),
              "byte fallback": with_byte_fallback, "tidies": that_tidies}


def streamed(tokenizer: Any, ids: list[int], params: SamplingParams, sizes: list[int]) -> list[str]:
    """The pieces that come when tokens come in groups of these sizes, and the rest, which the whole text has."""
    stream, pieces, at = TextStream(tokenizer, params), list[str](), 0
    for size in sizes:
        pieces.append(stream.add(ids[at : at + size]))
        at += size
    whole = cut_at_stop(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens), params)
    return [*pieces, stream.finish(whole)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_of_any_tokens_are_the_text_of_all_of_them_and_begin_before_its_end(name: str) -> None:
    tokenizer, dice, early = TOKENIZERS[name](), random.Random(7), 0
    for trial in range(300):
        ids = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(1, 40))]
        if name == "byte fallback" and trial % 2:
            ids = [*(len(WORDS) + byte for byte in "東é 😀".encode()[: dice.randrange(1, 12)]), *ids]
        params = SamplingParams(stop=["ab", "b.", " there Hi"][: trial % 4] or None, skip_special_tokens=trial % 3 > 0,
                                include_stop_str_in_output=trial % 5 == 0)
        sizes = [dice.choice([1, 1, 2, 5]) for _ in ids]
        pieces = streamed(tokenizer, ids, params, sizes)
        whole = cut_at_stop(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens), params)
        assert "".join(pieces) == whole
        early += sum(map(len, pieces[:-1]))
    assert early > 300 if name != "tidies" else early == 0


def test_a_letter_of_several_tokens_comes_once_it_is_whole() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    ids = tokenizer("é東 😀!", add_special_tokens=False).input_ids
    pieces = streamed(tokenizer, ids, SamplingParams(), [1] * len(ids))
    assert len(ids) > 6, "some letters have several tokens"
    assert [piece for piece in pieces if piece] == ["é", "東", " ", "😀", "!"]


@pytest.mark.parametrize(("tokens", "given"), [
    (["x", "S", "T", "O", "x"], ["x", "", "", "", "STOx"]),
    (["x", "S", "T", "S", "T", "O", "P"], ["x", "", "", "ST", "", "", ""]),
    (["a STOP b"], ["a "]), (["STO", "P", "x"], ["", "", ""]), (["S", "S", "TOP"], ["", "S", ""]),
], ids=str)
def test_what_may_become_a_stop_string_is_held_and_the_stop_string_is_never_given(
    tokens: list[str], given: list[str]
) -> None:
    class Letters:
        """Tokens are texts."""

        def decode(self, ids: list[str], skip_special_tokens: bool) -> str:
            return "".join(ids)

        def convert_ids_to_tokens(self, token: str) -> str:
            return token

        backend_tokenizer = None

    stream = TextStream(Letters(), SamplingParams(stop="STOP"))
    assert [stream.add([token]) for token in tokens] == given  # type: ignore[list-item]


def test_a_text_that_does_not_begin_as_was_given_is_an_error() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    stream = TextStream(tokenizer, SamplingParams())
    assert stream.add(tokenizer("Good day", add_special_tokens=False).input_ids)
    with pytest.raises(RuntimeError, match="does not begin as was sent"):
        stream.finish("Bad day")
