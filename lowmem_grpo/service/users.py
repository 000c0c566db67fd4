"""Who may use a server: each has a name and a key, of which the server knows a hash only."""

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowmem_grpo.service.allowance import Allowance

OWNER = "owner"  # who started the server; sees everything
JOBS = "jobs"  # the right to start programs of the server's machine
RIGHTS = (JOBS,)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LEAST = 24  # characters of a key: shorter ones can be guessed from their hash
HASH = re.compile(r"sha256:[0-9a-f]{64}")  # that may stand for a key, so that a file does not hold it
PREFIX = "tml-"  # which clients of the Tinker protocol ask of a key


@dataclass(frozen=True)
class User:
    """Whose key a request has."""

    name: str
    rights: tuple[str, ...] = ()
    allowance: Allowance | None = None
    """What the key file says of it; None where it says nothing."""

    @property
    def is_owner(self) -> bool:
        return self.name == OWNER

    def may(self, right: str) -> bool:
        return self.is_owner or right in self.rights


class Users:
    """Finds a user by a key."""

    def __init__(self, owner_key: str, others: Iterable[tuple[User, str]] = ()) -> None:
        """`others` are the users of a key file. ValueError for a name or key that stands twice."""
        self.known: dict[bytes, User] = {}
        for user, key in ((User(OWNER), owner_key), *others):
            if hashed(key) in self.known or user.name in {one.name for one in self.known.values()}:
                raise ValueError(f"the name or the key of {user.name} stands twice; give each user one of their own")
            self.known[hashed(key)] = user

    def __call__(self, key: str) -> User | None:
        """The user with this key. What is compared are hashes, so that the time that it takes tells nothing."""
        return None if HASH.fullmatch(key) else self.known.get(hashed(key))


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> bytes:
    """The hash of a key, or that which stands in its place in a key file."""
    return bytes.fromhex(key[7:]) if HASH.fullmatch(key) else hashlib.sha256(key.encode()).digest()


def read_users(path: Path, usual: Allowance | None = None) -> list[tuple[User, str]]:
    """The users of a key file, a line `NAME KEY` each, with `jobs` and limits such as `storage=50GiB` after it; what is
    not named there is as in `usual`. `sha256:` and the hash of a key stand for it. ValueError names the line that is
    wrong, OSError a file that others can read."""
    if path.stat().st_mode & 0o077:
        raise OSError(f"{path} holds keys, and others on this machine can read it: chmod 600 {path}")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if words := line.partition("#")[0].split():
            found.append(user_of(words, f"{path}, line {number}", usual or Allowance()))
    return found


def user_of(words: list[str], where: str, usual: Allowance) -> tuple[User, str]:
    """A line's user and key."""
    if len(words) < 2:
        raise ValueError(f"{where}: write NAME KEY, and {JOBS} after them for who may start jobs")
    name, key, *more = words
    rights, limits = [word for word in more if "=" not in word], [word for word in more if "=" in word]
    if not NAME.fullmatch(name) or name == OWNER:
        raise ValueError(f"{where}: the name is {name!r}; it may have letters, digits and _.-, and not be {OWNER}")
    if len(key) < LEAST:
        raise ValueError(f"{where}: the key of {name} has {len(key)} characters; it must have at least {LEAST}: "
                         f"`python -c 'import secrets; print(\"{PREFIX}\" + secrets.token_urlsafe(32))'` makes one")
    if unknown := sorted(set(rights) - set(RIGHTS)):
        raise ValueError(f"{where}: there is no right {', '.join(unknown)}; there is {', '.join(RIGHTS)}")
    try:
        return User(name, tuple(rights), usual.but(limits) if limits else None), key
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
