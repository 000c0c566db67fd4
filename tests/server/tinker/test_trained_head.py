"""Models whose output head is trained (`train_unembed`): each has its own, which every request sees."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from small_models import TINY, random_model
from tinker_server import OTHER, Server, body, same
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HEAD = "base_model.model.lm_head.weight"
UNEMBED = {"train_unembed": True}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model with a head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    random_model("Llama", tie_word_embeddings=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return str(folder)


def scores(server: Server, sampler: str, seq: int) -> Tensor:
    """The log-probabilities of a prompt."""
    reply = server.post("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": [5, 6, 7, 8, 9],
                                    "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}).json()
    told = server.post("retrieve_future", {"request_id": reply["request_id"]}, Accept="application/json").json()
    return torch.tensor(told["prompt_logprobs"][1:])


def test_two_clients_train_heads_that_samplers_restarts_and_saved_weights_have(untied: str, tmp_path: Path) -> None:
    server = Server(tmp_path, name=untied, heads=1)
    assert "the whole output head" in server.post("create_session", {}).json()["info_message"]
    first, second = server.create(**UNEMBED), server.create(key=OTHER, **UNEMBED)
    for step in range(2):  # each makes room for the other
        server.train(first, 2 * step + 1, step)
        server.wait(server.post("forward_backward", body(second, 2 * step + 1, step + 7), OTHER).json(), OTHER)
        server.asked("optim_step", OTHER, model_id=second, seq_id=2 * step + 2, adam_params={"learning_rate": 0.01})
    alone = Server(tmp_path / "alone", name=untied, heads=1)
    state = server.state(first)
    assert same(state, alone.state(alone.trained(2, **UNEMBED))), "the other client changed something"
    alone.close()
    base = AutoModelForCausalLM.from_pretrained(untied)
    assert not torch.equal(state[HEAD], base.lm_head.weight)
    path = server.asked("save_weights_for_sampler", model_id=first, seq_id=5, path="a")["path"]
    info = server.post("weights_info", {"tinker_path": path}).json()
    assert info["train_unembed"] is True
    saved = server.asked("save_weights", model_id=first, seq_id=6, path="b")["path"]
    again = server.asked("load_weights", session_id=first.partition(":")[0], model_seq_id=7, path=saved,
                         optimizer=True)["model_id"]
    assert same(server.state(again), state)
    server.close()
    following = Server(tmp_path, name=untied, heads=1)
    assert same(following.state(first), state)
    folder = next(each for each in following.model.training.checkpoints.folder.iterdir() if each.is_dir())
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied), folder)
    ids = torch.tensor([5, 6, 7, 8, 9])
    with torch.no_grad():
        for adapter, model in ((path, plain), (None, base)):
            expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            assert (scores(following, following.sampler(path=adapter), 1) - expected).abs().max() < 1e-4
    following.close()
    without = Server(tmp_path, name=untied)
    assert "started with --train-unembed N" in without.train(first, 7)["error"]
    without.close()


def test_a_server_without_the_option_trains_lora_alone_and_says_so(untied: str, tmp_path: Path) -> None:
    server = Server(tmp_path, name=untied)
    assert "lowmem-grpo serve --train-unembed N" in server.post("create_session", {}).json()["info_message"]
    model = server.create(**UNEMBED)
    server.train(model, 1)
    assert HEAD not in server.state(model)
    server.close()


def test_a_tied_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--train-unembed: the model ties its output head to its embedding"):
        Server(tmp_path, heads=1)
