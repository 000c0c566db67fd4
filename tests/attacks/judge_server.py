"""A server on this machine that speaks /v1/chat/completions and /v1/completions as a test or an attack tells it to."""

import contextlib
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
Reply = tuple[Any, ...]  # status, a body (see `say`), and perhaps {header: value}
RAW = 0  # in place of a status: the body is all that goes over the connection, which then ends


@dataclass
class JudgeServer:
    """What it was asked, and how many requests were open at once."""

    answer: Callable[[dict[str, Any]], Reply]
    asked: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, str]] = field(default_factory=list)  # the headers of each request
    sent: int = 0  # bytes of bodies without a known end, and of raw ones
    open: int = 0
    most_open: int = 0
    url: str = ""
    lock: Any = field(default_factory=threading.Lock)
    close: Callable[[], None] = lambda: None

    def reply(self, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.asked.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            return self.answer(body)
        finally:
            with self.lock:
                self.open -= 1


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[JudgeServer]:
    """Serves on a free port until the end of the block."""
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if closed.is_set():  # a connection that was kept open ends, too
                self.close_connection = True
                return
            judge.told.append(dict(self.headers))
            known = self.path in ("/v1/chat/completions", "/v1/completions")
            reply = judge.reply(body) if known else (404, {"error": "no page"})
            with contextlib.suppress(OSError):  # the client did not wait
                self.say(*reply)

        def say(self, status: int, found: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
            """A body is an object, its JSON in bytes, text that is no JSON, or pieces of bytes without a known end."""
            endless = isinstance(found, Iterator)
            if status == RAW:
                self.close_connection = True
                self.pour(found)
                return
            text = found if endless or isinstance(found, str | bytes) else json.dumps(found)
            sent = text.encode() if isinstance(text, str) else text
            # the client's own pause would be half a second
            pause = {"Retry-After-Ms": "10"} if status in (429, 500, 503) else {}
            length = {"Transfer-Encoding": "chunked"} if endless else {"Content-Length": str(len(sent))}
            kind = {"Content-Type": "text/html" if isinstance(found, str) else "application/json"}
            self.send_response(status)
            for name, value in {**kind, **length, **pause, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not endless:
                self.wfile.write(sent)
                return
            self.pour(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in itertools.chain(found, [b""]))

        def pour(self, pieces: Iterator[bytes]) -> None:
            for piece in pieces:
                self.wfile.write(piece)
                judge.sent += len(piece)

        def log_message(self, *words: Any) -> None:
            """Nothing on the terminal."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *request: Any) -> None:
            """The client has hung up: nothing on the terminal."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(*request)

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    closed = threading.Event()

    def close() -> None:
        if not closed.is_set():
            closed.set()
            server.shutdown()
            server.server_close()

    judge.close = close
    try:
        yield judge
    finally:
        close()
        thread.join()


def chat(text: str | None, finish: str = "stop") -> Reply:
    """A chat completion that says `text`."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                 "usage": USAGE}


def answers_in(body: dict[str, Any]) -> list[str]:
    """The answers that a judge was shown."""
    user = body["messages"][-1]["content"]
    found = re.findall(r"^=== ANSWER[ \d]* (\w{12})\n(.*?)\n=== END \1\b", user, re.DOTALL | re.MULTILINE)
    return [text for _, text in found]


def by_length(body: dict[str, Any]) -> Reply:
    """A judge that likes short answers: 1 / (1 + characters), on the scale that it is asked for."""
    found = answers_in(body)
    high = float(re.findall(r"to ([\d.]+) \(best\)", body["messages"][0]["content"])[0])
    scores = [high / (1 + len(text)) for text in found]
    if "every id from 1" in body["messages"][0]["content"]:
        entries = [{"id": place, "reason": f"r{place}", "score": score} for place, score in enumerate(scores, 1)]
        return chat(json.dumps({"scores": entries}))
    return chat(json.dumps({"reason": "r", "score": scores[0]}))


def slowly(seconds: float, answer: Callable[[dict[str, Any]], Reply] = by_length) -> Callable[[dict[str, Any]], Reply]:
    def wait(body: dict[str, Any]) -> Reply:
        time.sleep(seconds)
        return answer(body)

    return wait


def in_turn(*answers: Callable[[dict[str, Any]], Reply] | Reply) -> Callable[[dict[str, Any]], Reply]:
    """The first answer first, and so on; the last one for good."""
    left, lock = list(answers), threading.Lock()

    def answer(body: dict[str, Any]) -> Reply:
        with lock:
            now = left.pop(0) if len(left) > 1 else left[0]
        return now(body) if callable(now) else now

    return answer
