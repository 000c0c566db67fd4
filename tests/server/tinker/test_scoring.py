"""Log-probabilities of prompts, computed together: those of whole logits, of one pass, and of the right adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_server import Server
from torch import Tensor

from lowmem_grpo.server.openai.request_queue import WorkerClosedError
from lowmem_grpo.server.tinker.sampling import NONE, PromptScoring, Scored


@pytest.fixture(scope="module")
def adapter(one_server: Server) -> Path:
    """A folder of a trained model's weights."""
    one_server.asked("save_weights_for_sampler", model_id=one_server.trained(), seq_id=3, path="s")
    [path] = one_server.model.training.checkpoints.folder.iterdir()
    return path


def whole(server: Server, ids: list[int], adapter: Path | None) -> Tensor:
    """Log-probabilities (P, V) by whole logits."""
    def compute() -> Tensor:
        worker = server.model.worker
        batch = torch.tensor([ids])
        with torch.no_grad(), worker.computing_with(adapter):
            found: Tensor = worker.model.inner(input_ids=batch).logits[0].float().log_softmax(-1)
        return found

    return server.model.worker.run(compute).result()


def test_many_prompts_are_scored_in_one_pass_for_each_adapter(
    one_server: Server, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring, passes = PromptScoring(one_server.model.worker), []
    plain = one_server.model.worker.policy.logprobs
    monkeypatch.setattr(one_server.model.worker.policy, "logprobs", lambda *given: passes.append(1) or plain(*given))
    torch.manual_seed(0)
    prompts = [torch.randint(3, 300, (length,)).tolist() for length in (5, 17, 2, 9, 1, 30)]
    with one_server.held_up():
        asked = [(ids, place, scoring.ask(ids, place)) for ids in prompts for place in (None, adapter)]
    found: list[tuple[list[int], Any, Scored]] = [(ids, place, one.result(60)) for ids, place, one in asked]
    assert len(passes) == 2
    for ids, place, scored in found:
        expected = whole(one_server, ids, place)[torch.arange(len(ids) - 1), ids[1:]]
        assert scored.logprobs[0].isnan() and torch.allclose(scored.logprobs[1:], expected, atol=2e-5)
        assert scored.ids.shape == scored.values.shape == (len(ids), 0)


def test_the_likeliest_tokens_are_those_of_whole_logits_and_each_gets_as_many_as_asked(one_server: Server) -> None:
    scoring, ids = PromptScoring(one_server.model.worker), [5, 6, 7, 8, 9]
    with one_server.held_up():
        asked = [scoring.ask(ids, None, top, last) for top, last in ((3, None), (0, None), (7, 2))]
    three, none, seven = [one.result(60) for one in asked]
    logprobs = whole(one_server, ids, None)
    top, expected = logprobs.topk(7, -1), logprobs[torch.arange(4), ids[1:]]
    assert torch.equal(three.ids[1:].long(), top.indices[:4, :3])
    assert torch.allclose(three.values[1:], top.values[:4, :3], atol=2e-5)
    assert three.ids[0].tolist() == [0] * 3 and three.values[0].tolist() == [NONE] * 3
    assert none.ids.shape == (5, 0) and seven.logprobs[:3].isnan().all()
    for found, first in ((three, 1), (none, 1), (seven, 3)):
        assert torch.allclose(found.logprobs[first:], expected[first - 1:], atol=2e-5)
    assert (seven.values[:3] == NONE).all() and torch.equal(seven.ids[3:].long(), top.indices[2:4])


def test_what_is_too_much_for_one_job_of_the_worker_comes_in_later_ones(
    one_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.tinker.sampling.AT_ONCE", 7)
    scoring = PromptScoring(one_server.model.worker)
    with one_server.held_up():
        asked = [scoring.ask([5] * length, None) for length in (3, 4, 9, 2)]
        assert [len(one.ids) for one in scoring.waiting] == [3, 4, 9, 2]
    assert [len(one.result(60).logprobs) for one in asked] == [3, 4, 9, 2] and scoring.waiting == []


def test_a_turn_of_a_user_scores_no_prompts_of_others(one_server: Server) -> None:
    scoring = PromptScoring(one_server.model.worker)
    with one_server.held_up():
        asked = [scoring.ask([5] * length, None, owner=owner) for length, owner in ((2, "ann"), (3, "bob"), (4, "ann"))]
        taken = scoring.next_prompts("ann")
        assert [len(one.ids) for one in taken] == [2, 4] and [one.owner for one in scoring.waiting] == ["bob"]
        scoring.waiting += taken
    assert [len(one.result(60).logprobs) for one in asked] == [2, 3, 4]


def test_an_error_and_a_closed_worker_are_told_to_all_that_wait(tmp_path: Path) -> None:
    server = Server(tmp_path)
    scoring = PromptScoring(server.model.worker)
    with server.held_up():
        lost = [scoring.ask([5, 6], tmp_path / "nothing") for _ in range(2)]
        good = scoring.ask([5, 6], None)
    assert all(one.exception(60) is not None for one in lost)
    assert good.result(60).logprobs[1].isfinite()
    server.close()
    with pytest.raises(WorkerClosedError):
        scoring.ask([5, 6], None).result(60)
