"""Signing in: links work once, cookies end, and nothing that opens the page is kept."""

from lowmem_grpo.server.users import LASTS, MOST_BROWSERS, SignIn, User, Users, hashed

KEY = "tml-owner-owner-owner-owner"
OWNER = User("owner")
NOW = [0.0]


def made() -> SignIn:
    return SignIn(Users(KEY), clock=lambda: NOW[0])


def who(page: SignIn, cookie: str | None) -> User | None:
    """Return who a cookie with this value stands for."""
    return page.user({page.name: str(cookie)})


def test_a_link_works_once_and_a_wrong_one_never() -> None:
    page = made()
    ticket = page.link(OWNER).partition("=")[2]
    assert page.by_ticket("x" + ticket) is None and page.by_ticket("") is None
    cookie = page.by_ticket(ticket)
    assert cookie and page.by_ticket(ticket) is None
    assert who(page, cookie) == OWNER


def test_a_key_signs_in_and_another_does_not() -> None:
    page = made()
    assert page.by_key(KEY + "x") is None and page.by_key("") is None
    cookie = str(page.by_key(KEY))
    assert page.user({"other": "1", page.name: cookie}) == OWNER
    for cookies in ({}, {page.name: ""}, {page.name: f"{cookie}x"}, {f"{page.name}x": cookie}):
        assert page.user(cookies) is None
        page.leave(cookies)
    assert who(page, cookie) == OWNER


def test_a_cookie_ends_after_its_time_when_it_is_left_and_with_the_server() -> None:
    page = made()
    first, second = page.by_key(KEY), page.by_key(KEY)
    page.leave({page.name: str(first)})
    assert who(page, first) is None and who(page, second) == OWNER
    assert who(made(), second) is None
    NOW[0] = LASTS + 1
    assert who(page, second) is None
    NOW[0] = 0.0


def test_what_is_held_in_memory_opens_nothing() -> None:
    page = made()
    ticket, cookie = page.link(OWNER).partition("=")[2], str(page.by_key(KEY))
    held = repr(vars(page))
    assert ticket not in held and cookie not in held and KEY not in held
    assert who(page, f"sha256:{hashed(cookie).hex()}") is None
    assert page.by_ticket(f"sha256:{hashed(ticket).hex()}") is None


def test_the_oldest_browser_makes_room() -> None:
    page = made()
    first = page.by_key(KEY)
    for _ in range(MOST_BROWSERS):
        last = page.by_key(KEY)
    assert who(page, first) is None and who(page, last) == OWNER
