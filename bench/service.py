"""What the server adds to work of the same kind in the process, with the model in the package.

    OMP_NUM_THREADS=1 python -m bench.service overhead    one call of forward_backward
    OMP_NUM_THREADS=1 python -m bench.service inflight    2,000 requests for samples at once

"Served" is a request of the Tinker protocol over a socket of this machine, until its answer is read, with all that is
written to the disk for it; "in process" is the call that the server makes. They take turns. `overhead` (rank 8, cross
entropy) asks for at most 5% more for 64 sequences of 512 tokens, and 10 ms for a small call. `inflight` asks from a
process of its own, each request with a prompt of its own over a connection that is open already; at least 0.9 of the
tokens a second in the process are wanted. Its ratio of the processor's seconds tells what a request costs on a machine
that has other work.
"""

import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from bench.common import options, rounds, tables
from bench.common.rows import append_row, machine
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.errors import Limits
from lowmem_grpo.service.server import made_for, make_server_app, open_socket
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.datum import as_bytes, pass_of
from lowmem_grpo.service.tinker.serving import ServedModel, serve_model
from lowmem_grpo.service.users import Users
from lowmem_grpo.service.waiting import Call

KEY, API = "tml-" + "k" * 32, "/api/v1"
SIZES = {"64 x 512 tokens": (64, 512, 5), "1 x 2 tokens": (1, 2, 40)}  # sequences, tokens, rounds
PROMPT = 16  # tokens of a prompt
OVERHEAD: dict[str, tables.Figure] = {
    "call": "size", "served, s": ("served_s", ".4f"), "in process, s": ("in_process_s", ".4f"),
    "ratio": ("ratio", ".3f"), "more, ms": ("more_ms", ".1f")}
INFLIGHT: dict[str, tables.Figure] = {
    "requests": "requests", "served, tokens/s": "served_tokens_s", "in process, tokens/s": "in_process_tokens_s",
    "ratio": ("ratio", ".3f"), "of the processor": ("processor_ratio", ".3f")}


@contextmanager
def serving() -> Iterator[tuple[ServedModel, int]]:
    """Yield a served model, and the port of its server."""
    with tempfile.TemporaryDirectory(prefix="lowmem-service-") as root:
        database = Database(Path(root) / "server.sqlite")
        model = serve_model("tiny", database, Path(root) / "models", load_in_4bit=False, max_seq_length=1024)
        listening = open_socket("127.0.0.1", 0)
        server = made_for(make_server_app({API: model.router}, Users(KEY), Limits()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield model, listening.getsockname()[1]
        server.should_exit = True
        thread.join()
        model.close()
        database.close()


class Connection:
    """One connection to a server, on which one request is made after the other."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def post(self, path: str, body: bytes | dict[str, Any]) -> bytes:
        """Return the content of a reply. RuntimeError for one that is not of the status 200."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.writer.write(f"POST {API}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEY}\r\nContent-Length: "
                          f"{len(content)}\r\n\r\n".encode() + content)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = await self.reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{path} was answered {head.partition(chr(13))[0]}: {found[:300]!r}")
        return found

    async def json(self, path: str, body: bytes | dict[str, Any]) -> Any:
        return json.loads(await self.post(path, body))

    async def result(self, asked: dict[str, Any]) -> bytes:
        """Return what was promised, once it is there."""
        promise = {"request_id": asked["request_id"]}
        while (found := await self.post("retrieve_future", promise))[:20].startswith(b'{"type"'):
            pass
        return found

    async def sample(self, sampler: str, number: int, tokens: int) -> int:
        """Return how many tokens of a sample were read."""
        found = await self.result(await self.json("asample", {
            "sampling_session_id": sampler, "seq_id": number, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt_of(number)}]},
            "sampling_params": {"max_tokens": tokens, "seed": number, "stop": []}}))
        return sum(len(one.tokens) // 4 for one in wire.SampleResponse.FromString(found).sequences)


# One call of forward_backward


async def make_model(port: int) -> str:
    """Return the name of a new model on the server."""
    connection = await Connection(port).open()
    session = (await connection.json("create_session", {}))["session_id"]
    made = await connection.json("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny",
                                                  "lora_config": {"rank": 8, "seed": 1}})
    await connection.result(made)
    return str(made["model_id"])


async def call_served(port: int, request: Any) -> None:
    """Call, until the answer is read, over a new connection: the server ends one that was idle for seconds."""
    connection = await Connection(port).open()
    request.seq_id += 1
    await connection.result(await connection.json("forward_backward", request.SerializeToString()))
    connection.writer.close()


