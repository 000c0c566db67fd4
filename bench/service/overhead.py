"""What a call of forward_backward costs through the server, beside the same work in the process.

    OMP_NUM_THREADS=1 python -m bench.service.overhead

The model in the package, rank 8, cross entropy. "Served" is a request with the data of the Tinker protocol over a
socket of this machine, until its answer is read, with all that is written to the disk for it; "in process" is the verb
that the server calls. They take turns. At most 5% more are wanted for 64 sequences of 512 tokens, and 10 ms for a small
call.
"""

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.errors import Limits
from lowmem_grpo.service.server import made_for, make_server_app, open_socket
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.datum import as_bytes, pass_of
from lowmem_grpo.service.tinker.serving import ServedModel, serve_model
from lowmem_grpo.service.users import Users

RESULTS = Path(__file__).resolve().parents[1] / "results" / "service_overhead.jsonl"
KEY, API = "tml-" + "k" * 32, "/api/v1"
SIZES = {"64 x 512 tokens": (64, 512, 5), "1 x 2 tokens": (1, 2, 40)}  # sequences, tokens, rounds
console = Console(width=100)


class Client:
    """One connection to a server, and a model there."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port)
        session = self.json("create_session", {})["session_id"]
        made = self.json("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny",
                                          "lora_config": {"rank": 8, "seed": 1}})
        self.model, self.seq = str(made["model_id"]), 0
        self.post("retrieve_future", json.dumps({"request_id": made["request_id"]}).encode())

    def post(self, path: str, body: bytes) -> bytes:
        self.connection.request("POST", f"{API}/{path}", body, {"X-API-Key": KEY})
        reply = self.connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise click.ClickException(f"{path} was answered {reply.status}: {content[:300]!r}")
        return content

    def json(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self.post(path, json.dumps(body).encode()))

    def forward_backward(self, request: Any) -> None:
        """A call, until its answer is read."""
        self.connection.close()  # the server ends one that was idle for seconds; the next request opens another
        self.seq += 1
        request.model_id, request.seq_id = self.model, self.seq
        promise = json.loads(self.post("forward_backward", request.SerializeToString()))["request_id"]
        while self.post("retrieve_future", json.dumps({"request_id": promise}).encode())[:20].startswith(b'{"type"'):
            pass


def request_of(sequences: int, tokens: int) -> Any:
    """Random data."""
    drawn = torch.Generator().manual_seed(0)
    request = wire.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(sequences):
        datum = request.data.add()
        ids = torch.randint(3, 300, (2, tokens), generator=drawn)
        datum.model_input.add().encoded_text.tokens = as_bytes(ids[0].int())
        for name, values, dtype in (("target_tokens", ids[1], wire.INT64),
                                    ("weights", torch.ones(tokens), wire.FLOAT32)):
            datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = as_bytes(values), dtype
    return request


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(model: ServedModel, client: Client, sequences: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of both ways."""
    request, training = request_of(sequences, tokens), model.training
    asked = pass_of(request, training.bounds)
    ways: dict[str, Callable[[], object]] = {
        "served": lambda: client.forward_backward(request),
        "in_process": lambda: model.desk.run(lambda: training.adapters.run(client.model, asked)).result(),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            taken[name].append(seconds(ways[name]))
    found = {name: median(times[1:]) for name, times in taken.items()}  # the first call warms up
    ratio = median(a / b for a, b in zip(taken["served"][1:], taken["in_process"][1:], strict=True))
    return {f"{name}_s": round(value, 5) for name, value in found.items()} | {
        "ratio": round(ratio, 4), "more_ms": round(1000 * (found["served"] - found["in_process"]), 2)}


@click.command(help=__doc__)
@options.output(RESULTS)
def main(output: Path) -> None:
    where, rows = machine(), []
    with tempfile.TemporaryDirectory(prefix="lowmem-overhead-") as root:
        database = Database(Path(root) / "server.sqlite")
        model = serve_model("tiny", database, Path(root) / "models", load_in_4bit=False, max_seq_length=1024)
        listening = open_socket("127.0.0.1", 0)
        server = made_for(make_server_app({API: model.router}, Users(KEY), Limits()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        client = Client(listening.getsockname()[1])
        for name, (sequences, tokens, rounds) in SIZES.items():
            row = {"size": name, "rounds": rounds, "threads": torch.get_num_threads(),
                   **measured(model, client, sequences, tokens, rounds)}
            append_row(output, row | where)
            rows.append([name, f"{row['served_s']:.4f}", f"{row['in_process_s']:.4f}", f"{row['ratio']:.3f}",
                         f"{row['more_ms']:.1f}"])
        client.connection.close()
        server.should_exit = True
        thread.join()
        model.close()
        database.close()
    console.print(tables.terminal(None, ["call", "served, s", "in process, s", "ratio", "more, ms"], rows))


if __name__ == "__main__":
    main()
