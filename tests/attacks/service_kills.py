"""A server that clients train on, killed at seeded moments: no answered optimizer step is lost, none is made twice.

    python -m tests.attacks.service_kills                 200 kills, some minutes on two cores
    python -m tests.attacks.service_kills --count 10

Two clients train a model each through the Tinker protocol: two calls of forward_backward and a step of Adam, again and
again. They send each request until it is answered, with the same number, as the protocol's own client does. The server
is killed by SIGKILL some time after it was started: while it loads, restores what was trained, computes, writes a
state, or answers. The next one is started over the same folder. In the end every answer, and every number of the
factors and of the optimizer's moments, must be those of a server that nobody killed, bit for bit.
"""

import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import made_for, make_server_app, open_socket
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker import training, wire
from lowmem_grpo.server.tinker.datum import as_bytes
from lowmem_grpo.server.tinker.serving import serve_model
from lowmem_grpo.server.users import Users
from tests.attacks.attack import Verdict, kills_command

KEY, API = "tml-" + "k" * 32, "/api/v1"
CLIENTS, STEPS = 2, 12  # of each round; a round begins with new models
PATIENCE = 120.0  # seconds in which a request must be answered
LATEST = 1.6  # seconds after its start by which a server that is to be killed is killed


@dataclass
class Killed:
    """A server over a folder, which is killed now and then. The socket is ours, so that requests wait meanwhile."""

    folder: Path
    kills: list[float] = field(default_factory=list)  # seconds after a start, of the kills to come
    made: int = 0

    def __post_init__(self) -> None:
        self.socket: socket.socket = open_socket("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.keep)
        self.thread.start()

    def keep(self) -> None:
        """Start a server, kill it, start the next one; the last one lives to the end."""
        while not self.over.is_set():
            child = os.fork()
            if child == 0:
                self.serve()
            self.over.wait(self.kills.pop() if self.kills else PATIENCE * STEPS)
            self.made += not self.over.is_set()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def serve(self) -> None:
        """What a forked process does; it never returns. On a slow machine several kills may meet one request, which is
        not their cause: no request is given up here."""
        training.MOST_ENDS = sys.maxsize
        try:
            model = serve_model("tiny", Database(self.folder / "server.sqlite"), self.folder / "models",
                                load_in_4bit=False, max_seq_length=64)
            made_for(make_server_app({API: model.router}, Users(KEY), Limits())).run(sockets=[self.socket])
        except BaseException:  # noqa: BLE001 - nothing may get out of the forked process
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.socket.close()

    def states(self) -> dict[str, torch.Tensor]:
        """What the last steps of all models left on the disk, by the model's number and the tensor's name."""
        return {f"{path.name.split('_')[-1]}: {name}": value for path in self.folder.glob("models/*.safetensors")
                for name, value in load_file(path).items()}


def ask(port: int, path: str, body: bytes) -> bytes:
    """The answer of a server, of whichever one is there: a request is sent again until it is answered."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("POST", f"{API}/{path}", body, {"X-API-Key": KEY})
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)
            continue
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{path} was answered {reply.status}: {content[:200]!r}")
        if b"try_again" not in content[:60]:
            return content
    raise TimeoutError(f"{path} was not answered within {PATIENCE:g} seconds")


def train(port: int, number: int, answers: list[bytes]) -> None:
    """What a client does. Its session is its own, and the ids that follow from it are left out of the answers."""
    session = json.loads(ask(port, "create_session", b"{}"))["session_id"]
    asked = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 3}}
    model = json.loads(ask(port, "create_model", json.dumps(asked).encode()))["model_id"]
    seq = 0
    for _ in range(STEPS):
        for kind in ("forward_backward", "forward_backward", "optim_step"):
            seq += 1
            promise = json.loads(ask(port, kind, body(kind, model, seq, number)))["request_id"]
            answers.append(ask(port, "retrieve_future", json.dumps({"request_id": promise}).encode()))


def body(kind: str, model: str, seq: int, number: int) -> bytes:
    """The request of a client with this number."""
    if kind == "optim_step":
        adam = {"learning_rate": 0.01, "grad_clip_norm": 1.0}
        return json.dumps({"model_id": model, "seq_id": seq, "adam_params": adam}).encode()
    return forward_backward(model, seq, 1000 * number + seq)


def forward_backward(model: str, seq: int, seed: int, loss: str = "cross_entropy", targets: int = 6) -> bytes:
    """A request with three random sequences of six tokens."""
    drawn = torch.Generator().manual_seed(seed)
    request = wire.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    for _ in range(3):
        datum = request.data.add()
        tokens = torch.randint(3, 60, (6,), generator=drawn, dtype=torch.int32)
        datum.model_input.add().encoded_text.tokens = as_bytes(tokens)
        for name, values, dtype in (
            ("target_tokens", torch.randint(3, 60, (targets,), generator=drawn), wire.INT64),
            ("weights", torch.randn(6, generator=drawn), wire.FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = as_bytes(values), dtype
    found: bytes = request.SerializeToString()
    return found


@dataclass
class Round:
    """What all clients were answered, what the disk then has, and how often the server was killed meanwhile."""

    answers: list[list[bytes]]
    states: dict[str, torch.Tensor]
    kills: int


def trained(folder: Path, kills: list[float]) -> Round:
    """A round over a new folder. RuntimeError or TimeoutError where a client was not served."""
    folder.mkdir()
    server = Killed(folder, kills)
    answers: list[list[bytes]] = [[] for _ in range(CLIENTS)]
    failed: list[BaseException] = []

    def client(number: int) -> None:
        try:
            train(server.port, number, answers[number])
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    if failed:
        raise failed[0]
    return Round(answers, server.states(), server.made)


def different(found: Round, expected: Round) -> str:
    """How a round differs from the one without kills; "" where it does not."""
    for number, (mine, theirs) in enumerate(zip(found.answers, expected.answers, strict=True)):
        for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if one != other:
                return f"client {number} was answered otherwise in request {place}"
    if found.states.keys() != expected.states.keys():
        return f"the disk has {sorted(found.states)[:3]}..., and not {sorted(expected.states)[:3]}..."
    wrong = [name for name, value in found.states.items() if not torch.equal(value, expected.states[name])]
    return f"{len(wrong)} tensors differ, such as {wrong[0]}" if wrong else ""


def attack(root: Path, count: int, seed: int) -> Iterator[Verdict]:
    """Rounds, until so many kills were made."""
    expected, moments, made, number = trained(root / "undisturbed", []), random.Random(seed), 0, 0
    while made < count:
        kills = [moments.uniform(0.0, LATEST) for _ in range(min(10, count - made))]
        try:
            found = trained(root / f"round-{number}", kills)
        except (RuntimeError, TimeoutError) as error:
            yield Verdict("a round of kills", f"round {number}", str(error))
            return
        made, number = made + found.kills, number + 1
        yield Verdict("a round of kills", f"round {number}, {found.kills} kills", different(found, expected))


if __name__ == "__main__":
    kills_command(__doc__, 200, attack)()
