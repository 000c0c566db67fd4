"""Who may use a server: each has a name, an allowance, and a key, of which a hash is known; `SignIn` to its page."""

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from lowmem_grpo.utils import COUNT, GIB, MIB, Rule, check_ranges

OWNER = "owner"  # who started the server; sees everything
JOBS = "jobs"  # the right to start programs of the server's machine
RIGHTS = (JOBS,)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LEAST = 24  # characters of a key: shorter ones can be guessed from their hash
HASH = re.compile(r"sha256:[0-9a-f]{64}")  # that may stand for a key, so that a file does not hold it
PREFIX = "tml-"  # which clients of the Tinker protocol ask of a key
UNITS = {"": 1, "MiB": MIB, "GiB": GIB}
VALUE = re.compile(r"([0-9]{1,12})(MiB|GiB|)")
BYTES = ("bodies", "storage")
FORM = "write requests=4096, bodies=512MiB, storage=50GiB or models=8"
LASTS = 7 * 24 * 3600.0  # seconds that a browser stays signed in
MOST_BROWSERS = 1000  # that are signed in at a time; the oldest make room


@dataclass(frozen=True)
class Allowance:
    """The share of a server that the programs of one key may use. What goes beyond is refused, or told to come again,
    with the limit's name."""

    requests: int = 4096
    """Requests that are not answered yet."""
    bodies: int = GIB
    """Bytes of requests that are kept: until they are answered, and those that added gradients until the next step."""
    storage: int = 100 * GIB
    """Bytes on the disk: states of models, and saved weights."""
    models: int = 64
    """Models that were created and not unloaded."""

    RANGES: ClassVar[dict[str, Rule]] = {"requests": COUNT, "bodies": COUNT, "storage": COUNT, "models": COUNT}

    def __post_init__(self) -> None:
        check_ranges(self)

    def but(self, words: Iterable[str]) -> "Allowance":
        """Return this allowance with words such as `storage=50GiB` applied. ValueError names the word that is wrong."""
        changes: dict[str, int] = {}
        for word in words:
            name, _, value = word.partition("=")
            match = VALUE.fullmatch(value)
            if name not in {field.name for field in fields(self)} or match is None or (match[2] and name not in BYTES):
                raise ValueError(f"{word!r} is no limit; {FORM}")
            changes[name] = int(match[1]) * UNITS[match[2]]
        return replace(self, **changes)


Allowances = Mapping[str, Allowance]  # by the user's name; a defaultdict has the usual one for all others


@dataclass(frozen=True)
class User:
    """Whose key a request has."""

    name: str
    rights: tuple[str, ...] = ()
    allowance: Allowance | None = None  # what the key file says of it; None where it says nothing

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
            digest = bytes.fromhex(key[7:]) if HASH.fullmatch(key) else hashed(key)
            if digest in self.known or user.name in {other.name for other in self.known.values()}:
                raise ValueError(f"the name or the key of {user.name} stands twice; give each user one of their own")
            self.known[digest] = user

    def __call__(self, key: str) -> User | None:
        """Return the user with this key. Hashes are compared, so that the time that it takes tells nothing."""
        return self.known.get(hashed(key))


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_users(path: Path, usual: Allowance | None = None) -> list[tuple[User, str]]:
    """Return the users of a key file, a line `NAME KEY` each, with `jobs` and limits such as `storage=50GiB` after it;
    what is not named there is as in `usual`. `sha256:` and the hash of a key stand for it. ValueError names the line
    that is wrong, OSError a file that others can read."""
    if path.stat().st_mode & 0o077:
        raise OSError(f"{path} holds keys, and others on this machine can read it: chmod 600 {path}")
    try:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no key file: {error}; write NAME KEY on each line") from error
    return [user_of(words, f"{path}, line {number}", usual or Allowance()) for number, line in lines
            if (words := line.partition("#")[0].split())]


def user_of(words: list[str], where: str, usual: Allowance) -> tuple[User, str]:
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


class SignIn:
    """Knows who a browser's cookie stands for. What a browser holds is kept here as its hash only, and in memory: after
    a restart everybody signs in again."""

    def __init__(self, user_of: Callable[[str], User | None], clock: Callable[[], float] = time.monotonic) -> None:
        self.user_of, self.clock = user_of, clock
        self.name = f"lowmem-grpo-{secrets.token_hex(4)}"  # cookies of a host are shared by all of its ports
        self.tickets: dict[bytes, User] = {}
        self.browsers: dict[bytes, tuple[User, float]] = {}  # and until when that holds

    def link(self, user: User) -> str:
        """Return the path of an address that signs this user in, once."""
        ticket = secrets.token_urlsafe(32)
        self.tickets[hashed(ticket)] = user
        return f"/page/enter?ticket={ticket}"

    def by_ticket(self, ticket: str) -> str | None:
        """Return the cookie for who brings a link's ticket; None where it is not one, or was used."""
        return self.cookie_of(self.tickets.pop(hashed(ticket), None))

    def by_key(self, key: str) -> str | None:
        """Return the cookie for who has this key; None where nobody has."""
        return self.cookie_of(self.user_of(key))

    def cookie_of(self, user: User | None) -> str | None:
        if user is None:
            return None
        cookie = secrets.token_urlsafe(32)
        self.browsers[hashed(cookie)] = user, self.clock() + LASTS
        while len(self.browsers) > MOST_BROWSERS:
            del self.browsers[next(iter(self.browsers))]
        return cookie

    def user(self, cookies: Mapping[str, str]) -> User | None:
        """Return who a request's cookies stand for; None where nobody."""
        user, until = self.browsers.get(hashed(cookies.get(self.name, "")), (None, 0.0))
        return user if self.clock() < until else None

    def leave(self, cookies: Mapping[str, str]) -> None:
        self.browsers.pop(hashed(cookies.get(self.name, "")), None)
