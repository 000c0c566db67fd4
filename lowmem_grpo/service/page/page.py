"""`Page`: what is answered to a browser that is signed in."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from fastapi import Request, Response
from starlette.responses import HTMLResponse, RedirectResponse, StreamingResponse

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.page.asked import Asked, origin_is_ours, text_fields
from lowmem_grpo.service.page.card import CardUse
from lowmem_grpo.service.page.download import zipped_adapter
from lowmem_grpo.service.page.sign_in import LASTS, SignIn
from lowmem_grpo.service.page.source import Source
from lowmem_grpo.service.page.watching import Watching
from lowmem_grpo.service.users import User
from lowmem_grpo.views.dashboard.live_page import (
    View,
    address,
    live_page,
    onward_page,
    refusal_page,
    sign_in_page,
)

LOOK = 0.5  # seconds between looks at what is watched
FIRST_LOOK = 0.1  # seconds that a page reads before it is shown; the rest is read while it is open
QUIET = 15.0  # seconds after which a connection without news gets a sign of life
MOST_OPEN = 64  # pages that are told of news at a time


class Page:
    """Shows the runs of a source."""

    def __init__(self, source: Source, sign_in: SignIn, card: CardUse) -> None:
        self.source, self.sign_in, self.card = source, sign_in, card
        self.watching = Watching(source)
        self.closing: Callable[[], bool] = lambda: False  # whether the server ends
        self.open = 0

    def user(self, request: Request) -> User:
        """Who asks. ChatError where nobody signed in."""
        user = self.sign_in.user(request.cookies)
        if user is None:
            raise ChatError(401, "you are not signed in, or no longer: open / and give your key", None, "not_signed_in")
        return user

    async def enter(self, request: Request) -> Response:
        """Sign in by a link, which works once."""
        value = self.sign_in.by_ticket(request.query_params.get("ticket", ""))
        if value is None:
            return HTMLResponse(sign_in_page("This link was used before, or is of an earlier start."), 401)
        # an answer of this address, and no redirection: who came from elsewhere would go on without the strict cookie
        return self.signed_in(request, HTMLResponse(onward_page()), value)

    async def enter_by_key(self, request: Request) -> Response:
        """Sign in by a key."""
        fields = await self.fields(request)
        value = self.sign_in.by_key(fields.get("key", ""))
        if value is None:
            return HTMLResponse(sign_in_page("Nobody here has this key."), 401)
        return self.signed_in(request, RedirectResponse("/", 303), value)

    def signed_in(self, request: Request, answer: Response, value: str) -> Response:
        """An answer with the cookie."""
        answer.set_cookie(self.sign_in.name, value, max_age=int(LASTS), path="/", httponly=True, samesite="strict",
                          secure=request.url.scheme == "https")
        return answer

    async def leave(self, request: Request) -> Response:
        """Sign out."""
        await self.fields(request)
        self.sign_in.leave(request.cookies)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(self.sign_in.name, path="/", httponly=True, samesite="strict")
        return answer

    async def show(self, request: Request, curves: bool = True) -> Response:
        """The page of a run or of several, or what of it changes beside its curves."""
        if self.sign_in.user(request.cookies) is None:
            return HTMLResponse(sign_in_page(), 401)
        user, asked = self.user(request), Asked.of(request)
        view = await asyncio.to_thread(self.view, user, asked, curves)
        return HTMLResponse(live_page(view, curves))

    def view(self, user: User, asked: Asked, curves: bool) -> View:
        """What there is to show. Without a name that is the first run of the list."""
        runs = self.source.all(user)
        names = asked.names or [run.name for run in runs if run.can_show][:1] or [run.name for run in runs[:1]]
        view = View(self.source.title, user.name, runs, names, self.card.words())
        if asked.several:
            return replace(view, compared=self.watching.charts(user, names))
        listed = self.source.one(user, names[0]) if names else None
        followed = self.watching.follow(user, names[0]) if names else None
        if followed is None or listed is None or not listed.can_show:
            return replace(view, chosen=listed, log=followed.log() if followed else "")
        followed.look(FIRST_LOOK)
        content = followed.content(listed.run_state)
        return replace(view, chosen=listed, content=content, log=followed.log())

    async def curves(self, request: Request) -> Response:
        """The data of the charts."""
        user, asked = self.user(request), Asked.of(request)
        found = await asyncio.to_thread(self.watching.curves, user, asked.names)
        return Response(json.dumps(found, allow_nan=False, separators=(",", ":")), media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Tells a page when there is news, for as long as it is open."""
        user, asked = self.user(request), Asked.of(request)
        if self.open >= MOST_OPEN:
            raise ChatError(503, f"{MOST_OPEN} pages are open already; close some of them", None, "too_many_pages")
        return StreamingResponse(self.news(request, user, asked), media_type="text/event-stream")

    async def news(self, request: Request, user: User, asked: Asked) -> AsyncGenerator[bytes, None]:
        """An event for each look that found something new, until the browser leaves or the server ends."""
        self.open += 1
        told, quiet = "", 0.0
        try:
            yield b"retry: 1000\n\n"
            while not self.closing() and not await request.is_disconnected():
                if self.sign_in.user(request.cookies) is None:
                    return
                found, more = await asyncio.to_thread(self.watching.look, user, asked.names)
                version = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
                quiet = 0.0 if version != told else quiet + LOOK
                if version != told:
                    told = version
                    yield f"data: {version}\n\n".encode()
                elif quiet >= QUIET:
                    quiet = 0.0
                    yield b": still here\n\n"
                await asyncio.sleep(0 if more else LOOK)
        finally:
            self.open -= 1

    async def act(self, request: Request, action: str) -> Response:
        """What a button does, or a page that says why it does not."""
        try:
            return await self.done(request, action)
        except ChatError as error:
            return HTMLResponse(refusal_page(error.message), error.status)

    async def done(self, request: Request, action: str) -> Response:
        """What a button does. ChatError where it cannot."""
        user, fields = self.user(request), await self.fields(request)
        name = fields.get("run", "")
        listed = await asyncio.to_thread(self.source.one, user, name)
        if listed is None:
            raise ChatError(404, f"there is no run {name!r}", "run", "no_such_run")
        if action == "export":
            return await self.export(user, name)
        try:
            await asyncio.to_thread(self.source.act, user, name, action)
        except (ValueError, OSError) as error:
            raise ChatError(409, str(error), "run", "refused") from error
        except LookupError as error:
            raise ChatError(404, str(error), "run", "no_such_run") from error
        return RedirectResponse(address(name), 303)

    async def export(self, user: User, name: str) -> Response:
        """The adapter of a run, as a file that a browser saves."""
        place = self.source.folder(user, name)
        if place is None:
            raise ChatError(404, f"the run {name!r} has not begun", "run", "no_such_run")
        try:
            return await asyncio.to_thread(zipped_adapter, place[0], name)
        except (ValueError, RuntimeError, OSError) as error:
            raise ChatError(409, str(error), "run", "no_adapter") from error

    async def fields(self, request: Request) -> dict[str, str]:
        """The fields of a form. ChatError where another page sent it."""
        if not origin_is_ours(request):
            raise ChatError(403, f"the request comes from {request.headers.get('origin', 'nowhere')!r}; buttons of "
                                 "this page are its own only", None, "wrong_origin")
        return text_fields(await request.body())
