"""Upload exported folders to the Hugging Face hub, and find models and datasets there, through huggingface_hub."""

import logging
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from lowmem_grpo.runs.files import CARD, beside, has_own_card
from lowmem_grpo.utils import is_gguf

logger = logging.getLogger(__name__)
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
RUNS = "runs"  # where the recipes write
SECONDS = 4.0  # to wait for the hub, unless HF_HUB_ETAG_TIMEOUT is set
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


class HubError(RuntimeError):
    """A request to the hub failed, such as an upload; the message says which, and what to do."""


def check_repo(repo: str) -> None:
    """Raise ValueError unless the name has the form OWNER/NAME."""
    if not REPO.fullmatch(repo):
        raise ValueError(f"the repository is {repo!r}; a name on the hub has the form OWNER/NAME")


def client(token: str | None = None) -> Any:
    return huggingface_hub.HfApi(token=token)


def full_name(repo: str, token: str | None = None, api: Any = None) -> str:
    """Return a repository's OWNER/NAME; a missing owner is the token's user. HubError if that cannot be looked up."""
    if "/" in repo:
        return repo
    try:
        return f"{(api or client(token)).whoami()['name']}/{repo}"
    except Exception as error:  # each version raises network errors of another library
        raise HubError(f"the owner of the repository {repo!r} is unknown: set hub_model_id='OWNER/NAME', and log in "
                       "with `hf auth login`") from error


def push(folder: Path, repo: str, private: bool = True, api: Any = None, message: str | None = None) -> str:
    """Create the repository if needed, upload the folder, return the commit's URL; HubError if the hub refuses."""
    check_repo(repo)
    api = api or client()
    try:
        api.create_repo(repo_id=repo, private=private, exist_ok=True)
        left = [CARD] if has_own_card(folder) and api.file_exists(repo, CARD) and not has_own_card(
            Path(api.hf_hub_download(repo, CARD)).parent) else None
        if left:
            logger.warning("README.md of %s was written by somebody and stays; `hf upload` replaces it", repo)
        commit = api.upload_folder(folder_path=str(folder), repo_id=repo, ignore_patterns=left,
                                   commit_message=message or "Model trained with lowmem-grpo")
    except Exception as error:  # as above
        raise HubError(f"the hub did not take {repo}: {first_line(error)}. The files in {folder} are complete: run "
                       f"`hf auth login`, then `hf upload {repo} {folder}`") from error
    return str(getattr(commit, "commit_url", commit))


def model_folder(path: str, revision: str | None = None) -> Path:
    """Return a model's folder or GGUF file: `path`, or the hub's, cached or downloaded. OSError if there is none."""
    if Path(path).exists():
        return Path(path)
    if is_gguf(path):
        return Path(gguf_of_hub(path, revision))
    find_model(path, revision)
    try:
        return Path(huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:
        raise OSError(f"no model {path!r}: it is not a folder, and the hub did not provide it ({first_line(error)})"
                      ) from error


def gguf_of_hub(name: str, revision: str | None = None, token: str | None = None, cache_dir: str | None = None,
                local_files_only: bool = False) -> str:
    """Return the path of the GGUF file OWNER/NAME/FILE of the hub, cached or downloaded; OSError if there is none."""
    owner, repo, file = name.split("/", 2)
    try:
        return str(huggingface_hub.hf_hub_download(f"{owner}/{repo}", file, revision=revision, token=token,
                                                   cache_dir=cache_dir, local_files_only=local_files_only))
    except (OSError, ValueError) as error:
        raise OSError(f"no model {name!r}: there is no such file here, and the hub did not provide {file} of "
                      f"{owner}/{repo} ({first_line(error)})") from error


@cache  # an exception is not cached: the next call asks again
def find_model(
    name: str, revision: str | None = None, token: str | None = None, cache_dir: str | None = None,
    local_files_only: bool = False, weights: bool = True,
) -> None:
    """Raise a one-line OSError if the hub lacks or refuses a model, or gives no answer in time. The hub is not asked
    about a model whose config, and weights if `weights`, are in the cache."""
    try:
        if is_cached(name, revision, cache_dir, weights):
            return
        if local_files_only:
            raise OSError(away("model", name, "local_files_only=True allows no download"))
        url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision)
        answer(lambda: huggingface_hub.get_hf_file_metadata(url, token=token, timeout=patience()))
    except errors.HFValidationError as error:
        raise OSError(f"no model {name!r}: that is no name on the hub ({first_line(error)})") from error
    except errors.GatedRepoError as error:
        raise OSError(f"no model {name!r}: it is gated. Ask its owner for access on its page of the hub, then "
                      "hf auth login, or token=...") from error
    except errors.RepositoryNotFoundError as error:
        absent = f"{said}, and " if (said := misspelled(name)) else ""
        raise OSError(f"no model {name!r}: {absent}the hub has no such model, or it is private (then: hf auth login, "
                      "or token=...)") from error
    except errors.RevisionNotFoundError as error:
        raise OSError(f"no model {name!r}: on the hub it has no revision {revision!r}") from error
    except errors.HfHubHTTPError:
        return  # the network works, and loading the model will raise a better message
    except NoAnswerError as error:
        raise OSError(away("model", name, str(error))) from None  # the message already has the cause


