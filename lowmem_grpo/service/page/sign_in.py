"""`SignIn`: from a link that works once, or from a key, to a cookie that a browser keeps."""

import secrets
import time
from collections.abc import Callable, Mapping

from lowmem_grpo.service.users import User, hashed

LASTS = 7 * 24 * 3600.0  # seconds that a browser stays signed in
MOST_BROWSERS = 1000  # that are signed in at a time; the oldest make room


class SignIn:
    """Knows who a browser's cookie stands for. What a browser holds is kept here as its hash only, and in memory: after
    a restart everybody signs in again."""

    def __init__(self, user_of: Callable[[str], User | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`user_of` finds the user with a key."""
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
