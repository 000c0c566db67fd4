"""A client's datums: what is read, what is refused, and the answer."""

from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.datum import ModelBounds, as_bytes, output_of, pass_of

BOUNDS = ModelBounds(vocabulary=100, context=8)


def request(ids: list[int] = [5, 6, 7], targets: list[int] = [6, 7, 8], **others: Any) -> Any:  # noqa: B006
    """A cross_entropy request of one datum."""
    made = wire.ForwardBackwardRequest(model_id="run", seq_id=1, loss_fn=others.get("loss", "cross_entropy"))
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = as_bytes(torch.tensor(ids, dtype=torch.int32))
    put(datum, "target_tokens", torch.tensor(targets), wire.INT64)
    put(datum, "weights", torch.tensor(others.get("weights", [1.0, -0.5, 0.25])), wire.FLOAT32)
    return made


def put(datum: Any, name: str, values: torch.Tensor, dtype: int) -> None:
    tensor = datum.loss_fn_inputs[name]
    tensor.dense, tensor.dtype = as_bytes(values), dtype
    tensor.shape.extend(values.shape)


def test_a_datum_is_read_with_targets_that_need_not_be_the_next_tokens() -> None:
    found = pass_of(request(targets=[9, 9, 1]), BOUNDS)
    [datum] = found.data
    assert (datum.ids, datum.targets.tolist()) == ([5, 6, 7], [9, 9, 1])
    assert datum.values["weights"].tolist() == [1.0, -0.5, 0.25]
    assert (found.loss, found.settings, found.forward_only) == ("cross_entropy", {}, False)


def spoiled(spoil: str) -> Any:
    made = request()
    datum = made.data[0]
    if spoil == "no data":
        del made.data[:]
    elif spoil == "image":
        datum.model_input.add().image.format = "png"
    elif spoil == "unknown input":
        put(datum, "mask", torch.zeros(3), wire.FLOAT32)
    elif spoil == "two targets":
        del datum.loss_fn_inputs["target_tokens"]
        put(datum, "target_tokens", torch.zeros(3, 2, dtype=torch.int64), wire.INT64)
    elif spoil == "sparse":
        datum.loss_fn_inputs["weights"].sparse_csr.values = b"\0" * 4
    elif spoil == "missing":
        del datum.loss_fn_inputs["weights"]
    elif spoil == "cut bytes":
        datum.loss_fn_inputs["weights"].dense = b"\0" * 11
    elif spoil == "dtype":
        datum.loss_fn_inputs["weights"].dtype = wire.INT64
    elif spoil == "shape":
        datum.loss_fn_inputs["weights"].shape[0] = 4
    return made


@every_row(("made", "told"), [
    (spoiled("no data"), "data is empty"), (spoiled("image"), r"data\[0\].model_input.chunks\[1\] is image"),
    (spoiled("unknown input"), "'mask'"),
    (spoiled("two targets"), r"weights'\] has the shape \[3\]; it must be \[3, K\]"),
    (spoiled("sparse"), "may be sparse"),
    (spoiled("missing"), "lacks 'weights'"), (spoiled("cut bytes"), "11 bytes"), (spoiled("dtype"), "dtype 2"),
    (spoiled("shape"), r"\[4\] and 3 values"), (request(ids=[]), "no tokens"), (request(ids=[5, 100, 7]), "is 100"),
    (request(ids=[5, -1, 7]), "is -1"), (request(targets=[1, 2, 2**40]), r"\[2\] is 1099511627776"),
    (request(targets=[1, 2]), "2 values"), (request(ids=list(range(9))), "at most 8"),
    (request(weights=[1.0, float("nan"), 0.0]), "NaN"), (request(loss="ppo"), "lacks 'logprobs'"),
    (request(loss="stable_reinforce"), "importance_sampling"),
])
def test_a_wrong_datum_is_refused_with_the_name_of_its_field(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pass_of(made, BOUNDS)


def test_the_answer_has_the_log_probabilities_of_each_datum_between_its_offsets() -> None:
    body = output_of([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])], {"loss:sum": 4.0})
    answer = wire.ForwardBackwardOutput.FromString(body)
    [record] = answer.loss_fn_outputs
    field = record.fields["logprobs"]
    assert torch.frombuffer(bytearray(field.data), dtype=torch.float32).tolist() == [-1.0, -2.0, -3.0]
    assert torch.frombuffer(bytearray(field.offsets), dtype=torch.int64).tolist() == [0, 8, 12]
    assert (record.num_datums, dict(answer.metrics)) == (2, {"loss:sum": 4.0})