def is_cached(name: str, revision: str | None, cache_dir: str | None, weights: bool) -> bool:
    """Return whether the hub's cache has a model's config and, if `weights`, its weights."""
    config, *held = (isinstance(huggingface_hub.try_to_load_from_cache(name, file, cache_dir, revision), str)
                     for file in ("config.json", *WEIGHTS))
    return config and (not weights or any(held))


def dataset_cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))


def is_loaded_before(dataset: str) -> bool:
    """Return whether the cache has a hub dataset. Case, underscores and slashes in folder names are ignored."""
    def plain(text: str) -> str:
        return text.replace("_", "").replace("/", "").lower()

    places = dataset_cache()
    return places.is_dir() and any(plain(place.name) == plain(dataset) for place in places.iterdir())


@cache  # an exception is not cached: the next call asks again
def find_dataset(name: str, api: Any = None) -> None:
    """Raise ValueError if the hub lacks the dataset, OSError if the hub refuses it or gives no answer in time. The hub
    is not asked about a cached dataset."""
    if is_loaded_before(name):
        return
    api = api or huggingface_hub.HfApi()
    try:
        answer(lambda: api.dataset_info(name, timeout=patience()))
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no dataset {name!r}, or it is private (then: hf auth login)") from error
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is no name on the hub ({first_line(error)})") from error
    except errors.HfHubHTTPError as error:
        raise OSError(f"the hub refused {name!r} ({first_line(error)})") from error
    except NoAnswerError as error:
        raise OSError(away("dataset", name, str(error))) from None  # the message already has the cause


class NoAnswerError(Exception):
    """The hub cannot be reached, or offline mode forbids asking it; the message says why."""


def answer(ask: Callable[[], Any]) -> None:
    """Ask the hub once. Re-raise the hub's HTTP and validation errors; NoAnswerError if no answer comes in time. A
    thread limits the time: a client's timeout starts anew for each address and does not cover the DNS look-up."""
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def work() -> None:
        try:
            ask()
            answers.put(None)
        except Exception as error:  # noqa: BLE001  (the other thread raises it)
            answers.put(error)

    if constants.is_offline_mode():
        work()  # refuses at once, or says that the name is none
    else:
        Thread(target=work, daemon=True).start()
    try:
        error = answers.get(timeout=patience())
    except Empty:
        raise NoAnswerError(f"the hub gave no answer in {patience():g} s (HF_HUB_ETAG_TIMEOUT=30 waits 30 s)") from None
    if isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError)):
        raise error
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise NoAnswerError("HF_HUB_OFFLINE allows no download") from error
    if error is not None:  # each version raises network errors of another library
        raise NoAnswerError(f"the hub does not answer ({first_line(error)})") from error


def patience() -> float:
    """Return the seconds to wait for an answer from the hub."""
    asked = constants.HF_HUB_ETAG_TIMEOUT
    return SECONDS if asked == constants.DEFAULT_ETAG_TIMEOUT else float(asked)


def away(kind: str, name: str, why: str) -> str:
    """Return a message that says why a model or dataset is not available, and how to download it."""
    fetch = f"hf download {name}; or give its folder"
    if kind == "dataset":  # without a network, `datasets` cannot read what `hf download` fetched
        fetch = f"datasets.load_dataset({name!r}, split='train').to_json('rows.jsonl'); then give that file"
    if kind == "model" and (absent := misspelled(name)):
        return f"no model {name!r}: {absent}, and on the hub, {why}"
    return f"no {kind} {name!r}: it is not in the cache, and {why}. Where there is a network: {fetch}"


def misspelled(name: str) -> str:
    """Return what lies where a model's name would be a folder; "" unless it may have been meant as one."""
    here = Path(name).parent
    meant = str(here) == RUNS or (str(here) != "." and here.is_dir())
    return f"there is no such folder ({beside(Path(name))})" if meant else ""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
