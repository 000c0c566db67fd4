"""Score heads and second adapters give the scores of plain transformers and peft, and leave the model's own adapter,
its gradients, files and sampler as they are without them."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import family_model
from safetensors.torch import load_file, save_file
from small_models import TINY, save_wide, scatter
from torch import Tensor
from trainer_runs import load, moved
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Head, Policy
from lowmem_grpo.models.score_head import (
    AdapterSlot,
    add_score,
    delete_slot,
    group_to_score,
    read_reward_model,
    score_of_hidden,
)
from lowmem_grpo.runs.saved_adapter import AdapterError

TEXTS = [[5, 6, 7, 8, 9, 2], [5, 6, 7, 3, 2], [5, 6], [5, 6, 7, 8, 2, 2]]  # one is the beginning of the others
NAMES = ["q_proj", "o_proj"]


def saved_base(folder: Path, family: str = "llama", **changes: Any) -> Path:
    family_model(family, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def our_model(base: Path, target_parameters: Any = None, **options: Any) -> FastPeftModel:
    usual = {"max_seq_length": 64, "load_in_4bit": False, "device": "cpu", "fast_inference": "transformers"}
    bare, _ = FastLanguageModel.from_pretrained(str(base), **usual | options)
    made = FastLanguageModel.get_peft_model(bare, r=4, target_modules=NAMES, use_gradient_checkpointing=False,
                                            target_parameters=target_parameters)
    assert isinstance(made, FastPeftModel)
    return made


def plain(base: Path) -> Any:
    """A classifier as transformers makes it of a causal model: its head is random."""
    with warnings.catch_warnings(action="ignore"):
        return AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=None,
                                                                  dtype=torch.float32).eval()


def made_by_peft(base: Path, folder: Path, rank: int = 2, names: Any = NAMES, **settings: Any) -> Any:
    """A reward model that peft made and saved in a folder, with a LoRA that matters."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=names, task_type="SEQ_CLS", **settings)
    model = scatter(peft.get_peft_model(plain(base), config), 0.3, of="lora_B")
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def scores_alone(model: Any, texts: list[list[int]] = TEXTS) -> Tensor:
    return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in texts])


def scores_packed(policy: Policy, head: Head, texts: list[list[int]] = TEXTS) -> Tensor:
    group = group_to_score(texts)
    (batch,) = pack([group])
    scores = score_of_hidden(head, policy.at_trained(batch)[0])  # the longest first
    places = {id(rollout): place for place, rollout in enumerate(batch.rollouts)}
    return scores[[places[id(rollout)] for rollout in group.rollouts]]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text", "qwen3_moe", "gpt_oss"])
def test_a_slot_scores_as_peft_whose_reward_model_it_loads(tmp_path: Path, family: str) -> None:
    base = saved_base(tmp_path / "base", family)
    theirs = made_by_peft(base, tmp_path / "reward")
    policy = Policy(moved(our_model(base)))
    slot = AdapterSlot.of_folder(policy, "reward", tmp_path / "reward")
    with torch.no_grad(), slot.active():
        assert (scores_packed(policy, policy.head) - scores_alone(theirs)).abs().max() < 1e-5
    assert slot.nbytes == sum(each.nbytes for each in load_file(tmp_path / "reward/adapter_model.safetensors").values())


