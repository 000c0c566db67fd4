"""A teacher behind a URL: a server on this machine that answers rightly, late, wrongly or not at all; and our own."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from served import OWNER, serving
from small_models import TINY
from tables import every_row
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo.engines.served_teacher import QUESTIONS, ServedTeacher, TeacherError
from lowmem_grpo.rollout.stored_completions import COLUMNS, stored_values
from tests.attacks import judge_server

WORDS = 384
SEQUENCES = [([5], [7, 8, 9]), ([6, 5, 4, 3], [7, 8]), ([9, 9], []), ([8, 7, 6, 5, 4, 3], [5])]
ERROR = {"error": {"message": "This model's maximum context length is 4 tokens.", "code": 400}}
Answer = Callable[[dict[str, Any]], judge_server.Reply]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@cache
def table(shift: float = 0.0) -> Tensor:
    """The log-probabilities (V, V) of a teacher that reads only the token before."""
    logits = 3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0))
    return (logits + shift * torch.arange(WORDS)).log_softmax(-1)


def vllm(body: dict[str, Any], shift: float = 0.0, word: Callable[[int], Any] = str) -> dict[str, Any]:
    """A reply in vLLM's form: at each place but the first the prompt's own token, and then the likeliest ones."""
    places: list[Any] = [None]
    for before, token in zip(body["prompt"], body["prompt"][1:], strict=False):
        row = table(shift)[before]
        ids = dict.fromkeys([token, *row.topk(body["prompt_logprobs"]).indices.tolist()])
        ranks = (row[None] > row[[*ids], None]).sum(-1) + 1
        places.append({str(name): {"logprob": float(row[name]), "rank": int(rank), "decoded_token": word(name)}
                       for name, rank in zip(ids, ranks, strict=True)})
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": places}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice]}


def answering(change: Callable[[list[Any]], Any] = lambda places: None, **more: Any) -> Answer:
    """A teacher whose `prompt_logprobs` are changed before they are sent."""
    def answer(body: dict[str, Any]) -> judge_server.Reply:
        reply = vllm(body, **more)
        change(reply["choices"][0]["prompt_logprobs"])
        return 200, json.dumps(reply).encode()

    return answer


def teacher_of(server: judge_server.JudgeServer, **settings: Any) -> ServedTeacher:
    return ServedTeacher(server.url, **({"model": "m", "top_k": 3, "retries": 1} | settings))


def refused(answer: Answer, said: str, **settings: Any) -> judge_server.JudgeServer:
    """The server after the scores were refused in these words."""
    with judge_server.serving(answer) as server, pytest.raises(TeacherError, match=said) as error:
        teacher_of(server, **settings).score([([5, 6], [7, 8, 9])])
    assert "secret" not in str(error.value) and (error.value.__context__ is None or error.value.__suppress_context__)
    return server


@pytest.mark.parametrize("top_k", [1, 3])
def test_entry_t_describes_completion_token_t_behind_prompts_of_any_length(top_k: int) -> None:
    with judge_server.serving(answering()) as server:
        scores = teacher_of(server, top_k=top_k, concurrency=2).score(SEQUENCES)
        assert server.most_open <= 2
    for (prompt, ids), found in zip(SEQUENCES, scores, strict=True):
        rows = table()[[*prompt, *ids][len(prompt) - 1 : -1]]
        top = rows.topk(top_k, -1)
        assert torch.equal(found.logprobs, rows[torch.arange(len(ids)), ids] if ids else torch.empty(0))
        assert torch.equal(found.top_ids, top.indices) and torch.equal(found.top_logprobs, top.values)
    asked = {tuple(body.pop("prompt")) for body in server.asked}
    assert asked == {(*prompt, *ids) for prompt, ids in SEQUENCES}
    assert server.asked[0] == {"model": "m", "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}


def test_a_notebook_whose_thread_has_an_event_loop_gets_scores_too() -> None:
    async def cell() -> int:
        return len(teacher_of(server).score(SEQUENCES))

    with judge_server.serving(answering()) as server:
        assert asyncio.run(cell()) == len(SEQUENCES)


def put(value: Any) -> Callable[[list[Any]], None]:
    """Sets the log-probability of the token at the last place."""
    return lambda places: places[-1]["9"].update(logprob=value)


@pytest.mark.parametrize(("change", "said"), [
    (lambda places: places.pop(), "prompt_logprobs for 4 tokens, and was asked for 5; serve it without truncation"),
    (lambda places: places[3].pop("8"), r"completion token 1 are not for 8, which stands there; .* \(\{"),
    (lambda places: places.reverse(), "completion token 1 are not for 8"),
    (put(float("nan")), "completion token 2 are no log-probabilities"), (put(None), "no log-probabilities"),
    (put(2.5), "no log-probabilities .* --logprobs-mode raw_logprobs"), (put(-float("inf")), "no log-probabilities"),
    (lambda places: [entry.update(logprob=-0.1) for entry in places[-1].values()], "with probabilities up to 1"),
    (lambda places: [places[2].pop(name) for name in [*places[2]][2:]], "hold 2 tokens, and top_k is 3; lower top_k"),
    (lambda places: places.__setitem__(4, None), "completion token 2 are not for 9, .* \\(None\\)"),
    (lambda places: places[4].update(x=5), "completion token 2 are not for 9, which stands there"),
])
def test_wrong_scores_are_refused_with_what_was_got(change: Callable[[list[Any]], Any], said: str) -> None:
    assert len(refused(answering(change), said, vocabulary=WORDS).asked) == 1


def test_a_token_that_the_student_does_not_have_is_refused() -> None:
    def change(places: list[Any]) -> None:
        places[-1] = {"9": {"logprob": -3.0}, "400": {"logprob": -1.0}, "1": {"logprob": -2.0}}

    refused(answering(change), "hold the id 400, and the student has 384 tokens; lower top_k", vocabulary=WORDS)


@pytest.mark.parametrize(("answer", "said", "requests"), [
    ((400, ERROR), r"HTTP 400 to 5 tokens: .*maximum context length is 4.*--max-model-len.*--max-logprobs", 1),
    ((401, {"error": "wrong: secret-key"}), r"HTTP 401 .*wrong: \[hidden\].*give its key: teacher=S", 1),
    ((404, ERROR), "HTTP 404 .*/v1/models", 1), ((503, ERROR), "HTTP 503 .*server's log", 2),
    ((200, "<html>Welcome</html>"), r"answers without prompt_logprobs \(<html>Welcome", 1),
    ((200, {"choices": [{"text": "x"}]}), "without prompt_logprobs .*; serve the teacher with vllm serve", 1),
    ((200, b"{"), "gives no answer that can be read", 1),
])
def test_an_answer_without_scores_is_told_without_the_key(answer: Any, said: str, requests: int) -> None:
    server = refused(lambda body: answer, said, api_key="secret-key")
    assert len(server.asked) == requests and server.told[0]["authorization"] == "Bearer secret-key"


def test_an_error_that_passes_does_not_end_the_run() -> None:
    with judge_server.serving(judge_server.in_turn((503, ERROR), (429, ERROR), answering())) as server:
        assert len(teacher_of(server, retries=2).score(SEQUENCES[:1])) == 1 and len(server.asked) == 3


def test_a_late_server_and_one_that_is_down_are_not_waited_for() -> None:
    end = threading.Event()

    def never(body: dict[str, Any]) -> judge_server.Reply:
        end.wait(60)
        return answering()(body)

    with judge_server.serving(never) as server:
        with pytest.raises(TeacherError, match=r"did not answer within 0\.1 s; raise timeout or lower concurrency"):
            teacher_of(server, timeout=0.1).score(SEQUENCES)
        end.set()
    with pytest.raises(TeacherError, match=r"the teacher at http://127\.0\.0\.1:\d+/v1 cannot be reached \("):
        teacher_of(server, retries=0).score(SEQUENCES)


def test_only_a_server_that_is_down_is_refused_before_the_self_test() -> None:
    with judge_server.serving(answering()) as server:
        teacher_of(server).reach()  # it has no list of models
    with pytest.raises(TeacherError, match=r"cannot be reached \(.*; check that the server is up, and its URL"):
        teacher_of(server, retries=5).reach()


def test_the_self_test_passes_a_teacher_with_the_students_tokens(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with judge_server.serving(answering(word=lambda token: tokenizer.decode([token]))) as server:
        assert teacher_of(server).check(tokenizer) == 0 and len(server.asked) == QUESTIONS
    with judge_server.serving(answering(word=lambda token: None)) as server:
        assert not caplog.records and teacher_of(server).check(tokenizer) == 0
    assert "does not say which tokens its ids are" in caplog.text


def test_the_self_test_refuses_a_teacher_that_answers_differently_twice(tokenizer: Any) -> None:
    numbers = count()

    def replicas(body: dict[str, Any]) -> judge_server.Reply:
        return answering(shift=0.002 * (next(numbers) % 2), word=lambda token: tokenizer.decode([token]))(body)

    with judge_server.serving(replicas) as server, pytest.raises(TeacherError, match=(
            r"answers equal questions differently: by 0\.\d+ nats .* at most 0\.02 are allowed\. Serve one replica")):
        teacher_of(server).check(tokenizer)


def test_the_self_test_refuses_a_teacher_with_other_tokens(tokenizer: Any) -> None:
    moved = answering(word=lambda token: tokenizer.decode([token + 1]))
    said = r"has other tokens than the student: of \d+, \d+ differ, and id \d+ is .* there and .* here"
    with judge_server.serving(moved) as server, pytest.raises(TeacherError, match=said):
        teacher_of(server).check(tokenizer)


@every_row(("settings", "said"), [
    ({"base_url": "localhost:8000"}, "the teacher's URL is 'localhost:8000'; it must be an address"),
    ({"base_url": "ftp://u:secret@host/v1"}, "the teacher's URL is 'ftp://host/v1'"),
    ({"base_url": "http://host:port/v1"}, "it must be an address"),
    ({"base_url": "http://host:99999/v1"}, "it must be an address"), ({"base_url": "http://:80"}, "it must be an addr"),
    ({"base_url": "http://host /v1"}, "it must be an address"), ({"top_k": 0}, "top_k is 0"),
    ({"timeout": 0}, "timeout is 0"), ({"retries": -1}, "retries is -1"),
    ({"concurrency": 0}, "concurrency is 0"),
])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServedTeacher(**({"base_url": "http://host/v1"} | settings))


def test_a_sequence_without_a_prompt_is_refused_and_a_url_may_end_at_its_port() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no prompt token"):
        ServedTeacher("http://host/v1", "m").score([([1], [2]), ([], [3])])
    assert [ServedTeacher(f"http://host:1{end}").base_url for end in ("", "/", "/v1", "/v1/", "/a/v1")] == [
        *["http://host:1/v1"] * 4, "http://host:1/a/v1"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedTeacher]:
    """Our own server with the embedded model in float32."""
    options: dict[str, Any] = {"context": 256, "dtype": torch.float32, "load_in_16bit": True}
    with serving(tmp_path_factory.mktemp("served"), str(TINY), **options) as made:
        yield ServedTeacher(made.url, api_key=OWNER, top_k=4)


def test_our_own_server_says_what_transformers_computes(served: ServedTeacher, tokenizer: Any) -> None:
    assert served.check(tokenizer) == 0
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    texts = [("What is 21 + 21?", " It is 42."), ("4 + 4 * 7 - 2 is what?", " 30"), ("No.", "")]
    sequences = [(tokenizer(prompt).input_ids, tokenizer(rest).input_ids) for prompt, rest in texts]
    for (prompt, ids), found in zip(sequences, served.score(sequences), strict=True):
        with torch.no_grad():
            logprobs = plain(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        top = logprobs.topk(4, -1)
        assert torch.equal(found.top_ids, top.indices)
        assert torch.allclose(found.top_logprobs, top.values, atol=1e-5)
        assert torch.allclose(found.logprobs, logprobs[torch.arange(len(ids)), ids], atol=1e-5)


def test_what_a_served_teacher_says_can_be_stored(served: ServedTeacher, tmp_path: Path) -> None:
    sequences = [([5, 6, 7], [8, 9]), ([5], [6, 7, 8])]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in served.columns(sequences)))
    for line, scores, (_, ids) in zip(file.read_text().splitlines(), served.score(sequences), sequences, strict=True):
        row = json.loads(line)
        assert tuple(row) == COLUMNS
        stored = stored_values(row, 0, WORDS)
        assert stored[0] == ids and torch.equal(stored[1], scores.top_ids)
        assert torch.allclose(stored[2], scores.top_logprobs, atol=1e-6)
