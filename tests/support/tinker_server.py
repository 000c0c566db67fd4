"""A served small model, and a plain client of its routes."""

import json
from pathlib import Path
from typing import Any

import torch
from served import MODEL, OTHER, OWNER, HeldUp
from starlette.testclient import TestClient
from torch import Tensor

from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import make_server_app
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.serving import serve_model
from lowmem_grpo.server.users import Allowances, User, Users
from tests.attacks.service_kills import API
from tests.attacks.service_kills import forward_backward as body


class Server(HeldUp):
    """A served small model over a folder, and a plain client of it."""

    def __init__(self, folder: Path, allowances: Allowances | None = None, name: str = MODEL, heads: int = 0) -> None:
        self.database, self.name = Database(folder / "server.sqlite"), name
        self.model = serve_model(name, self.database, folder / "models", allowances, heads=heads, load_in_4bit=False,
                                 max_seq_length=64)
        users = Users(OWNER, [(User("other"), OTHER)])
        app = make_server_app({API: self.model.router}, users, Limits())
        self.http = TestClient(app, base_url="http://127.0.0.1")

    def post(self, path: str, body: Any, key: str = OWNER, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(f"{API}/{path}", content=content, headers={"X-API-Key": key} | headers)

    def create(self, rank: int = 4, number: int = 0, key: str = OWNER, **lora: Any) -> str:
        session = self.post("create_session", {"tags": []}, key).json()["session_id"]
        made = self.post("create_model", {"session_id": session, "model_seq_id": number, "base_model": self.name,
                                          "lora_config": {"rank": rank, "seed": 3} | lora}, key).json()
        kept = self.wait(made, key).json()
        assert kept.get("model_id") == made["model_id"], kept
        return str(made["model_id"])

    def wait(self, promise: dict[str, Any], key: str = OWNER) -> Any:
        return self.post("retrieve_future", {"request_id": promise["request_id"]}, key)

    def asked(self, route: str, key: str = OWNER, /, **body: Any) -> Any:
        """What a promise was kept with, or the error of the request itself."""
        reply = self.post(route, body, key)
        return reply.json() if reply.status_code != 200 else self.wait(reply.json(), key).json()

    def get(self, path: str, key: str = OWNER, method: str = "GET", **more: Any) -> Any:
        return self.http.request(method, f"{API}/{path}", headers={"X-API-Key": key}, **more)

    def forward_backward(self, model: str, seq: int, seed: int, **changes: Any) -> Any:
        return self.post("forward_backward", body(model, seq, seed, **changes)).json()

    def optim_step(self, model: str, seq: int) -> Any:
        return self.post("optim_step", {"model_id": model, "seq_id": seq,
                                        "adam_params": {"learning_rate": 0.01, "grad_clip_norm": 1.0}}).json()

    def train(self, model: str, seq: int, seed: int = 1) -> Any:
        """A pass and a step, numbered from `seq` on; what the step's promise was kept with."""
        self.wait(self.forward_backward(model, seq, seed))
        return self.wait(self.optim_step(model, seq + 1)).json()

    def trained(self, steps: int = 1, number: int = 0, **lora: Any) -> str:
        """A model after so many steps."""
        model = self.create(number=number, **lora)
        for step in range(steps):
            self.train(model, 2 * step + 1, step)
        return model

    def sample(self, sampler: str, seq: int = 1, **more: Any) -> Any:
        return self.post("asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": [5, 6, 7],
                                     "sampling_params": {"max_tokens": 1}} | more)

    def sampler(self, session: str = "", number: int = 0, path: str | None = None) -> str:
        """The id of a sampling session, of a new session's if none is given: of the base model, or of a path."""
        session = session or self.post("create_session", {}).json()["session_id"]
        source = {"base_model": self.name} if path is None else {"model_path": path}
        return str(self.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": number, **source}).json()["sampling_session_id"])

    def state(self, model: str) -> dict[str, Tensor]:
        """Of a model in memory; one that is not is as the disk has it."""
        training = self.model.training
        held = training.adapters.held

        def read() -> dict[str, Tensor]:
            if model not in held:
                training.load(training.store.model(model))
            return training.adapters.state(model)

        return self.model.worker.run(read).result()

    def close(self) -> None:
        self.model.close()
        self.database.close()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