def test_texts_that_differ_from_their_first_token_on_have_no_score(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    theirs = made_by_peft(base, tmp_path / "reward")
    policy = Policy(our_model(base))
    slot = AdapterSlot.of_folder(policy, "reward", tmp_path / "reward")
    texts = [[5, 6, 7], [8, 6, 7, 2], [5], [9]]
    with torch.no_grad(), slot.active():
        assert (scores_packed(policy, policy.head, texts) - scores_alone(theirs, texts)).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gemma3_text", True)])
def test_plain_transformers_and_peft_score_alike_with_a_saved_head(tmp_path: Path, family: str, tied: bool) -> None:
    base = saved_base(tmp_path / "base", family, tie_word_embeddings=tied)
    model = moved(our_model(base))
    policy = Policy(model)
    policy.head = add_score(model, 7)
    scores = scores_packed(policy, policy.head)
    model.save_pretrained(tmp_path / "reward")
    theirs = peft.PeftModel.from_pretrained(plain(base), tmp_path / "reward").eval()
    assert (scores - scores_alone(theirs)).abs().max() < 1e-5
    config = peft.PeftConfig.from_pretrained(tmp_path / "reward")
    assert (str(config.task_type), config.modules_to_save) == ("SEQ_CLS", ["score"])
    _, tensors, score = read_reward_model(tmp_path / "reward")
    assert score.shape == (1, 32) and torch.equal(score, policy.head.weight) and len(tensors) == 8


@pytest.mark.parametrize("held", [{"load_in_4bit": True}, {"load_in_fp8": True}])
def test_on_quantized_weights_a_slot_computes_as_the_own_adapter_with_the_same_values(
    tmp_path: Path, held: dict[str, Any],
) -> None:
    base = save_wide(tmp_path / "base")
    own, other = moved(our_model(base, **held)), our_model(base, **held)
    (batch,) = pack([group_to_score(TEXTS)])
    with torch.no_grad():
        wanted = Policy(own).hidden(batch)
        slot = AdapterSlot(Policy(other), "reward", own.peft_config["default"])
        for weight in Policy(own).trained:
            slot.parameters[weight.saved_name].copy_(weight.parameter)
        with slot.active() as policy:
            assert torch.equal(policy.hidden(batch), wanted)
        assert not torch.equal(policy.hidden(batch), wanted)


def test_lora_on_experts_has_a_slot(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", "gpt_oss")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    theirs = made_by_peft(base, tmp_path / "reward", target_parameters=experts)
    model = our_model(base, target_parameters=experts)
    slot = AdapterSlot.of_folder(Policy(moved(model)), "reward", tmp_path / "reward")
    with torch.no_grad(), slot.active() as policy:
        assert (scores_packed(policy, policy.head) - scores_alone(theirs)).abs().max() < 1e-5


def test_a_head_begins_with_the_deviation_of_the_paper_and_follows_its_seed() -> None:
    rows = [add_score(load(), seed).weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    width = rows[0].shape[1]
    assert 0.5 < rows[0].std() * (width + 1) < 1.5 and rows[0].dtype == torch.float32
    slot = AdapterSlot(Policy(model := load()), "critic", model.peft_config["default"], trained=True)
    assert not slot.head.weight.any()


def test_head_and_lora_of_a_slot_have_the_gradients_of_peft(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    theirs = made_by_peft(base, tmp_path / "reward")
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    wanted = torch.stack([theirs(input_ids=torch.tensor([ids])).logits[0, 0] for ids in TEXTS])
    (wanted * weights).sum().backward()
    policy = Policy(moved(our_model(base)))
    slot = AdapterSlot.of_folder(policy, "critic", tmp_path / "reward", trained=True)
    with slot.active():
        (scores_packed(policy, policy.head) * weights).sum().backward()
    found = {name.replace(".default", "").replace(".modules_to_save", ""): each.grad
             for name, each in theirs.named_parameters() if each.grad is not None}
    assert found.keys() == slot.parameters.keys()
    for name, gradient in found.items():
        assert (slot.parameters[name].grad - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def with_slot(model: FastPeftModel, trained: bool = True) -> AdapterSlot:
    slot = AdapterSlot(Policy(model), "critic", model.peft_config["default"], seed=5, trained=trained)
    scatter(model, 0.5, of="lora_B.critic")
    return slot


def test_gradients_of_the_own_adapter_survive_a_slot_and_are_those_without_one() -> None:
    (batch,) = pack([group_to_score(TEXTS)])
    without, model = moved(load()), moved(load())
    slot = with_slot(model)
    policy = slot.policy
    Policy(without).logprobs(batch, 1.0)[0].sum().backward()
    policy.logprobs(batch, 1.0)[0].sum().backward()
    with slot.active():
        assert policy.trained.parameters == [each for name, each in slot.parameters.items() if "lora" in name]
        scores_packed(policy, policy.head).sum().backward()
    wanted = {name: each.grad for name, each in without.named_parameters() if each.requires_grad}
    mine = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert wanted.keys() == mine.keys() and policy.trained.parameters == [*policy.trainable]
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert policy.head.linear is model.get_base_model().get_output_embeddings()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_slot_trains_only_if_it_is_asked_to(frozen: bool) -> None:
    model = moved(load())
    slot = with_slot(model, trained=not frozen)
    with slot.active() as policy:
        assert any(each.requires_grad for each in slot.parameters.values()) != frozen
        assert scores_packed(policy, policy.head).requires_grad != frozen
    assert not any(each.requires_grad for each in slot.parameters.values())


def test_a_model_with_a_slot_is_saved_as_without_it(tmp_path: Path) -> None:
    plain_one, model = moved(load()), moved(load())
    with_slot(model)
    for folder, each in (("without", plain_one), ("with", model)):
        each.save_pretrained(tmp_path / folder)
        each.save_pretrained_merged(tmp_path / f"{folder}_merged")
    for suffix in ("", "_merged"):
        without, own = ({path.relative_to(folder) for path in folder.rglob("*")}
                        for folder in (tmp_path / f"without{suffix}", tmp_path / f"with{suffix}"))
        assert without == own
    for name in ("/adapter_model.safetensors", "_merged/model.safetensors"):
        one, other = (load_file(f"{tmp_path}/{folder}{name}") for folder in ("without", "with"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_model_samples_with_a_slot_as_without_it() -> None:
    answers = []
    for slotted in (False, True):
        model = moved(load())
        if slotted:
            slot = with_slot(model)
            with slot.active():
                pass
        (out,) = model.fast_generate("Start with 3.", SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0),
                                     model.current_lora())
        answers.append(list(out.outputs[0].token_ids))
    assert answers[0] == answers[1]


def test_the_reference_and_the_base_have_no_slot() -> None:
    model = moved(load())
    (batch,) = pack([group_to_score(TEXTS)])
    policy = Policy(model)
    with torch.no_grad():
        own = policy.logprobs(batch, 1.0)[0]
        with policy.base_model():
            base = policy.logprobs(batch, 1.0)[0]
        slot = with_slot(model)
        with slot.active():
            assert not torch.equal(scores_packed(policy, slot.head) + 1, own)
            assert not torch.equal(policy.hidden(batch), own)
        assert torch.equal(policy.logprobs(batch, 1.0)[0], own)
        with policy.base_model():
            assert torch.equal(policy.logprobs(batch, 1.0)[0], base)


def test_a_slot_is_replaced_and_deleted() -> None:
    model = moved(load())
    names = {name for name, _ in model.named_parameters()}
    with_slot(model)
    with_slot(model)
    assert model.loaded.slots == ["critic"]
    delete_slot(model, "critic")
    delete_slot(model, "critic")
    assert {name for name, _ in model.named_parameters()} == names and model.loaded.slots == []


def test_a_learner_trains_a_slot_and_leaves_the_policy() -> None:
    model = moved(load())
    slot = with_slot(model)
    torch.nn.init.ones_(slot.head.weight)
    before = copy.deepcopy({name: each.detach() for name, each in model.named_parameters()})
    optimizer = torch.optim.SGD(slot.parameters.values(), 0.1)
    with slot.active() as policy:
        scores_packed(policy, policy.head).sum().backward()
        optimizer.step()
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed and all(".critic." in name for name in changed) and len(slot.head.weight.unique()) > 1


def test_adapters_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    policy = Policy(our_model(base))
    made_by_peft(base, tmp_path / "more", names=["q_proj", "v_proj"])
    made_by_peft(base, tmp_path / "reward")
    policy.model.save_pretrained(tmp_path / "words")
    headless = dict(load_file(tmp_path / "reward/adapter_model.safetensors"))
    del headless["base_model.model.score.weight"]
    made_by_peft(base, tmp_path / "headless")
    save_file(headless, tmp_path / "headless/adapter_model.safetensors")
    made_by_peft(saved_base(tmp_path / "other", vocab_size=392), tmp_path / "elsewhere")
    for folder, words in (("more", "v_proj"), ("words", "no reward model"),
                          ("headless", r'modules_to_save=\["score"\]'),
                          ("elsewhere", r"trained on .*other, and this model is .*from_adapter\(.*any_base=True")):
        with pytest.raises(AdapterError, match=words):
            AdapterSlot.of_folder(policy, "reward", tmp_path / folder)
    slot = AdapterSlot.of_folder(policy, "reward", tmp_path / "reward")
    made_by_peft(base, tmp_path / "wide", rank=3)
    with pytest.raises(AdapterError, match=r"lora_A.weight is \[3, 32\] there, and \[2, 32\] here"):
        slot.load(tmp_path / "wide")
    AdapterSlot.of_folder(policy, "reward", tmp_path / "elsewhere", any_base=True)


def test_a_reward_model_is_no_model_of_words(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    made_by_peft(base, tmp_path / "reward")
    for refused in (lambda: FastLanguageModel.from_pretrained(str(tmp_path / "reward"), load_in_4bit=False),
                    lambda: our_model(base).load_lora(tmp_path / "reward")):
        with pytest.raises(AdapterError, match=r"is a reward model.*rewards.from_adapter\("):
            refused()
