"""Keys: who holds which, and what is wrong in a key file, by its line; cookies end, and nothing kept opens the page."""

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from tables import every_row

from lowmem_grpo.server.users import (
    JOBS,
    LASTS,
    LEAST,
    MOST_BROWSERS,
    OWNER,
    Allowance,
    SignIn,
    User,
    Users,
    hashed,
    new_key,
    read_users,
)
from lowmem_grpo.utils import GIB, MIB

KEY = "k" * LEAST
OWN_KEY = new_key()
ROOT = User(OWNER)


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_bytes(text.encode())
    path.chmod(0o600)
    return path


def test_a_key_finds_its_user_with_their_rights_and_no_other() -> None:
    users = Users("tml-mine", [(User("ann", (JOBS,)), KEY), (User("bob"), KEY + "b")])
    assert [users("tml-mine"), users(KEY), users(KEY + "b")] == [User(OWNER), User("ann", (JOBS,)), User("bob")]
    assert users("") is None and users(KEY[:-1]) is None and users("\xff") is None
    assert [User(OWNER).may(JOBS), User("ann", (JOBS,)).may(JOBS), User("bob").may(JOBS)] == [True, True, False]


def test_a_key_file_is_read_with_its_comments_and_limits_change_the_usual_ones(tmp_path: Path) -> None:
    path = written(tmp_path, f"# people\n\nann {KEY} models=3 bodies=3MiB storage=2GiB jobs  # a note\nbob {KEY}2\n")
    ann = User("ann", (JOBS,), Allowance(requests=5, bodies=3 * MIB, storage=2 * GIB, models=3))
    assert read_users(path, Allowance(requests=5)) == [(ann, KEY), (User("bob"), KEY + "2")]


def test_a_hash_in_the_file_stands_for_a_key_and_is_none_itself(tmp_path: Path) -> None:
    hash_of = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    users = Users(new_key(), read_users(written(tmp_path, f"ann {hash_of}\n")))
    assert users(KEY) == User("ann") and users(hash_of) is None


