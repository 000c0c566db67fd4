"""`SignIn`: from a link that works once, or from a key, to a cookie that a browser keeps."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from threading import Lock

from lowmem_grpo.service.users import User, hashed

LASTS = 7 * 24 * 3600.0  # seconds that a browser stays signed in
MOST_BROWSERS = 1000  # that are signed in at a time; the oldest make room


@dataclass(frozen=True)
class Browser:
    """Who signed in, and until when that holds."""

    user: User
    until: float


class SignIn:
    """Knows who a browser's cookie stands for. What a browser holds is kept here as its hash only, and in memory: after
    a restart everybody signs in again."""

    def __init__(self, user_of: Callable[[str], User | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`user_of` finds the user with a key."""
        self.user_of, self.clock, self.lock = user_of, clock, Lock()
        self.name = f"lowmem-grpo-{secrets.token_hex(4)}"  # cookies of a host are shared by all of its ports
        self.tickets: dict[bytes, User] = {}
        self.browsers: dict[bytes, Browser] = {}

    def ticket(self, user: User) -> str:
        """A text by which this user signs in, once."""
        made = secrets.token_urlsafe(32)
        with self.lock:
            self.tickets[hashed(made)] = user
        return made

    def link(self, user: User) -> str:
        """The path of an address that signs this user in, once."""
        return f"/page/enter?ticket={self.ticket(user)}"

    def by_ticket(self, ticket: str) -> str | None:
        """The cookie for who brings a ticket; None where it is not one, or was used."""
        with self.lock:
            user = self.tickets.pop(hashed(ticket), None)
        return None if user is None else self.cookie_of(user)

    def by_key(self, key: str) -> str | None:
        """The cookie for who has this key; None where nobody has."""
        user = self.user_of(key)
        return None if user is None else self.cookie_of(user)

    def cookie_of(self, user: User) -> str:
        """A new value of the cookie."""
        made = secrets.token_urlsafe(32)
        with self.lock:
            self.browsers[hashed(made)] = Browser(user, self.clock() + LASTS)
            while len(self.browsers) > MOST_BROWSERS:
                del self.browsers[next(iter(self.browsers))]
        return made

    def user(self, cookies: str) -> User | None:
        """Who a request's header `Cookie` stands for; None where nobody."""
        with self.lock:
            browser = self.browsers.get(hashed(self.value(cookies)))
        return browser.user if browser is not None and self.clock() < browser.until else None

    def leave(self, cookies: str) -> None:
        """Forget a browser."""
        with self.lock:
            self.browsers.pop(hashed(self.value(cookies)), None)

    def value(self, cookies: str) -> str:
        """The value of our cookie in a header; empty where there is none."""
        try:
            held = SimpleCookie(cookies).get(self.name)
        except CookieError:
            return ""
        return "" if held is None else held.value
