"""Several targets for a token: dense and sparse matrices say the same, and what is wrong in one is named."""

from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.datum import MOST_WIDTH, ModelBounds, as_bytes, cells_of, output_of, pass_of

TOKENS = torch.tensor([[7, 0, 9], [0, 0, 0], [4, 5, 0]])
WEIGHTS = torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.25]])


def dense(values: torch.Tensor) -> Any:
    kind = wire.FLOAT32 if values.is_floating_point() else wire.INT64
    return wire.message("Tensor")(dense=as_bytes(values), dtype=kind, shape=list(values.shape))  # type: ignore[call-arg]


def sparse(values: torch.Tensor) -> Any:
    """As the protocol's client makes it: what is 0 is not listed."""
    made, (rows, columns) = dense(values), values.nonzero(as_tuple=True)
    made.sparse_csr.values, made.sparse_csr.col_indices = as_bytes(values[rows, columns]), as_bytes(columns)
    counts = torch.bincount(rows, minlength=len(values))
    made.sparse_csr.crow_indices = as_bytes(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    return made


def test_a_sparse_matrix_lists_what_either_of_the_two_lists() -> None:
    found = cells_of(sparse(TOKENS), sparse(WEIGHTS), "data[0]", 3)
    assert found.rows.tolist() == [0, 0, 2, 2, 2] and found.columns.tolist() == [0, 2, 0, 1, 2]
    assert torch.equal(found.matrix(found.tokens), TOKENS) and torch.equal(found.matrix(found.weights), WEIGHTS)


@pytest.mark.parametrize("layouts", [(dense, dense), (sparse, dense), (dense, sparse)])
def test_each_layout_says_the_same(layouts: Any) -> None:
    found = cells_of(layouts[0](TOKENS), layouts[1](WEIGHTS), "data[0]", 3)
    assert len(found.rows) == 9, "what one of them lists is there"
    assert torch.equal(found.matrix(found.tokens), TOKENS) and torch.equal(found.matrix(found.weights), WEIGHTS)


def spoiled(**changes: Any) -> Any:
    made = sparse(TOKENS)
    for name, values in changes.items():
        setattr(made.sparse_csr, name, as_bytes(torch.tensor(values)))
    return made


@every_row(("targets", "weights", "told"), [
    (spoiled(crow_indices=[0, 2, 2]), sparse(WEIGHTS), r"crow_indices must be 4 numbers"),
    (spoiled(crow_indices=[0, 3, 2, 4]), sparse(WEIGHTS), "never fall"),
    (spoiled(crow_indices=[-1, 2, 2, 4]), sparse(WEIGHTS), "never fall"),
    (spoiled(crow_indices=[0, 2, 2, 2**62]), sparse(WEIGHTS), "never fall"),
    (spoiled(col_indices=[0, 3, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled(col_indices=[0, -1, 0, 1]), sparse(WEIGHTS), "be 0 to 2"),
    (spoiled(col_indices=[1, 1, 0, 1]), sparse(WEIGHTS), "rise within a row"),
    (spoiled(values=[7, 9, 4]), sparse(WEIGHTS), "3 values for 4 places"),
    (dense(TOKENS[:2]), dense(WEIGHTS), r"shape \[2, 3\]; it must be \[3, K\]"),
    (dense(TOKENS), dense(WEIGHTS[:, :2]), r"shape \[3, 2\], and the targets \[3, 3\]"),
    (dense(TOKENS), dense(WEIGHTS * float("nan")), "NaN"),
    (dense(torch.zeros(3, MOST_WIDTH + 1, dtype=torch.long)), dense(WEIGHTS), "at most 128"),
    (dense(TOKENS.double()), dense(WEIGHTS), "dtype 1"), (dense(TOKENS), dense(TOKENS), "dtype 2"),
    (dense(TOKENS[None]), dense(WEIGHTS), "it must be"),
])
def test_a_wrong_matrix_is_named(targets: Any, weights: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cells_of(targets, weights, "data[0]", 3)


def request(loss: str = "cross_entropy", tokens: torch.Tensor = TOKENS) -> Any:
    made = wire.ForwardBackwardRequest(loss_fn=loss)
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = as_bytes(torch.tensor([5, 6, 7], dtype=torch.int32))
    datum.loss_fn_inputs["target_tokens"].CopyFrom(dense(tokens))
    for name in ("weights", "logprobs", "advantages"):
        datum.loss_fn_inputs[name].CopyFrom(dense(WEIGHTS))
    return made


def test_other_losses_and_unknown_tokens_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pass_of(request(), ModelBounds(100, 8)).data[0].cells is not None
    with pytest.raises(ValueError, match="which ppo does not take"):
        pass_of(request("ppo"), ModelBounds(100, 8))
    with pytest.raises(ValueError, match="the model's token ids are 0 to 7"):
        pass_of(request(), ModelBounds(8, 8))
    monkeypatch.setattr("lowmem_grpo.server.tinker.datum.MOST_CELLS", 8)
    with pytest.raises(ValueError, match="data has 9 targets; at most 8"):
        pass_of(request(), ModelBounds(100, 8))


def test_the_answer_tells_how_many_targets_each_datum_had() -> None:
    shapes = [(2, 3), (1, 3), (4,), (2, 1)]
    given = [torch.randn(shape) for shape in shapes]
    answer = wire.ForwardBackwardOutput.FromString(output_of(given, {}))
    assert [list(record.fields["logprobs"].trailing_shape) for record in answer.loss_fn_outputs] == [[3], [], [1]]
    assert [record.num_datums for record in answer.loss_fn_outputs] == [2, 1, 1]
