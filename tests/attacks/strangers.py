"""Requests of strangers: every field of every route, and headers, with values that nobody means well by.

    python -m tests.attacks.strangers                a few minutes on two cores
    python -m tests.attacks.strangers 20             every 20th of the attacks

A server is a process of its own with a model, a queue and a page, and the keys of two users. One user sends each route
a request that is right, but for one field, which has a hostile value. An attack has succeeded where the answer, or the
answer of the promise that it returned, is an error of the server (500, or the category `server`), where the server
died, or where the other user was not answered meanwhile.
"""

import base64
import http.client
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from google.protobuf.json_format import ParseDict, ParseError

from lowmem_grpo.server.tinker import wire
from tests.attacks.attack import Verdict, attack_and_exit

API = "/api/v1"
DEEP: Any = json.loads("[" * 900 + "]" * 900)
HOSTILE: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "minus one": -1, "minus zero": -0.0, "2**31": 2**31, "2**32": 2**32,
    "2**53 + 1": 2**53 + 1, "2**63": 2**63, "-2**63": -(2**63), "2**64": 2**64, "10**400": 10**400, "half": 0.5,
    "denormal": 5e-324, "1e-40": 1e-40, "1e38": 1e38, "1e300": 1e300, "NaN": float("nan"), "infinity": float("inf"),
    "empty text": "", "NUL": "a\0b", "surrogate": "a\ud800b", "path": "../../etc/passwd", "template": "{{ 7 * 7 }}",
    "escape": "\x1b[2J", "long text": "x" * 200_000, "many": list(range(5000)), "deep": DEEP, "object": {"a": {}},
    "key": {"\ud800": 1},
}
PACKED = {  # values of a field of bytes, which hold tokens, numbers or offsets
    "one byte": b"\1", "seven bytes": b"1234567", "ones": b"\xff" * 16, "NaNs": struct.pack("<2f", *[float("nan")] * 2),
    "least and most": struct.pack("<2q", -(2**63), 2**63 - 1), "wraps round": struct.pack("<3q", 0, 2**63 - 1, -2),
    "large tokens": struct.pack("<2i", 2**31 - 1, -(2**31)), "a megabyte": bytes(2**20),
}
HOSTILE |= {name: base64.b64encode(value).decode() for name, value in PACKED.items()}
KEY, OTHERS_KEY = "tml-" + "a" * 32, "tml-" + "b" * 32


@dataclass
class Target:
    """A server at a port of this machine, with the keys of two users, and the name of its model."""

    port: int
    key: str
    others_key: str
    model: str
    process: Any  # with `poll()`, None while it lives


@contextmanager
def served(folder: Path) -> Iterator[Target]:
    """A server in a process of its own, with a queue, a page and the model `tiny`."""
    keys = folder / "keys.txt"
    keys.touch(mode=0o600)
    keys.write_text(f"ann {KEY} jobs\nbob {OTHERS_KEY}\n")
    words = ["serve", "--port", "0", "--folder", str(folder / "home"), "--key-file", str(keys), "--model", "tiny",
             "--16bit", "--max-seq-length", "64"]
    with open(folder / "log.txt", "wb") as log, subprocess.Popen(
            [sys.executable, "-u", "-m", "lowmem_grpo", *words], stdout=subprocess.PIPE, stderr=log) as process:
        try:
            first = next(line for line in process.stdout or () if b"serving at" in line)
            port = int(first.decode().rpartition(":")[2])
            yield Target(port, KEY, OTHERS_KEY, "tiny", process)
        finally:
            process.kill()


