"""Many requests for samples in flight at once, over HTTP and in the process.

    OMP_NUM_THREADS=1 python -m bench.service.inflight

The model in the package; every request has a prompt of its own and draws the same number of tokens. "Served" are
requests of the Tinker protocol from a process of their own, each over a connection of its own that is open already,
until the last sample is read; "in process" are the same calls given to the desk, which batches them for the engine.
They take turns. At least 0.9 of the tokens a second in the process are wanted over HTTP. The ratio of
the processor's seconds tells what a request costs on a machine that has other work.
"""

import asyncio
import json
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.service.call import Call
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.errors import Limits
from lowmem_grpo.service.server import made_for, make_server_app, open_socket
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.serving import ServedModel, serve_model
from lowmem_grpo.service.users import Users

RESULTS = Path(__file__).resolve().parents[1] / "results" / "service_inflight.jsonl"
KEY, API = "tml-" + "k" * 32, "/api/v1"
PROMPT, LEAST = 16, 0.9  # tokens of a prompt; of the tokens a second in the process
console = Console(width=100)


class Connection:
    """One connection to a server, on which one request is made after the other."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The content of a reply. RuntimeError for one that is not of the status 200."""
        content = json.dumps(body).encode()
        self.writer.write(f"POST {API}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {KEY}\r\nContent-Length: "
                          f"{len(content)}\r\n\r\n".encode() + content)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = await self.reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{path} was answered {head.partition(chr(13))[0]}: {found[:300]!r}")
        return found

    async def sample(self, sampler: str, number: int, tokens: int) -> int:
        """The tokens of a sample that were read."""
        asked = await self.post("asample", {
            "sampling_session_id": sampler, "seq_id": number, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt_of(number)}]},
            "sampling_params": {"max_tokens": tokens, "seed": number, "stop": []}})
        promise = {"request_id": json.loads(asked)["request_id"]}
        while (found := await self.post("retrieve_future", promise)).startswith(b"{"):
            pass
        return sum(len(one.tokens) // 4 for one in wire.SampleResponse.FromString(found).sequences)


def prompt_of(number: int) -> list[int]:
    """Token ids of a prompt that no other request has."""
    return [3 + number % 300, 3 + number // 300, *range(5, 3 + PROMPT)]


async def ask_all(port: int, count: int, tokens: int, round_number: int) -> tuple[float, int]:
    """(seconds, tokens) of so many samples at once."""
    first = await Connection(port).open()
    session = json.loads(await first.post("create_session", {}))["session_id"]
    sampler = json.loads(await first.post("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": round_number, "base_model": "tiny"}))["sampling_session_id"]
    connections = [await Connection(port).open() for _ in range(count)]
    began = time.perf_counter()
    read = await asyncio.gather(*(one.sample(sampler, n, tokens) for n, one in enumerate(connections)))
    taken = time.perf_counter() - began
    for one in (first, *connections):
        one.writer.close()
    return taken, sum(read)


def client(port: int, count: int, tokens: int, pipe: Any) -> None:
    """The work of the process that asks: a round for each number that it is sent."""
    while (number := pipe.recv()) is not None:
        pipe.send(asyncio.run(ask_all(port, count, tokens, number)))


def in_process(model: ServedModel, count: int, tokens: int) -> tuple[float, int]:
    """The same without a server."""
    began = time.perf_counter()
    futures = [model.desk.submit(Call(prompt_of(n), SamplingParams(max_tokens=tokens, seed=n, ignore_eos=True), None))
               for n in range(count)]
    drawn = sum(len(one.result().completion_ids) for one in futures)
    return time.perf_counter() - began, drawn


def measured(model: ServedModel, pipe: Any, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of both ways."""
    taken: dict[str, list[float]] = {"served": [], "in_process": []}
    worked: dict[str, list[float]] = {"served": [], "in_process": []}  # seconds of this process, not the client's
    for number in range(rounds + 1):  # the first one warms up
        for name in sorted(taken, reverse=bool(number % 2)):
            began = time.process_time()
            if name == "served":
                pipe.send(number)
            seconds, drawn = pipe.recv() if name == "served" else in_process(model, count, tokens)
            if drawn != count * tokens:
                raise click.ClickException(f"{name} drew {drawn} tokens instead of {count * tokens}")
            taken[name].append(seconds)
            worked[name].append(time.process_time() - began)
            console.print(f"round {number}, {name}: {seconds:.2f} s, processor {worked[name][-1]:.2f} s")
    ratio = median(b / a for a, b in zip(taken["served"][1:], taken["in_process"][1:], strict=True))
    speeds = {f"{name}_tokens_s": round(count * tokens / median(times[1:])) for name, times in taken.items()}
    processor = median(b / a for a, b in zip(worked["served"][1:], worked["in_process"][1:], strict=True))
    return speeds | {"ratio": round(ratio, 4), "processor_ratio": round(processor, 4)}


@click.command(help=__doc__)
@options.output(RESULTS)
@click.option("--count", default=2000, show_default=True, help="Requests in flight.")
@click.option("--tokens", default=256, show_default=True, help="Tokens of each sample.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--keep/--dry", default=True, help="Whether a row is kept.")
def main(output: Path, count: int, tokens: int, rounds: int, keep: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="lowmem-inflight-") as root:
        database = Database(Path(root) / "server.sqlite")
        model = serve_model("tiny", database, Path(root) / "models", load_in_4bit=False, max_seq_length=1024)
        listening = open_socket("127.0.0.1", 0)
        server = made_for(make_server_app({API: model.router}, Users(KEY), Limits()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=client, args=(listening.getsockname()[1], count, tokens, theirs), daemon=True)
        process.start()
        found = measured(model, ours, count, tokens, rounds)
        ours.send(None)
        process.join()
        server.should_exit = True
        thread.join()
        model.close()
        database.close()
    if keep:
        append_row(output, {"requests": count, "tokens": tokens, "rounds": rounds, "threads": torch.get_num_threads(),
                            **found} | machine())
    console.print(tables.terminal(None, ["requests", "served, tokens/s", "in process, tokens/s", "ratio"], [
        [str(count), str(found["served_tokens_s"]), str(found["in_process_tokens_s"]), f"{found['ratio']:.3f}"]]))


if __name__ == "__main__":
    main()
