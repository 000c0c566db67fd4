"""Where completions end: the same for rows on a device and for one row on the host."""

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.endings import Endings


@pytest.mark.parametrize("stop", ["END", "\n\n", "日本語の終わり", "🙂🙂🙂"])
def test_a_stop_string_is_seen_however_many_tokens_it_takes(tokenizer: PreTrainedTokenizerBase, stop: str) -> None:
    completion = tokenizer("Some text before. " + stop)["input_ids"]
    endings = Endings(tokenizer, SamplingParams(stop=stop), [2])
    for ids, ends in ((completion, True), (completion[:-1], False)):
        assert bool(endings.of(torch.tensor([ids])).all()) is ends
        assert endings.end(ids) is ends


def test_end_tokens_and_stop_tokens_end_a_row_unless_they_are_ignored(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [[7, 2], [7, 9], [2, 7]]
    for params, expected in ((SamplingParams(stop_token_ids=[9]), [True, True, False]),
                             (SamplingParams(ignore_eos=True), [False, False, False])):
        endings = Endings(tokenizer, params, [2])
        assert endings.of(torch.tensor(rows)).tolist() == expected
        assert [endings.end(row) for row in rows] == expected