def routes(name: str, model: str, sampler: str) -> dict[str, dict[str, Any]]:
    """A right body for each route that takes one, by method and path; `seq_id` is set when it is sent. The method is
    PROTOBUF for a body of that kind, and FORM for a button of the page."""
    session = model.partition(":")[0]
    prompt: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"]}
    datum = {"tokens": [5, 6], "target_tokens": [6, 7], "weights": [0.0, 1.0]}
    cells = {"values": struct.pack("<f", 1), "crow_indices": struct.pack("<3q", 0, 0, 1),
             "col_indices": struct.pack("<q", 0)}
    tensors = {"target_tokens": {"dense": struct.pack("<2i", 6, 7), "dtype": wire.INT32, "shape": [2, 1]},
               "weights": {"sparse_csr": cells, "dtype": wire.FLOAT32, "shape": [2, 1]}}
    packed = [{"model_input": [{"encoded_text": {"tokens": struct.pack("<2i", 5, 6)}}], "loss_fn_inputs": tensors}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "POST /v1/chat/completions": prompt | {
            "model": name, "max_tokens": 1, "n": 1, "top_k": 5, "min_p": 0.1, "logprobs": True, "top_logprobs": 1,
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                         {"role": "tool", "content": "1", "tool_call_id": "c"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "chat_template_kwargs": {}, "stream_options": None, "metadata": {}},
        "POST /v1/completions": prompt | {"model": name, "prompt": "hi", "max_tokens": 1, "n": 1, "logprobs": 1},
        f"POST {API}/create_session": {"tags": []}, f"POST {API}/session_heartbeat": {"session_id": session},
        f"POST {API}/create_model": {"session_id": session, "model_seq_id": 0, "base_model": name,
                                     "lora_config": {"rank": 2, "seed": 1}, "user_metadata": {"a": "b"}},
        f"POST {API}/forward_backward": {"model_id": model, "seq_id": 1, "loss_fn": "cross_entropy", "data": [datum],
                                         "loss_fn_config": {}},
        f"POST {API}/optim_step": {"model_id": model, "seq_id": 1, "adam_params": {
            "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
            "grad_clip_norm": 1.0}},
        f"POST {API}/save_weights": {"model_id": model, "seq_id": 1, "path": "a", "overwrite": True, "ttl_seconds": 60},
        f"POST {API}/save_weights_for_sampler": {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 5},
        f"POST {API}/load_weights": {"model_id": model, "seq_id": 1, "path": "tinker://x/weights/a", "optimizer": True},
        f"POST {API}/weights_info": {"tinker_path": "tinker://x/weights/a"},
        f"POST {API}/get_info": {"model_id": model},
        f"POST {API}/create_sampling_session": {"session_id": session, "sampling_session_seq_id": 9,
                                                "base_model": name},
        f"POST {API}/asample": {"sampling_session_id": sampler, "seq_id": 1, "prompt": [5, 6], "num_samples": 1,
                                "prompt_logprobs": True, "topk_prompt_logprobs": 2, "sampling_params": prompt | {
                                    "max_tokens": 1, "top_k": 5}},
        f"POST {API}/retrieve_future": {"request_id": f"{model}:0"}, f"POST {API}/telemetry": {},
        f"POST {API}/unload_model": {"model_id": "x"},
        "POST /jobs": {"recipe": "nothing", "options": ["a=1"], "priority": 0, "time_limit": 5.0, "share": 0.5},
        f"PROTOBUF {API}/forward_backward": in_base64({
            "model_id": model, "seq_id": 1, "loss_fn": "cross_entropy", "data": packed, "forward_only": True,
            "loss_fn_config": {}, "loss_fn_config_v2": {}}),
        f"POST {API}/sessions/{session}/finish": {"reason": {"type": "success"}},
        f"PUT {API}/training_runs/{model}/checkpoints/weights/a/ttl": {"ttl_seconds": 60},
        "FORM /page/do/cancel": {"run": "1"}, "FORM /page/enter": {"key": "x"},
        "POST /jobs/1/cancel": {}, "POST /jobs/1/resume": {"options": ["a=1"]},
    }


PATHS = ("GET /v1/models/{}", "GET /jobs/{}", "GET /jobs/{}/log", "GET /jobs/1/log?from={}", "FORM /page/do/{}",
         *(f"GET {API}/{place}" for place in ("training_runs/{}", "training_runs?limit={}", "samplers/{}",
                                              "checkpoints?offset={}")),
         *(f"DELETE {API}/training_runs/{place}" for place in ("{}/checkpoints/weights/a", "a/checkpoints/{}/a",
                                                               "a/checkpoints/weights/{}")),
         f"POST {API}/sessions/{{}}/finish", "GET /page/files/{}", "GET /page/data?run={}", "GET /page/enter?ticket={}",
         "FORM /page/leave?{}")
HEADERS = ("Origin", "Cookie", "If-None-Match", "Content-Type", "Content-Encoding", "Accept", "Authorization", "Host")
OF_HEADERS = ("", "http://[", "http://[::1]x", "\xb2", "a=\xff; b", "127.0.0.1:\xb9", "zstd, gzip", "a/b;q=x",
              "," * 9000)


def in_base64(value: Any) -> Any:
    """The value with bytes as protobuf's JSON has them."""
    if isinstance(value, dict):
        return {name: in_base64(item) for name, item in value.items()}
    return list(map(in_base64, value)) if isinstance(value, list) else (
        base64.b64encode(value).decode() if isinstance(value, bytes) else value)


def encoded(method: str, body: Any) -> tuple[str, bytes | None, str]:
    """The method, the content and its type of a request; a protobuf that cannot hold the body is no protobuf."""
    if method == "PROTOBUF":
        try:
            return "POST", ParseDict(body, wire.ForwardBackwardRequest()).SerializeToString(), wire.PROTOBUF
        except (ParseError, TypeError, ValueError, RecursionError, SystemError):
            return "POST", json.dumps(body).encode(), wire.PROTOBUF
    if method == "FORM":
        fields = {name: str(value)[:10**5] for name, value in (body or {}).items()}
        return "POST", urlencode(fields, errors="surrogatepass").encode(), "application/x-www-form-urlencoded"
    return method, None if body is None else json.dumps(body).encode(), "application/json"


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each field of a body, of inner ones too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield (*place, name)
        yield from places(item, (*place, name))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    whole = deepcopy(body)
    held: Any = whole
    for name in place[:-1]:
        held = held[name]
    held[place[-1]] = value
    return whole


class Stranger:
    """A client with one key."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key, self.seq, self.cookie, self.headers = port, key, 0, "", dict[str, str]()
        self.send("FORM", "/page/enter", {"key": key})

    def send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        method, content, kind = encoded(method, body)
        headers = {"X-API-Key": self.key, "Accept": "application/json", "Content-Type": kind, "Cookie": self.cookie,
                   "Origin": f"http://127.0.0.1:{self.port}"} | self.headers
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            self.cookie = self.cookie or reply.headers.get("Set-Cookie", "").partition(";")[0]
            return reply.status, reply.read()
        finally:
            connection.close()

    def json(self, path: str, /, **body: Any) -> Any:
        return json.loads(self.send("POST", f"{API}/{path}", body)[1])

    def answered(self, method: str, path: str, body: Any = None) -> str:
        """What is wrong with an answer, and with the answer of a promise that it is; "" for nothing."""
        status, content = self.send(method, path, body)
        with suppress(ValueError, TypeError, AttributeError):
            told = json.loads(content)
            while "request_id" in told and status < 400 and "retrieve" not in path:
                told = self.json("retrieve_future", request_id=told["request_id"])
            if told.get("category") == "server":
                return f"the server failed: {told['error']}"
        return f"{status}: {content[:200]!r}" if status >= 500 else ""


def attack(serve: Target, every: int = 1) -> Iterator[Verdict]:
    """Each attack, or every so many of them, over a running server."""
    stranger, other = Stranger(serve.port, serve.key), Stranger(serve.port, serve.others_key)
    session = stranger.json("create_session")["session_id"]
    base = {"session_id": session, "base_model": serve.model}
    made = stranger.json("create_model", **base, model_seq_id=0, lora_config={"rank": 2})
    saved = stranger.json("save_weights", model_id=made["model_id"], seq_id=1, path="a")
    stranger.json("retrieve_future", request_id=saved["request_id"])
    stranger.seq = 1
    sampler = stranger.json("create_sampling_session", **base, sampling_session_seq_id=0)
    number, seq = 0, 0
    for route, body in routes(serve.model, made["model_id"], sampler["sampling_session_id"]).items():
        method, path = route.split()
        for place in places(body):
            for name, value in HOSTILE.items():
                number += 1
                if number % every:
                    continue
                seq += 1
                sent = changed(body | ({"seq_id": seq} if "asample" in path else {}), place, value)
                if "model_seq_id" in body and place != ("model_seq_id",):
                    sent["model_seq_id"] = seq
                if "seq_id" in body and "asample" not in path and place != ("seq_id",):
                    sent["seq_id"] = stranger.seq + 1
                yield verdict(stranger, other, serve, method, path, sent, f"{'.'.join(map(str, place))} is {name}")
                stranger.seq = done(stranger, made["model_id"], stranger.seq)
    for route in PATHS:
        method, path = route.split()
        for name, value in HOSTILE.items():
            number += 1
            if number % every == 0 and not isinstance(value, list | dict):
                text = quote(str(value)[:2000].encode("utf-8", "surrogatepass"), safe="")
                sent = None if method in ("GET", "DELETE") else {"reason": "success", "run": "1"}
                yield verdict(stranger, other, serve, method, path.format(text), sent, name)
    for route in ("FORM /page/enter", "GET /page/data", f"POST {API}/forward_backward", "POST /v1/completions"):
        for name, value in product(HEADERS, OF_HEADERS):
            number += 1
            if number % every == 0:
                stranger.headers = {name: value}
                yield verdict(stranger, other, serve, *route.split(), {}, f"{name} is {value[:20]!r}")


def done(stranger: Stranger, model: str, seq: int) -> int:
    """The number of the last request of a model that was taken."""
    status, _ = stranger.send("POST", f"{API}/retrieve_future", {"request_id": f"{model}:{seq + 1}"})
    return seq + (status < 400)


def verdict(
    stranger: Stranger, other: Stranger, serve: Target, method: str, path: str, body: Any, name: str
) -> Verdict:
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(stranger.answered, method, path, body)
            status, _ = other.send("GET", "/health")
            damage = answer.result()
    except (OSError, http.client.HTTPException) as error:
        damage, status = f"no answer: {error!r}", 200
    if serve.process.poll() is not None:
        damage = f"the server died ({serve.process.returncode})"
    return Verdict(f"{method} {path.partition('?')[0][:60]}" if body is not None else "a path", f"{path[:80]} {name}",
                   damage or ("" if status == 200 else f"another user was answered {status}"))


def attacked(folder: Path, every: int = 1) -> Iterator[Verdict]:
    with served(folder) as serve:
        yield from attack(serve, every)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    attack_and_exit(lambda folder: attacked(folder, int(sys.argv[1]) if len(sys.argv) > 1 else 1), "fields of requests")
