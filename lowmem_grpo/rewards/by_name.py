"""Reward functions and verifiers by the names that command lines take."""

import difflib
import importlib.util
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from lowmem_grpo import rewards  # its __all__ lists what a command line may name
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.rewards.verifier import Verifier


def find_function(name: str) -> Any:
    """Return a reward function or a verifier by its name: one of lowmem_grpo.rewards, such as "number_match", or one
    of the user's own, such as "my_rewards.py:score" or "package.module:score". ValueError if it does not exist."""
    home, colon, attribute = name.rpartition(":")
    refuse_unknown(name)
    if not colon:
        return made(name, getattr(rewards, name))
    if home.endswith(".py"):
        module = load_file(Path(home))
    else:
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            if not f"{home}.".startswith(f"{error.name}."):  # the module is there, and lacks another
                raise
            raise ValueError(f"there is no module {home!r} here") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{home} has no {attribute!r}")
    return made(name, getattr(module, attribute))


def refuse_unknown(name: str) -> None:
    """Raise ValueError for a name without a colon that is not in lowmem_grpo.rewards, and for a name whose file or
    package does not exist. This imports no file of the user's."""
    home, colon, _ = name.rpartition(":")
    if home.endswith(".py") and not Path(home).is_file():
        raise ValueError(f"there is no file {home}")
    if colon and not home.endswith(".py") and importlib.util.find_spec(home.partition(".")[0]) is None:
        raise ValueError(f"there is no module {home!r} here")
    if not colon and name not in rewards.__all__:
        close = difflib.get_close_matches(name, rewards.__all__, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no reward {name!r} in lowmem_grpo.rewards{hint} Name your own as FILE.py:FUNCTION")


def made(name: str, value: Any) -> Any:
    """Return `value` if it is a reward function or a verifier; else call it without arguments and return the reward or
    verifier that it makes. ValueError if it makes neither, or requires arguments."""
    if isinstance(value, Verifier):
        return value
    parameters = inspect.signature(value).parameters if callable(value) else {}
    if "completions" in parameters:
        return value
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in several]
    if needed or not callable(value):
        needs = f", and needs {', '.join(needed)}, which a name cannot give" if needed else ""
        raise ValueError(f"{name} is not a reward function: it takes no `completions`{needs}. Write one that calls it, "
                         "and name that one as FILE.py:FUNCTION")
    built = value()
    if not isinstance(built, Verifier | Reward):
        raise ValueError(f"{name}() returns a {type(built).__name__}, which is neither a reward nor a verifier")
    return built


def load_file(path: Path) -> Any:
    """Import a user's file, under a name that hides no installed module. ValueError if it is not a Python file."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
