"""`Users`: the users of a server by the hash of their key, with rights and limits; `SignIn`: sessions of its page."""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from lowmem_grpo.utils import COUNT, GIB, MIB, Rule, check_ranges, size_text

OWNER = "owner"  # the user that started the server and sees everything
JOBS = "jobs"  # the right to start programs on the server's machine
RIGHTS = (JOBS,)
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
LEAST = 24  # least characters of a key: shorter keys can be guessed from their hash
HASH = re.compile(r"sha256:[0-9a-f]{64}")  # may replace a key, so that the file does not hold the key itself
KEY = re.compile(r"[A-Za-z0-9_.~+/=-]*")  # what RFC 6750 allows in the header `Authorization: Bearer KEY`
LIKE_HASH = re.compile(r"(sha|md|blake)-?[0-9]", re.IGNORECASE)
COMMENT = re.compile(r"(^|\s)#.*")  # a # inside a word would cut a key
PREFIX = "tml-"  # clients of the Tinker protocol require it
UNITS = {"": 1, "MiB": MIB, "GiB": GIB}
VALUE = re.compile(r"([0-9]{1,12})(MiB|GiB|)")
BYTES = ("bodies", "storage")
FORM = "write requests=4096, bodies=512MiB, storage=50GiB or models=8"
LASTS = 7 * 24 * 3600.0  # seconds until a browser has to sign in again
MOST_BYTES = MIB  # of a key file
MOST_BROWSERS = 1000  # signed in at a time; the oldest is signed out first


@dataclass(frozen=True)
class Allowance:
    """The limits of one key. A request that exceeds one is refused, or told to retry later."""

    requests: int = 4096
    """Requests that are not answered yet."""
    bodies: int = GIB
    """Bytes of stored requests: each until it is answered, or until the next step if it added gradients."""
    storage: int = 100 * GIB
    """Bytes on the disk: states of models, saved weights, and clients' notes on both."""
    models: int = 64
    """Models that were created and not unloaded."""
    sessions: int = 1024
    """Sessions of clients."""
    samplers: int = 16384
    """Sampling sessions."""

    RANGES: ClassVar[dict[str, Rule]] = {"requests": COUNT, "bodies": COUNT, "storage": COUNT, "models": COUNT,
                                         "sessions": COUNT, "samplers": COUNT}

    def __post_init__(self) -> None:
        check_ranges(self)

    def but(self, words: Iterable[str]) -> "Allowance":
        """Return a copy with words such as `storage=50GiB` applied. ValueError names the invalid word."""
        changes: dict[str, int] = {}
        for word in words:
            name, _, value = word.partition("=")
            match = VALUE.fullmatch(value)
            if name not in {field.name for field in fields(self)} or match is None or (match[2] and name not in BYTES):
                raise ValueError(f"{word!r:.80} is no limit; {FORM}")
            if name in changes:
                raise ValueError(f"{name} stands twice; give it once")
            changes[name] = int(match[1]) * UNITS[match[2]]
        return replace(self, **changes)


Allowances = Mapping[str, Allowance]  # by user name; a defaultdict gives all others the default


@dataclass(frozen=True)
class User:
    """The user whose key a request carries."""

    name: str
    rights: tuple[str, ...] = ()
    allowance: Allowance | None = None  # from the key file; None if the file sets no limits

    @property
    def is_owner(self) -> bool:
        return self.name == OWNER

    def may(self, right: str) -> bool:
        return self.is_owner or right in self.rights


class Users:
    def __init__(self, owner_key: str, others: Iterable[tuple[User, str]] = ()) -> None:
        """`others` are the users of a key file. ValueError for a duplicate name or key."""
        self.known: dict[bytes, User] = {}
        names: set[str] = set()
        for user, key in ((User(OWNER), owner_key), *others):
            digest = bytes.fromhex(key[7:]) if HASH.fullmatch(key) else hashed(key)
            if digest in self.known or user.name in names:
                raise ValueError(f"the name or the key of {user.name} stands twice; give each user one of their own")
            self.known[digest] = user
            names.add(user.name)

    def __call__(self, key: str) -> User | None:
        """Return the user with this key. The lookup is by hash, so its timing reveals nothing about keys."""
        return self.known.get(hashed(key)) if key else None


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_fault(key: object) -> str:
    """Return what is wrong with a key, to be said after "the key"; "" for a key that can be used."""
    if not isinstance(key, str):
        return f"is a {type(key).__name__} and no text"
    if LIKE_HASH.match(key):
        return "looks like a hash; only a key file has hashes: sha256: and 64 digits of 0-9a-f"
    if not KEY.fullmatch(key):
        return "has other characters than letters, digits and -._~+/="
    return "" if len(key) >= LEAST else (
        f"has {len(key)} characters; it must have at least {LEAST}: "
        f"`python -c 'import secrets; print(\"{PREFIX}\" + secrets.token_urlsafe(32))'` makes one")


