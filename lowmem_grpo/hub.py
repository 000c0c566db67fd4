"""Exported folders on the Hugging Face hub, and models from there, through huggingface_hub."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SECONDS = 5.0  # for an answer of the hub
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


class HubError(RuntimeError):
    """The hub did not take or give something; the message says what, and what to do."""


def check_repo(repo: str) -> None:
    """ValueError unless the name reads OWNER/NAME."""
    if not REPO.fullmatch(repo):
        raise ValueError(f"the repository is {repo!r}; one of the hub is named OWNER/NAME")


def client(token: str | None = None) -> Any:
    """What speaks to the hub, with a token or with that of `hf auth login`."""
    return huggingface_hub.HfApi(token=token)


def full_name(repo: str, token: str | None = None, api: Any = None) -> str:
    """OWNER/NAME of a repository; without an owner, that of the token. HubError where there is none."""
    if "/" in repo:
        return repo
    try:
        return f"{(api or client(token)).whoami()['name']}/{repo}"
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise HubError(f"whose repository {repo!r} should be is unknown: set hub_model_id='OWNER/NAME', and log in "
                       "with `hf auth login`") from error


def push(folder: Path, repo: str, private: bool = True, api: Any = None, message: str | None = None) -> str:
    """Create the repository if there is none, and upload the folder; returns the address of the commit.

    `api` is a huggingface_hub.HfApi, which takes its token from `hf auth login`. HubError where the hub refuses.
    """
    check_repo(repo)
    api = api or client()
    try:
        api.create_repo(repo_id=repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=str(folder), repo_id=repo, commit_message=message or "Model trained with lowmem-grpo"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HubError(f"the hub did not take {repo}: {why}. What lies in {folder} is whole: `hf auth login`, then "
                       f"`hf upload {repo} {folder}`") from error
    return str(getattr(commit, "commit_url", commit))


def model_folder(path: str, revision: str | None = None) -> Path:
    """The files of a model: a folder as it is, or those of a name on the hub (out of its cache where they are there).

    OSError where the hub does not give it.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"no model {path!r}: it is not a folder, and the hub did not provide it ({why})") from error


def find_dataset(name: str, api: Any = None) -> None:
    """ValueError for a dataset that the hub does not have, OSError where the hub cannot be reached: told in seconds,
    where loading would try for half a minute."""
    try:
        (api or huggingface_hub.HfApi()).dataset_info(name, timeout=SECONDS)
    except RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no dataset {name!r}, or not for everyone (then: hf auth login)") from error
    except Exception as error:  # network errors come from another library in each version
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(f"the hub does not answer ({why})") from error
