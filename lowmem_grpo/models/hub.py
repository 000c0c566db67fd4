"""Exported folders on the Hugging Face hub, and models from there, through huggingface_hub."""

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

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SECONDS = 4.0  # for an answer of the hub, unless HF_HUB_ETAG_TIMEOUT says otherwise
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


class HubError(RuntimeError):
    """The hub did not take or give something; the message says what, and what to do."""


def check_repo(repo: str) -> None:
    """ValueError unless the name reads OWNER/NAME."""
    if not REPO.fullmatch(repo):
        raise ValueError(f"the repository is {repo!r}; one of the hub is named OWNER/NAME")


def client(token: str | None = None) -> Any:
    return huggingface_hub.HfApi(token=token)


def full_name(repo: str, token: str | None = None, api: Any = None) -> str:
    """OWNER/NAME of a repository; without an owner, that of the token. HubError where there is none."""
    if "/" in repo:
        return repo
    try:
        return f"{(api or client(token)).whoami()['name']}/{repo}"
    except Exception as error:  # network errors come from another library in each version
        raise HubError(f"whose repository {repo!r} should be is unknown: set hub_model_id='OWNER/NAME', and log in "
                       "with `hf auth login`") from error


def push(folder: Path, repo: str, private: bool = True, api: Any = None, message: str | None = None) -> str:
    """Create the repository if there is none and upload the folder; returns the commit's address or HubError."""
    check_repo(repo)
    api = api or client()
    try:
        api.create_repo(repo_id=repo, private=private, exist_ok=True)
        commit = api.upload_folder(folder_path=str(folder), repo_id=repo,
                                   commit_message=message or "Model trained with lowmem-grpo")
    except Exception as error:  # as above
        raise HubError(f"the hub did not take {repo}: {first_line(error)}. What lies in {folder} is whole: `hf "
                       f"auth login`, then `hf upload {repo} {folder}`") from error
    return str(getattr(commit, "commit_url", commit))


def model_folder(path: str, revision: str | None = None) -> Path:
    """The files of a model: a folder as it is, or those of a name on the hub or in its cache. OSError otherwise."""
    if Path(path).is_dir():
        return Path(path)
    find_model(path, revision)
    try:
        return Path(huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:
        raise OSError(f"no model {path!r}: it is not a folder, and the hub did not provide it ({first_line(error)})"
                      ) from error


@cache  # a refusal is not kept: the next call asks again
def find_model(
    name: str, revision: str | None = None, token: str | None = None, cache_dir: str | None = None,
    local_files_only: bool = False, weights: bool = True,
) -> None:
    """OSError in one line for a model that is not in the cache and that the hub does not give; without `weights` its
    config is enough. One that is in the cache is not asked for. Libraries would try for half a minute where there is no
    network, and say so in twenty lines."""
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
        raise OSError(f"no model {name!r}: the hub gives it only to those whom its owner admits. Ask on its page, then "
                      "hf auth login, or token=...") from error
    except errors.RepositoryNotFoundError as error:
        raise OSError(f"no model {name!r}: the hub has no such model, or not for everyone (then: hf auth login, or "
                      "token=...)") from error
    except errors.RevisionNotFoundError as error:
        raise OSError(f"no model {name!r}: on the hub it has no revision {revision!r}") from error
    except errors.HfHubHTTPError:
        return  # there is a network, and whoever loads the model says what is wrong
    except NoAnswerError as error:
        raise OSError(away("model", name, str(error))) from None  # it names the cause


def is_cached(name: str, revision: str | None, cache_dir: str | None, weights: bool) -> bool:
    """Return whether the hub's cache has a model's config, and its weights if they are wanted."""
    config, *held = (isinstance(huggingface_hub.try_to_load_from_cache(name, file, cache_dir, revision), str)
                     for file in ("config.json", *WEIGHTS))
    return config and (not weights or any(held))


def dataset_cache() -> Path:
    """Return the folder in which `datasets` keeps what it loaded."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))


def is_loaded_before(dataset: str) -> bool:
    """Return whether the cache has rows of a dataset of the hub, whose name it changes in case and underscores."""
    def plain(text: str) -> str:
        return text.replace("_", "").replace("/", "").lower()

    places = dataset_cache()
    return places.is_dir() and any(plain(place.name) == plain(dataset) for place in places.iterdir())


@cache  # a refusal is not kept: the next call asks again
def find_dataset(name: str, api: Any = None) -> None:
    """ValueError for a dataset that the hub does not have, OSError for no hub, soon; the cache comes first."""
    if is_loaded_before(name):
        return
    api = api or huggingface_hub.HfApi()
    try:
        answer(lambda: api.dataset_info(name, timeout=patience()))
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no dataset {name!r}, or not for everyone (then: hf auth login)") from error
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is no name on the hub ({first_line(error)})") from error
    except errors.HfHubHTTPError as error:
        raise OSError(f"the hub refused {name!r} ({first_line(error)})") from error
    except NoAnswerError as error:
        raise OSError(away("dataset", name, str(error))) from None  # it names the cause


class NoAnswerError(Exception):
    """The hub cannot be reached, or must not be asked; the message says why."""


def answer(ask: Callable[[], Any]) -> None:
    """Ask the hub once. Its refusals are raised as they are; NoAnswerError where none comes in time. A client's timeout
    holds for each address of the hub anew and not for the look-up of its name, so the time is kept outside of the
    client."""
    answers: SimpleQueue[Exception | None] = SimpleQueue()
    Thread(target=lambda: answers.put(failure(ask)), daemon=True).start()
    try:
        error = answers.get(timeout=patience())
    except Empty:
        raise NoAnswerError(f"the hub gave no answer in {patience():g} s (HF_HUB_ETAG_TIMEOUT=30 waits 30 s)") from None
    if isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError)):
        raise error
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise NoAnswerError("HF_HUB_OFFLINE allows no download") from error
    if error is not None:  # network errors come from another library in each version
        raise NoAnswerError(f"the hub does not answer ({first_line(error)})") from error


def failure(ask: Callable[[], Any]) -> Exception | None:
    """Call `ask`, and return what it raises."""
    try:
        ask()
    except Exception as error:  # noqa: BLE001  (another thread raises it)
        return error
    return None


def patience() -> float:
    """Return the seconds to wait for an answer of the hub."""
    asked = constants.HF_HUB_ETAG_TIMEOUT
    return SECONDS if asked == constants.DEFAULT_ETAG_TIMEOUT else float(asked)


def away(kind: str, name: str, why: str) -> str:
    """Say why a model or dataset of the hub is not there, and how to fetch it."""
    fetch = f"hf download {name}; or give its folder"
    if kind == "dataset":  # the library cannot read what `hf download` brings where there is no network
        fetch = f"datasets.load_dataset({name!r}, split='train').to_json('rows.jsonl'); then give that file"
    return f"no {kind} {name!r}: it is not in the cache, and {why}. Where there is a network: {fetch}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