def read_users(path: Path, usual: Allowance | None = None) -> list[tuple[User, str]]:
    """Read a key file: one `NAME KEY` per line, then optionally `jobs` and limits such as `storage=50GiB`; other limits
    come from `usual`. KEY may be `sha256:` and the key's hash. ValueError names an invalid line, or what is no key
    file; OSError if other users can read or change the file."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is a folder, a pipe or a device, and no key file; write NAME KEY on each line of one")
    with path.open("rb") as file:
        status, content = os.fstat(file.fileno()), file.read(MOST_BYTES + 1)
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(f"{path} holds keys, and another user of this machine owns it: copy it, and give the copy")
    if status.st_mode & 0o077:
        raise OSError(f"{path} holds keys, and others on this machine can read it: chmod 600 {path}")
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} is no key file: it has more than {size_text(MOST_BYTES)}; write NAME KEY on each "
                         "line")
    try:
        lines = enumerate(content.decode().split("\n"), 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no key file: {error}; write NAME KEY on each line") from error
    users = [user_of(said, f"{path}, line {number}", usual or Allowance()) for number, line in lines
             if (said := COMMENT.sub("", line.removesuffix("\r"))).strip()]
    Users(new_key(), users)  # raises for what stands twice
    return users


def user_of(line: str, where: str, usual: Allowance) -> tuple[User, str]:
    if odd := next((sign for sign in line if sign != "\t" and not " " <= sign <= "~"), None):
        raise ValueError(f"{where}: it has the character {odd!a}; names and keys have plain letters, digits and signs")
    words = line.split()
    if len(words) < 2:
        raise ValueError(f"{where}: write NAME KEY, and {JOBS} after them for who may start jobs")
    name, key, *more = words
    rights, limits = [word for word in more if "=" not in word], [word for word in more if "=" in word]
    if not NAME.fullmatch(name) or name == OWNER:
        raise ValueError(f"{where}: the name is {name!r:.80}; it may have letters, digits and _.-, and not be {OWNER}")
    if key == f"sha256:{hashed('').hex()}":
        raise ValueError(f"{where}: the key of {name} is the hash of an empty text, which is no key")
    if not HASH.fullmatch(key) and (fault := key_fault(key)):
        raise ValueError(f"{where}: the key of {name} {fault}")
    if unknown := sorted(set(rights) - set(RIGHTS)):
        raise ValueError(f"{where}: there is no right {', '.join(unknown):.80}; there is {', '.join(RIGHTS)}")
    try:
        return User(name, tuple(rights), usual.but(limits) if limits else None), key
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class SignIn:
    """The browsers that are signed in, by the hash of their cookie. A restart of the server signs all of them out."""

    def __init__(self, user_of: Callable[[str], User | None], clock: Callable[[], float] = time.monotonic) -> None:
        self.user_of, self.clock = user_of, clock
        self.name = f"lowmem-grpo-{secrets.token_hex(4)}"  # unique, since all ports of a host share cookies
        self.tickets: dict[bytes, User] = {}
        self.browsers: dict[bytes, tuple[User, float]] = {}  # the user, and the time when the cookie expires

    def link(self, user: User) -> str:
        """Return the path of a link that signs this user in once."""
        ticket = secrets.token_urlsafe(32)
        self.tickets[hashed(ticket)] = user
        return f"/page/enter?ticket={ticket}"

    def by_ticket(self, ticket: str) -> str | None:
        """Return a cookie in exchange for a link's ticket; None if the ticket is unknown or already used."""
        return self.cookie_of(self.tickets.pop(hashed(ticket), None))

    def by_key(self, key: str) -> str | None:
        """Return a cookie for the user with this key; None if the key is unknown."""
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
        """Return the user of a request's cookies; None if there is none or the cookie has expired."""
        user, until = self.browsers.get(hashed(cookies.get(self.name, "")), (None, 0.0))
        return user if self.clock() < until else None

    def leave(self, cookies: Mapping[str, str]) -> None:
        self.browsers.pop(hashed(cookies.get(self.name, "")), None)
