"""The routes of saved weights, and of a user's models, which the protocol calls training runs."""

from datetime import UTC, datetime

from lowmem_grpo.server.tinker.calls import KeepFor, ListPage, read
from lowmem_grpo.server.tinker.checkpoint_store import SAMPLING, TRAINING, Saved
from lowmem_grpo.server.tinker.request_store import StoredModel, UnknownError
from lowmem_grpo.server.tinker.route_utils import Answers, ApiRequest, Json, Served
from lowmem_grpo.server.tinker.training import Training
from lowmem_grpo.server.tinker.usage import UNLOAD

MOST = 1000  # entries of a list
TYPES = {TRAINING: "training", SAMPLING: "sampler"}


class ListRoutes:
    """Routes that list, show and delete a user's models and saved weights."""

    def __init__(self, training: Training, served: Served) -> None:
        self.training, self.shelf, self.served = training, training.shelf, served

    def answers(self) -> dict[str, Answers]:
        run = "/training_runs/{model}"
        weights = f"{run}/checkpoints/{{kind}}/{{name}}"
        return {
            "POST /weights_info": self.weights_info,
            "GET /checkpoints": self.checkpoints,
            f"GET {run}/checkpoints": self.checkpoints_of_run,
            f"DELETE {weights}": lambda asked: self.shelf.delete(path_in(asked), asked.owner),
            f"PUT {weights}/ttl": lambda asked: self.shelf.keep_for(path_in(asked), asked.owner,
                                                                    read(KeepFor, asked.body).ttl_seconds),
            "GET /training_runs": self.training_runs,
            f"GET {run}": lambda asked: self.run(self.training.ledger.model(asked.path["model"], asked.owner)),
            f"POST /{UNLOAD}": self.unload_model,
        }

    def weights_info(self, asked: ApiRequest) -> Json:
        settings = self.shelf.find(asked.json.get("tinker_path"), asked.owner).settings
        return {"base_model": self.served.name, "is_lora": True, "lora_rank": settings.rank, "train_unembed": False,
                "train_mlp": settings.mlp, "train_attn": settings.attention}

    def checkpoints(self, asked: ApiRequest) -> Json:
        saved = self.shelf.all(asked.owner)
        return {"checkpoints": list(map(listed, saved)),
                "cursor": {"offset": 0, "limit": len(saved), "total_count": len(saved)}}

    def checkpoints_of_run(self, asked: ApiRequest) -> Json:
        model = self.training.ledger.model(asked.path["model"], asked.owner)
        return {"checkpoints": list(map(listed, self.shelf.all(asked.owner, model.id)))}

    def training_runs(self, asked: ApiRequest) -> Json:
        page, models = read(ListPage, asked.query), self.training.ledger.models(asked.owner)[::-1]
        most = min(page.limit, MOST)
        return {"training_runs": list(map(self.run, models[page.offset:page.offset + most])),
                "cursor": {"offset": page.offset, "limit": most, "total_count": len(models)}}

    def run(self, model: StoredModel) -> Json:
        saved = self.shelf.all(model.owner, model.id)
        newest = {kind: next((listed(entry) for entry in saved if entry.kind == kind), None) for kind in TYPES}
        return {"training_run_id": model.id, "base_model": self.served.name, "model_owner": model.owner,
                "is_lora": True, "lora_rank": model.settings.rank, "last_request_time": moment(model.asked),
                "corrupted": False, "last_checkpoint": newest[TRAINING], "last_sampler_checkpoint": newest[SAMPLING]}

    def unload_model(self, asked: ApiRequest) -> Json:
        """Unload a model, and return a promise that is already fulfilled. A repeated call returns it again."""
        model = asked.json.get("model_id")
        try:
            self.training.unload(self.training.ledger.model(model, asked.owner))
        except UnknownError:
            self.training.runs.gone(str(model), asked.owner)
        return {"request_id": f"{model}:{UNLOAD}", "model_id": model, "type": UNLOAD}


def path_in(asked: ApiRequest) -> str:
    return "tinker://{model}/{kind}/{name}".format(**asked.path)


def listed(saved: Saved) -> Json:
    return {"checkpoint_id": "/".join(saved.path.split("/")[-2:]), "checkpoint_type": TYPES[saved.kind],
            "time": moment(saved.made), "tinker_path": saved.path, "size_bytes": saved.size, "public": False,
            "expires_at": None if saved.expires is None else moment(saved.expires)}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
