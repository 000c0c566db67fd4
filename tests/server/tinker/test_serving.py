"""A model is served however it was loaded: in 4 bits, with its embedding on the host, both, or in FP8."""

from pathlib import Path
from typing import Any

import pytest
from served import MODEL, serving, tinker_client

tinker: Any = pytest.importorskip("tinker", reason="the client `tinker` is not installed: pip install tinker==0.38.0")


@pytest.mark.parametrize("loading", [
    {"load_in_4bit": True}, {"offload_embedding": True}, {"load_in_4bit": True, "offload_embedding": True},
    {"load_in_4bit": None, "load_in_fp8": True}], ids=["4bit", "offload", "both", "fp8"])
@pytest.mark.every(2)
def test_it_trains_and_samples(tmp_path: Path, loading: dict[str, Any]) -> None:
    with serving(tmp_path, **loading) as served, tinker_client(served) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1, train_unembed=False).result()
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs={
            "target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]
        losses = []
        for _ in range(3):
            losses.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(tinker.AdamParams(learning_rate=0.003)).result()
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5
        sampler = training.save_weights_and_get_sampling_client().result()
        found = sampler.sample(prompt=tinker.ModelInput.from_ints([5]), num_samples=2,
                               sampling_params=tinker.SamplingParams(max_tokens=4, stop=[])).result()
        assert [len(one.tokens) for one in found.sequences] == [4, 4]