@every_row(("line", "words"), [
    (f"ann {KEY} storage=lots", "'storage=lots' is no limit"),
    ("ann", "line 2: write NAME KEY"), ("ann short", "the key of ann has 5 characters"),
    (f"owner {KEY}", "the name is 'owner'"), (f"a/b {KEY}", "the name is 'a/b'"),
    (f"ann {KEY} root", "there is no right root; there is jobs"),
    *((f"ann {KEY} {word}", "is no limit; write requests=4096") for word in (
        "requests=", "requests=-1", "requests=1MiB", "storage=2TB", "disk=1", "storage=1.5GiB", "RANGES=1", "=1")),
    (f"ann {KEY} models=0", "models is 0; it must be a whole number, at least 1"),
    (f"ann {KEY} models=1 models=2", "models stands twice"),
    (f"ann sha256:{hashlib.sha256(b'').hexdigest()}", "the key of ann is the hash of an empty text"),
    *((f"ann {key}", "line 2: the key of ann looks like a hash") for key in (
        f"sha256:{'0' * 63}", f"sha256:{'0' * 65}", f"sha256:{'A' * 64}", f"SHA256:{'a' * 64}", f"sha512:{'a' * 128}",
        f"sha-256={'a' * 64}", f"md5:{'a' * 32}")),
    *((f"ann {key} jobs", "line 2: the key of ann has other characters") for key in (
        f"tml-ab#{KEY}", f'"{KEY}"', f"$2b${KEY}", f"ann:{KEY}")),
    *((f"ann {key}", "line 2: it has the character") for key in (
        f"{KEY}\u00e9", f"\u0430{KEY}", f"{KEY}\u00a0jobs", f"{KEY}\u2028bob {KEY}2", f"{KEY}\x0bjobs", f"{KEY}\0")),
    (f"\ufeffann {KEY}", "line 2: it has the character '.ufeff'"), (f"ann {KEY}\nbob {KEY}", "bob stands twice"),
    (f"ann {KEY}\nann {KEY}2", "ann stands twice"),
    (f"ann {KEY}\nbob sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "bob stands twice"),
])
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_users(written(tmp_path, f"\n{line}\n"))


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys", 0o600)
    with (patch.object(Path, "open", side_effect=AssertionError("it is waited for")),
          pytest.raises(ValueError, match=r"keys is a folder, a pipe or a device, and no key file; write NAME KEY")):
        read_users(tmp_path / "keys")


@every_row("made", [lambda path: path.write_bytes(b""), lambda path: path.write_text(f"ann {KEY}\n" * 10**5),
                    lambda path: path.write_bytes(b"\n" * 10**6)])
def test_of_a_large_file_only_the_beginning_is_read(made: Callable[[Path], int], tmp_path: Path) -> None:
    path = written(tmp_path, "")
    made(path)
    os.truncate(path, 64 * MIB)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"keys is no key file: it has more than 1\.0 MiB; write NAME KEY on each"):
        read_users(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * MIB


@every_row(("line", "words"), [("q" * 10**5 + f" {KEY}", "the name is"), (f"ann {KEY} " + "q" * 10**5, "no right"),
                               (f"ann {KEY} models=" + "q" * 10**5, "is no limit")])
def test_of_a_long_word_only_the_beginning_is_told(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_users(written(tmp_path, line))
    assert len(str(refused.value)) < 400


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, f"ann {KEY}\n")
    path.chmod(0o644)
    with pytest.raises(OSError, match="chmod 600"):
        read_users(path)
    for mode in (0o602, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(OSError, match="chmod 600"):
            read_users(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, f"ann {KEY}\n")
    os.chown(path, 12345, -1)
    with pytest.raises(OSError, match="another user of this machine owns it"):
        read_users(path)


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    assert read_users(written(tmp_path, f"# people\r\nann {KEY} jobs # a note\r\n\r\nbob {KEY}2\r\n")) == [
        (User("ann", (JOBS,)), KEY), (User("bob"), KEY + "2")]


def test_a_request_without_a_key_is_nobodys_whatever_the_keys_are() -> None:
    assert Users("", [(User("ann"), f"sha256:{hashed('').hex()[::-1]}")])("") is None


def test_a_name_or_key_that_stands_twice_is_refused() -> None:
    for user, key in ((User("bob"), KEY), (User("ann"), KEY + "2")):
        with pytest.raises(ValueError, match="stands twice"):
            Users(new_key(), [(User("ann"), KEY), (user, key)])


NOW = [0.0]


def sign_in() -> SignIn:
    return SignIn(Users(OWN_KEY, [(User("ann"), KEY)]), clock=lambda: NOW[0])


def who(page: SignIn, cookie: str | None) -> User | None:
    """Return who a cookie with this value stands for."""
    return page.user({page.name: str(cookie)})


def test_a_cookie_ends_after_its_time_when_it_is_left_and_with_the_server() -> None:
    page = sign_in()
    first, second = page.by_key(OWN_KEY), page.by_key(OWN_KEY)
    page.leave({page.name: str(first)})
    assert who(page, first) is None and who(page, second) == ROOT
    assert who(sign_in(), second) is None
    NOW[0] = LASTS + 1
    assert who(page, second) is None
    NOW[0] = 0.0


def test_what_is_held_in_memory_opens_nothing() -> None:
    page = sign_in()
    ticket, cookie = page.link(ROOT).partition("=")[2], str(page.by_key(OWN_KEY))
    held = repr(vars(page))
    assert not [word for word in (ticket, cookie, OWN_KEY, KEY) if word in held + repr(vars(page.user_of))]
    assert who(page, f"sha256:{hashed(cookie).hex()}") is None
    assert page.by_ticket(f"sha256:{hashed(ticket).hex()}") is None


def test_the_oldest_browser_makes_room() -> None:
    page = sign_in()
    first = page.by_key(OWN_KEY)
    for _ in range(MOST_BROWSERS):
        last = page.by_key(OWN_KEY)
    assert who(page, first) is None and who(page, last) == ROOT
