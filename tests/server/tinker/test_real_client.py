"""The real client of the Tinker protocol against a server at a loopback address."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from served import MODEL, OWNER, Serving, tinker_client

tinker: Any = pytest.importorskip("tinker", reason="the client `tinker` is not installed: pip install tinker==0.38.0")


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with tinker_client(served) as made:
        yield made


def datum(ids: list[int], targets: list[int], **values: list[float]) -> Any:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids),
                        loss_fn_inputs={"target_tokens": targets, **values})


def data(count: int = 3) -> list[Any]:
    return [datum([5 + n % 300, 6, 7, 8], [6, 7, 8, 9], weights=[0.0, 1.0, 1.0, -0.5]) for n in range(count)]


def test_a_program_trains_and_its_loss_falls(client: Any) -> None:
    training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    assert training.get_info().lora_rank == 8
    asked = [(training.forward_backward(data(), "cross_entropy"), training.optim_step(tinker.AdamParams(
        learning_rate=0.001))) for _ in range(4)]  # none of them waits for the one before
    losses = []
    for passed, stepped in asked:
        found = passed.result()
        losses.append(found.metrics["loss:sum"])
        logprobs = [one["logprobs"].to_torch() for one in found.loss_fn_outputs]
        assert [len(one) for one in logprobs] == [4, 4, 4]
        weights = torch.tensor([0.0, 1.0, 1.0, -0.5])
        assert -sum(float((weights * one).sum()) for one in logprobs) == pytest.approx(losses[-1], rel=1e-5)
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_a_loss_of_the_programs_own_has_the_gradient_of_the_same_loss_here(client: Any, served: Serving) -> None:
    own, ours = (client.create_lora_training_client(base_model=MODEL, rank=4, seed=7).result() for _ in range(2))

    def squared(given: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((one.exp() * torch.tensor([1.0, -1.0, 0.5, 2.0])).sum() for one in logprobs), {}

    own.forward_backward_custom(data(), squared).result()
    behaved = ours.forward(data(), "cross_entropy").result()
    again = [datum([5 + n, 6, 7, 8], [6, 7, 8, 9], logprobs=one["logprobs"].to_torch().tolist(),
                   advantages=(-one["logprobs"].to_torch().exp() * torch.tensor([1.0, -1.0, 0.5, 2.0])).tolist())
             for n, one in enumerate(behaved.loss_fn_outputs)]
    ours.forward_backward(again, "importance_sampling").result()
    held = served.model.training.adapters.held
    found = [one.grad for one in held[own.model_id].parameters.values()]
    expected = [one.grad for one in held[ours.model_id].parameters.values()]
    assert sum(float(one.norm()) for one in expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "dro"])
def test_each_loss_with_old_log_probabilities_runs_with_its_settings(client: Any, loss: str) -> None:
    training = client.create_lora_training_client(base_model=MODEL, rank=2, train_unembed=False).result()
    given = [datum([5, 6], [6, 7], logprobs=[-3.0, -2.0], advantages=[1.0, -1.0])]
    settings = {"beta": 0.1} if loss == "dro" else {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert "loss:sum" in training.forward_backward(given, loss, settings).result().metrics


@pytest.mark.slow
def test_a_batch_of_many_requests_adds_up_in_their_order(client: Any, served: Serving) -> None:
    """Bit for bit what two requests of the program's own add up to, each to a model as it began."""
    whole, *others = (client.create_lora_training_client(base_model=MODEL, rank=2, seed=1).result() for _ in range(3))
    given = data(1030)  # the client sends at most 1,024 in a request
    found = whole.forward_backward(given, "cross_entropy").result()
    parts = [training.forward_backward(part, "cross_entropy").result()
             for training, part in zip(others, (given[:1024], given[1024:]), strict=True)]
    expected = [one["logprobs"].to_torch() for part in parts for one in part.loss_fn_outputs]
    assert len({tuple(one.tolist()) for one in expected[-6:]}) == 6, "their order is seen"
    for one, logprobs in zip(found.loss_fn_outputs, expected, strict=True):
        assert torch.equal(one["logprobs"].to_torch(), logprobs)
    assert found.metrics["loss:sum"] == pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-12)
    held = served.model.training.adapters.held
    gradients = [[one.grad for one in held[training.model_id].parameters.values()] for training in (whole, *others)]
    for total, first, second in zip(*gradients, strict=True):
        assert torch.equal(total, first + second)
    assert all(sum(float(one.norm()) for one in of) > 0 for of in gradients)


