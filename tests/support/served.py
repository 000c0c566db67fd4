"""A model that is served at a loopback address, with keys of two users."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from lowmem_grpo.service.allowance import Allowances
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.limits import Limits
from lowmem_grpo.service.server import made_for, make_server_app, open_socket
from lowmem_grpo.service.tinker.serving import ServedModel, serve_model
from lowmem_grpo.service.users import User, Users

OWNER, OTHER = "tml-" + "k" * 32, "tml-" + "o" * 32


@dataclass
class Serving:
    """A model, and where it answers."""

    model: ServedModel
    url: str

    def openai(self, key: str = OWNER) -> openai.OpenAI:
        """OpenAI's own client of it. Close it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


@contextmanager
def serving(folder: Path, name: str = "tiny", context: int = 64, allowances: Allowances | None = None,
            **loading: Any) -> Iterator[Serving]:
    """Inside, the model is served; its clients are to be closed before the end."""
    database = Database(folder / "server.sqlite")
    loading = {"load_in_4bit": False, "max_seq_length": context} | loading
    model = serve_model(name, database, folder / "models", allowances, **loading)
    listening = open_socket("127.0.0.1", 0)
    server = made_for(make_server_app(model.routers(), Users(OWNER, [(User("other"), OTHER)]), Limits()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Serving(model, f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(60)
        model.close()
        database.close()
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def tinker_client(served: Serving, key: str = OWNER) -> Iterator[Any]:
    """The real client of the Tinker protocol, which is closed afterwards: else its thread would go on asking, and
    warning in the logs of other tests."""
    import tinker

    made = tinker.ServiceClient(base_url=served.url, api_key=key)
    try:
        yield made
    finally:
        made.close("success").result(60)
