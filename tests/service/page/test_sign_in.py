"""Signing in: links work once, cookies end, and nothing that opens the page is kept."""

from lowmem_grpo.service.page import sign_in
from lowmem_grpo.service.page.sign_in import LASTS, SignIn
from lowmem_grpo.service.users import User, Users

KEY = "tml-owner-owner-owner-owner"
OWNER = User("owner")


def made() -> SignIn:
    return SignIn(Users(KEY), clock=lambda: NOW[0])


NOW = [0.0]


def test_a_link_works_once_and_a_wrong_one_never() -> None:
    page = made()
    ticket = page.ticket(OWNER)
    assert page.by_ticket("x" + ticket) is None and page.by_ticket("") is None
    cookie = page.by_ticket(ticket)
    assert cookie and page.by_ticket(ticket) is None
    assert page.user(f"{page.name}={cookie}") == OWNER


def test_a_key_signs_in_and_another_does_not() -> None:
    page = made()
    assert page.by_key(KEY + "x") is None and page.by_key("") is None
    cookie = page.by_key(KEY)
    assert page.user(f"other=1; {page.name}={cookie}; more=2") == OWNER
    for cookies in ("", f"{page.name}=", f"{page.name}={cookie}x", f"{page.name}x={cookie}", "\0;;==", "a" * 5000):
        assert page.user(cookies) is None
        page.leave(cookies)
    assert page.user(f"{page.name}={cookie}") == OWNER


def test_a_cookie_ends_after_its_time_when_it_is_left_and_with_the_server() -> None:
    page = made()
    first, second = (f"{page.name}={page.by_key(KEY)}" for _ in range(2))
    page.leave(first)
    assert page.user(first) is None and page.user(second) == OWNER
    assert made().user(second) is None
    NOW[0] = LASTS + 1
    assert page.user(second) is None
    NOW[0] = 0.0


def test_what_is_held_in_memory_opens_nothing() -> None:
    page = made()
    ticket, cookie = page.ticket(OWNER), page.by_key(KEY)
    held = repr(vars(page))
    assert ticket not in held and str(cookie) not in held and KEY not in held


def test_the_oldest_browser_makes_room() -> None:
    page = made()
    first = page.by_key(KEY)
    for _ in range(sign_in.MOST_BROWSERS):
        last = page.by_key(KEY)
    assert page.user(f"{page.name}={first}") is None and page.user(f"{page.name}={last}") == OWNER