def test_a_snapshot_samples_with_the_adapter_and_stays_as_it_was_while_training_goes_on(client: Any) -> None:
    training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    base = client.create_sampling_client(base_model=MODEL).result()
    given = datum([5, 6, 7, 8], [6, 7, 8, 9], weights=[1.0] * 4)
    for _ in range(3):
        training.forward_backward([given], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.003)).result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8, 9])
    of_training = training.forward([given], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    found = snapshot.compute_logprobs(prompt).result()
    assert found[0] is None and found[1:] == pytest.approx(of_training.tolist(), rel=1e-4)
    assert sum(base.compute_logprobs(prompt).result()[1:]) < sum(found[1:]) - 1
    training.forward_backward([given], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    assert snapshot.compute_logprobs(prompt).result() == found


def test_samples_have_their_number_their_seed_and_their_log_probabilities(client: Any) -> None:
    base = client.create_sampling_client(base_model=MODEL).result()
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
    params = tinker.SamplingParams(max_tokens=6, seed=11, temperature=1.0, stop=[])
    first, again = (base.sample(prompt=prompt, num_samples=3, sampling_params=params).result() for _ in range(2))
    tokens = [list(one.tokens) for one in first.sequences]
    assert tokens == [list(one.tokens) for one in again.sequences] and len({tuple(one) for one in tokens}) > 1
    assert [(len(one), sequence.stop_reason) for one, sequence in zip(tokens, first.sequences, strict=True)] == [
        (6, "length")] * 3
    copy = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=OWNER)  # for another process
    whole = copy.compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, 8, *tokens[0]])).result()
    assert list(first.sequences[0].logprobs) == pytest.approx(whole[4:], rel=1e-3, abs=1e-4)


def test_weights_under_a_name_are_trained_on_and_sampled_with(client: Any) -> None:
    rest = client.create_rest_client()
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1, user_metadata={"a": "b"}).result()
    run = rest.get_training_run(training.model_id).result()
    assert run.user_metadata == {"a": "b"} and run.last_request_time.year > 1970
    training.forward_backward(data(), "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    state = training.save_state("half").result().path
    path = training.save_weights_for_sampler("half", user_metadata={"step": "1"}).result().path
    again = client.create_training_client_from_state_with_optimizer(state).result()
    fresh = client.create_training_client_from_state(state).result()
    found = [one.forward(data(1), "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch().tolist()
             for one in (training, again, fresh)]
    assert found[0] == found[1] == found[2]
    sampler = client.create_sampling_client(model_path=path).result()
    logprobs = sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, 8, 9])).result()
    assert logprobs[1:] == pytest.approx(found[0], rel=1e-4)
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert rest.get_sampler(sampler._sampling_session_id).result().model_path == path
    pages = [rest.list_user_checkpoints(limit=1, offset=offset).result().checkpoints for offset in (0, 1)]
    assert [[(entry.checkpoint_id, entry.user_metadata) for entry in page] for page in pages] == [
        [("sampler_weights/half", {"step": "1"})], [("weights/half", None)]]
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(Exception, match="no such weights"):
        client.create_training_client_from_state(state).result()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_several_targets_for_a_token_are_trained_on_and_their_log_probabilities_told(
    client: Any, is_sparse: bool
) -> None:
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1, train_unembed=False).result()
    tokens, weights = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, 9)
    tokens[1:3, :2], weights[1:3, :2] = torch.tensor([[6, 7], [8, 9]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    made = tinker.TensorData.from_torch_sparse if is_sparse else tinker.TensorData.from_torch
    given = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]),
                         loss_fn_inputs={"target_tokens": made(tokens), "weights": made(weights)})
    assert (given.loss_fn_inputs["weights"].sparse_crow_indices is not None) == is_sparse
    found = training.forward_backward([given, data(1)[0]], "cross_entropy").result()
    logprobs, alone = (one["logprobs"].to_torch() for one in found.loss_fn_outputs)
    assert logprobs.shape == (4, 9) and alone.shape == (4,)
    for k in range(2):
        one_each = datum([5, 6, 7, 8], tokens[:, k].tolist(), weights=[1.0] * 4)
        one = training.forward([one_each], "cross_entropy").result()
        assert torch.allclose(logprobs[1:3, k], one.loss_fn_outputs[0]["logprobs"].to_torch()[1:3], atol=1e-5)
    expected = -(weights * logprobs).sum() - (torch.tensor([0.0, 1.0, 1.0, -0.5]) * alone).sum()
    assert found.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)
    assert training.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] > 0


def test_the_likeliest_tokens_of_a_prompt_and_its_last_ones_only(client: Any) -> None:
    base = client.create_sampling_client(base_model=MODEL).result()
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
    asked = {"prompt": prompt, "num_samples": 1, "sampling_params": tinker.SamplingParams(max_tokens=1)}
    found = base.sample(**asked, include_prompt_logprobs=True, topk_prompt_logprobs=4).result()
    assert found.topk_prompt_logprobs[0] is None and [len(one) for one in found.topk_prompt_logprobs[1:]] == [4] * 3
    likeliest = max(logprob for _, logprob in found.topk_prompt_logprobs[2])
    assert found.topk_prompt_logprobs[2][0][1] == likeliest >= found.prompt_logprobs[2]
    last = base.sample(**asked, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert last.prompt_logprobs[:2] == [None, None]
    assert last.prompt_logprobs[2:] == pytest.approx(found.prompt_logprobs[2:], abs=1e-5)