def request_of(model: str, sequences: int, tokens: int) -> Any:
    """Return a request with random data."""
    drawn = torch.Generator().manual_seed(0)
    request = wire.ForwardBackwardRequest(loss_fn="cross_entropy", model_id=model)
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


@click.group(help=__doc__)
def main() -> None:
    torch.manual_seed(0)


@main.command()
@options.output("service_overhead")
def overhead(output: Path) -> None:
    """Time one call of forward_backward."""
    where, rows, seq = machine(), [], 0
    with serving() as (model, port):
        name, training = asyncio.run(make_model(port)), model.training
        for size, (sequences, tokens, count) in SIZES.items():
            request = request_of(name, sequences, tokens)
            request.seq_id, asked = seq, pass_of(request, training.bounds)
            own = partial(training.adapters.run, name, asked)
            taken = rounds.take_turns({
                "served": lambda request=request: seconds(lambda: asyncio.run(call_served(port, request))),
                "in_process": lambda own=own: seconds(lambda: model.desk.run(own).result())}, count)
            seq, (served, inside) = request.seq_id, map(median, taken.values())
            rows.append({"size": size, "rounds": count, "threads": torch.get_num_threads(),
                         "served_s": round(served, 5), "in_process_s": round(inside, 5),
                         "ratio": rounds.ratio(taken["served"], taken["in_process"]),
                         "more_ms": round(1000 * (served - inside), 2)})
            append_row(output, rows[-1] | where)
    tables.print_rows(rows, OVERHEAD)


# Many requests for samples


def prompt_of(number: int) -> list[int]:
    """Return token ids of a prompt that no other request has."""
    return [3 + number % 300, 3 + number // 300, *range(5, 3 + PROMPT)]


async def ask_all(port: int, count: int, tokens: int) -> tuple[float, int]:
    """Return (seconds, tokens) of so many samples at once."""
    first = await Connection(port).open()
    session = (await first.json("create_session", {}))["session_id"]
    sampler = (await first.json("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}))["sampling_session_id"]
    connections = [await Connection(port).open() for _ in range(count)]
    began = time.perf_counter()
    read = await asyncio.gather(*(one.sample(sampler, n, tokens) for n, one in enumerate(connections)))
    taken = time.perf_counter() - began
    for one in (first, *connections):
        one.writer.close()
    return taken, sum(read)


def ask(port: int, count: int, tokens: int) -> tuple[float, int]:
    return asyncio.run(ask_all(port, count, tokens))


def in_process(model: ServedModel, count: int, tokens: int) -> tuple[float, int]:
    """Do the same without a server."""
    began = time.perf_counter()
    futures = [model.desk.submit(Call(prompt_of(n), SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True), None))
               for n in range(count)]
    drawn = sum(len(one.result().completion_ids) for one in futures)
    return time.perf_counter() - began, drawn


def spent(ask: Callable[[], tuple[float, int]], wanted: int) -> tuple[float, float]:
    """Return (seconds, processor seconds of this process) of one way."""
    began = time.process_time()
    taken, drawn = ask()
    if drawn != wanted:
        raise click.ClickException(f"{drawn} tokens were drawn instead of {wanted}")
    return taken, time.process_time() - began


@main.command()
@options.output("service_inflight")
@click.option("--count", default=2000, show_default=True, help="Requests in flight.")
@click.option("--tokens", default=256, show_default=True, help="Tokens of each sample.")
@click.option("--rounds", "times", default=3, show_default=True)
def inflight(output: Path, count: int, tokens: int, times: int) -> None:
    """Time many requests for samples at once."""
    with serving() as (model, port), multiprocessing.get_context("spawn").Pool(1) as client:
        ways = {"served": partial(client.apply, ask, (port, count, tokens)),
                "in_process": partial(in_process, model, count, tokens)}
        found = rounds.take_turns({name: partial(spent, way, count * tokens) for name, way in ways.items()}, times)
    wall, work = ({name: [pair[place] for pair in pairs] for name, pairs in found.items()} for place in (0, 1))
    row = {"requests": count, "tokens": tokens, "rounds": times, "threads": torch.get_num_threads(),
           **{f"{name}_tokens_s": round(count * tokens / median(taken)) for name, taken in wall.items()},
           "ratio": rounds.ratio(wall["in_process"], wall["served"]),
           "processor_ratio": rounds.ratio(work["in_process"], work["served"])}
    append_row(output, row | machine())
    tables.print_rows([row], INFLIGHT)


if __name__ == "__main__":
    main()
