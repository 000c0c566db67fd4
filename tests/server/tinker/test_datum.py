"""A client's datums: what is read, what is refused, and the answer; dense and sparse matrices of several targets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.datum import MOST_WIDTH, ModelBounds, as_bytes, output_of, pass_of

BOUNDS = ModelBounds(vocabulary=100, context=8)
TOKENS = torch.tensor([[7, 0, 9], [0, 0, 0], [4, 5, 0]])
WEIGHTS = torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.25]])


def dense(values: torch.Tensor) -> Any:
    kind = wire.FLOAT32 if values.is_floating_point() else wire.INT64
    return wire.message("Tensor")(dense=as_bytes(values), dtype=kind, shape=list(values.shape))  # type: ignore[call-arg]


def request(ids: Any = (5, 6, 7), targets: Any = (6, 7, 8), weights: Any = (1.0, -0.5, 0.25),
            loss: str = "cross_entropy", **others: torch.Tensor) -> Any:
    """A request of one datum."""
    made = wire.ForwardBackwardRequest(model_id="run", seq_id=1, loss_fn=loss)
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = as_bytes(torch.tensor(ids, dtype=torch.int32))
    for name, values in {"target_tokens": targets, "weights": weights, **others}.items():
        datum.loss_fn_inputs[name].CopyFrom(dense(torch.as_tensor(values)))
    return made


def test_a_datum_is_read_with_targets_that_need_not_be_the_next_tokens() -> None:
    found = pass_of(request(targets=[9, 9, 1]), BOUNDS)
    [datum] = found.data
    assert (datum.ids, datum.targets.tolist()) == ([5, 6, 7], [9, 9, 1])
    assert datum.values["weights"].tolist() == [1.0, -0.5, 0.25]
    assert (found.loss, found.settings, found.forward_only) == ("cross_entropy", {}, False)


def spoiled(spoil: Callable[[Any, Any], object]) -> Any:
    """A request after `spoil(datum, its weights)`."""
    made = request()
    spoil(made.data[0], made.data[0].loss_fn_inputs["weights"])
    return made


@every_row(("made", "told"), [
    (wire.ForwardBackwardRequest(loss_fn="cross_entropy"), "data is empty"),
    (spoiled(lambda datum, _: datum.model_input.add(image={"format": "png"})),
     r"data\[0\].model_input.chunks\[1\] is image"),
    (spoiled(lambda datum, _: [datum.model_input.add() for _ in range(8)]), "has 9 tokens or chunks"),
    (request(mask=torch.zeros(3)), "'mask'"),
    (request(targets=TOKENS), r"weights'\] has the shape \[3\], and the targets \[3, 3\]"),
    (spoiled(lambda _, weights: weights.sparse_csr.SetInParent()), "is sparse"),
    (spoiled(lambda datum, _: datum.loss_fn_inputs.pop("weights")), "lacks 'weights'"),
    (spoiled(lambda _, weights: setattr(weights, "dense", b"\0" * 11)), "has 11 bytes"),
    (spoiled(lambda _, weights: setattr(weights, "dtype", wire.INT64)), "dtype 2"),
    (spoiled(lambda _, weights: weights.shape.__setitem__(0, 4)), r"shape \[4\]; it must be \[3\]"),
    (request(ids=[]), "no tokens"), (request(ids=[5, 100, 7]), "is 100"),
    (request(ids=[5, -1, 7]), "is -1"), (request(targets=[1, 2, 2**40]), r"\[2\] is 1099511627776"),
    (request(targets=[1, 2]), r"shape \[2\]"), (request(ids=list(range(9))), "at most 8"),
    (request(targets=[-100, 1, 2]), "is -100; .* the weight 0"),
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


def sparse(values: torch.Tensor) -> Any:
    """Return a sparse matrix as the protocol's client makes it: zeros are not listed."""
    made, (rows, columns) = dense(values), values.nonzero(as_tuple=True)
    made.sparse_csr.values, made.sparse_csr.col_indices = as_bytes(values[rows, columns]), as_bytes(columns)
    counts = torch.bincount(rows, minlength=len(values))
    made.sparse_csr.crow_indices = as_bytes(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    return made


def cells_of(targets: Any, weights: Any) -> Any:
    """Return the cells of a datum of three tokens with these tensors."""
    made = request()
    for name, tensor in (("target_tokens", targets), ("weights", weights)):
        made.data[0].loss_fn_inputs[name].CopyFrom(tensor)
    return pass_of(made, BOUNDS).data[0].cells


def test_a_sparse_matrix_lists_what_either_of_the_two_lists() -> None:
    found = cells_of(sparse(TOKENS), sparse(WEIGHTS))
    assert found.rows.tolist() == [0, 0, 2, 2, 2] and found.columns.tolist() == [0, 2, 0, 1, 2]
    assert torch.equal(found.matrix(found.tokens), TOKENS) and torch.equal(found.matrix(found.weights), WEIGHTS)


@pytest.mark.parametrize("layouts", [(dense, dense), (sparse, dense), (dense, sparse)])
def test_each_layout_says_the_same(layouts: Any) -> None:
    found = cells_of(layouts[0](TOKENS), layouts[1](WEIGHTS))
    assert len(found.rows) == 9, "what one of them lists is there"
    assert torch.equal(found.matrix(found.tokens), TOKENS) and torch.equal(found.matrix(found.weights), WEIGHTS)


def spoiled_matrix(**changes: Any) -> Any:
    made = sparse(TOKENS)
    for name, values in changes.items():
        setattr(made.sparse_csr, name, as_bytes(torch.tensor(values)))
    return made


@every_row(("targets", "weights", "told"), [
    (spoiled_matrix(crow_indices=[0, 2, 2]), sparse(WEIGHTS), r"crow_indices must be 4 numbers"),
    (spoiled_matrix(crow_indices=[0, 3, 2, 4]), sparse(WEIGHTS), "never fall"),
    (spoiled_matrix(crow_indices=[-1, 2, 2, 4]), sparse(WEIGHTS), "never fall"),
    (spoiled_matrix(crow_indices=[0, 2, 2, 2**62]), sparse(WEIGHTS), "never fall"),
    # differences that wrap round to what looks like a rise: -2**63 + 5 less 2**62 is 2**62 + 5
    (spoiled_matrix(crow_indices=[0, 2**62, -(2**63) + 5, 4]), sparse(WEIGHTS), "never fall"),
    (spoiled_matrix(crow_indices=[0, 2**63 - 1, -(2**63) + 1, 4]), sparse(WEIGHTS), "never fall"),
    (sparse(TOKENS), spoiled_matrix(crow_indices=[0, 2**62, -(2**63) + 5, 4]), "dtype 2|never fall"),
    (spoiled_matrix(col_indices=[0, -(2**63), 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled_matrix(col_indices=[2**63 - 1, 2, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled_matrix(col_indices=[0, 3, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled_matrix(col_indices=[0, -1, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled_matrix(col_indices=[-1, 2, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),  # which rises
    (spoiled_matrix(col_indices=[1, 1, 0, 1]), sparse(WEIGHTS), "rise within a row"),
    (spoiled_matrix(values=[7, 9, 4]), sparse(WEIGHTS), "3 values for 4 places"),
    (dense(TOKENS[:2]), dense(WEIGHTS), r"shape \[2, 3\]; it must be .*\[3, K\]"),
    (dense(TOKENS), dense(WEIGHTS[:, :2]), r"shape \[3, 2\], and the targets \[3, 3\]"),
    (dense(TOKENS), dense(WEIGHTS * float("nan")), "NaN"),
    (dense(torch.zeros(3, MOST_WIDTH + 1, dtype=torch.long)), dense(WEIGHTS), "at most 128"),
    (dense(TOKENS.double()), dense(WEIGHTS), "dtype 1"), (dense(TOKENS), dense(TOKENS), "dtype 2"),
    (dense(TOKENS[None]), dense(WEIGHTS), "it must be"),
])
def test_a_wrong_matrix_is_named(targets: Any, weights: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cells_of(targets, weights)


def test_other_losses_and_unknown_tokens_are_refused_by_name_with_several_targets(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    several = request(targets=TOKENS, weights=WEIGHTS)
    assert pass_of(several, BOUNDS).data[0].cells is not None
    with pytest.raises(ValueError, match="which ppo does not take"):
        pass_of(request(targets=TOKENS, loss="ppo", logprobs=WEIGHTS, advantages=WEIGHTS), BOUNDS)
    with pytest.raises(ValueError, match="the model's token ids are 0 to 7"):
        pass_of(several, ModelBounds(8, 8))
    monkeypatch.setattr("lowmem_grpo.server.tinker.datum.MOST_CELLS", 8)
    with pytest.raises(ValueError, match="data has 9 targets; at most 8"):
        pass_of(several, BOUNDS)


def test_the_answer_tells_how_many_targets_each_datum_had() -> None:
    shapes = [(2, 3), (1, 3), (4,), (2, 1)]
    given = [torch.randn(shape) for shape in shapes]
    answer = wire.ForwardBackwardOutput.FromString(output_of(given, {}))
    assert [list(record.fields["logprobs"].trailing_shape) for record in answer.loss_fn_outputs] == [[3], [], [1]]
    assert [record.num_datums for record in answer.loss_fn_outputs] == [2, 1, 1]
