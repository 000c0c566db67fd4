"""`Page`: the live page of runs, with its content, its HTTP handlers and their routes."""

import asyncio
import hashlib
import json
import logging
import time
from functools import lru_cache
from html import escape
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowmem_grpo.runs.views.charts import comparison
from lowmem_grpo.runs.views.report import MOST_POINTS, asset, drawing_script, plain_page, served_page, style
from lowmem_grpo.server.page.run_follower import RunFollower, log_tail
from lowmem_grpo.server.page.sources import Listed, RunSource, state_of, zipped_adapter
from lowmem_grpo.server.requests import ChatError, Limits
from lowmem_grpo.server.server import make_server_app
from lowmem_grpo.server.users import LASTS, SignIn, User
from lowmem_grpo.utils import MIB, time_text

logger = logging.getLogger(__name__)
READS = 0.5  # most seconds to read new records before a page is answered
LIVE = ("running", "stopping")  # states of a job or run with a process, whatever the run's files say
MOST_FOLLOWED = 16  # most runs with records in memory
MOST_COMPARED = 6  # most runs on one chart: the number of colours
MOST_FIELDS = 20  # most fields of a form
SIGN_IN = """<p class="said-why">{why}</p><form method="post" action="/page/enter">
<input name="user" autocomplete="username" value="lowmem-grpo" hidden>
<label>Key <input type="password" name="key" size="40" autocomplete="current-password" required autofocus></label>
<button>Sign in</button></form>
<p class="quiet">The command that serves this page printed its key and a link that works once.</p>"""
REFUSAL = '<p class="card">{why}</p><p><a href="/">Back to the runs</a></p>'
ONWARD = '<meta http-equiv="refresh" content="0;url=/">'
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
                               "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
                               "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {"page.css": style, "uplot.js": drawing_script, "page.js": lambda: asset("page/page.js")}
KINDS = {"js": "text/javascript", "css": "text/css"}


class Page:
    def __init__(self, source: RunSource, sign_in: SignIn) -> None:
        self.source, self.sign_in, self.lock = source, sign_in, Lock()
        self.followers = lru_cache(MOST_FOLLOWED)(RunFollower)  # shared by all browsers

    def follow(self, run: Listed) -> RunFollower:
        """Return the follower of a run, after it has read its new records."""
        with self.lock:
            follower = self.followers(*run.paths)
        follower.read_news()
        return follower

    def runs(self, user: User, names: list[str]) -> dict[str, Listed]:
        """Return those of the named runs that this user may see. Without names, return the run to show by default."""
        runs = {run.name: run for run in self.source.all(user)}
        return {name: runs[name] for name in names or sorted(runs, key=lambda name: not runs[name].can_show)[:1]
                if name in runs}

    def version(self, user: User, names: list[str]) -> str:
        """Read new records for at most READS seconds, and return a hash that changes whenever the page changes."""
        until, runs = time.monotonic() + READS, [self.follow(run) for run in self.runs(user, names).values()]
        while any(run.reading for run in runs) and time.monotonic() < until:
            for run in runs:
                run.read_news()
        state = [*(run.version() for run in runs),
                 *((run.name, run.state, run.why, run.actions) for run in self.source.all(user))]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def page_data(self, user: User, names: list[str]) -> dict[str, Any]:
        """Return the list of runs, and the named one (default: the first), or charts that compare several."""
        version, runs = self.version(user, names), self.runs(user, names)
        names = names or [*runs]
        data = {"title": self.source.title, "query": query_of(*names) if names else "", "version": version, "list": {
            "title": self.source.title, "user": user.name, "names": names,
            "runs": [list_row(run) for run in self.source.all(user)]}}
        if len(names) < 2:
            words = "There is no such run." if names else "No runs yet. What begins appears here by itself."
            return data | self.one_run(next(iter(runs.values()), None), words)
        charts = comparison({name: self.follow(run).charts() for name, run in runs.items()})
        return data | {"title": f"{len(names)} runs", "top": {"title": f"{len(names)} runs", "about": ", ".join(names)},
                       "charts": [chart.to_dict(MOST_POINTS) for chart in charts]}

    def one_run(self, run: Listed | None, words: str) -> dict[str, Any]:
        """Return a run's report (or why it has none yet), its buttons and its log; for no run, a page with `words`."""
        if run is None:
            return {"top": {"title": self.source.title, "ending": {"said": words}}}
        follower = self.follow(run)
        actions = [(run.name, action) for action in run.actions]
        shown = {"title": run.title, "actions": actions, "log": log_tail(follower.log)}
        if not run.can_show:
            return shown | {"top": {"title": run.title, "status": run.state,
                                    "ending": {"said": run.why or "It has written nothing yet."}}}
        return follower.content("running" if run.state in LIVE else state_of(follower.path)) | shown

    def user(self, request: Request) -> User:
        """Return the signed-in user of a request. ChatError if there is none."""
        user = self.sign_in.user(request.cookies)
        if user is None:
            raise ChatError(401, "you are not signed in, or no longer: open / and give your key", None, "not_signed_in")
        return user

    async def enter(self, request: Request) -> Response:
        """Sign in by a link, which works once, or by a key (POST)."""
        if request.method == "POST":
            value, why = self.sign_in.by_key((await form_fields(request)).get("key", "")), "Nobody here has this key."
        else:
            value = self.sign_in.by_ticket(request.query_params.get("ticket", ""))
            why = "This link was used before, or is of an earlier start."
        if value is None:
            return sign_in_page(why)
        # a link is answered with a page: a browser from another site would follow a redirect without the strict cookie
        answer = RedirectResponse("/", 303) if request.method == "POST" else HTMLResponse(
            plain_page("Signed in", '<p><a href="/">Go on</a></p>', ONWARD))
        answer.set_cookie(self.sign_in.name, value, max_age=int(LASTS), path="/", httponly=True, samesite="strict",
                          secure=request.url.scheme == "https")
        return answer

    async def leave(self, request: Request) -> Response:
        await form_fields(request)
        self.sign_in.leave(request.cookies)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(self.sign_in.name, path="/", httponly=True, samesite="strict")
        return answer

    async def show(self, request: Request) -> Response:
        user = self.sign_in.user(request.cookies)
        if user is None:
            return sign_in_page()
        return HTMLResponse(served_page(await asyncio.to_thread(self.page_data, user, run_names(request))))

    async def data(self, request: Request) -> Response:
        """Return the page's data as JSON, or 304 if the client has this version already."""
        user, names = self.user(request), run_names(request)
        if await asyncio.to_thread(self.version, user, names) == request.headers.get("if-none-match"):
            return Response(status_code=304)
        shown = await asyncio.to_thread(self.page_data, user, names)
        return Response(json.dumps(shown, allow_nan=False, separators=(",", ":")), media_type="application/json")

    async def act(self, request: Request, action: str) -> Response:
        """Do the action of a button, or answer with a page that shows the error, without the place of its files."""
        run = None
        try:
            user, name = self.user(request), (await form_fields(request)).get("run", "")
            run = (await asyncio.to_thread(self.runs, user, [name])).get(name)
            if run is None:
                raise ChatError(404, f"there is no run {name!r}")
            if action not in run.actions:
                raise ChatError(409, f"{run.title} is {run.state}; what you can do with it here: "
                                     f"{', '.join(run.actions) or 'nothing'}")
            if action == "export":
                return await asyncio.to_thread(zipped_adapter, run.paths[0], name)
            await asyncio.to_thread(self.source.act, run, action)
        except (ChatError, ValueError, RuntimeError, OSError) as error:
            why = str(error) if run is None else str(error).replace(str(run.paths[0]), run.title)
            if isinstance(error, OSError) and not user.is_owner:
                logger.error("%s of %s: %s", action, name, error)
                why = "The server could not read or write its files; its log says more."
            page = plain_page("That was not done", REFUSAL.format(why=escape(why)))
            return HTMLResponse(page, error.status if isinstance(error, ChatError) else 409)
        return RedirectResponse(f"/{query_of(name)}", 303)


def list_row(run: Listed) -> dict[str, Any]:
    minutes = max(0, time.time() - run.written) // 60
    age = f"{time_text(60 * minutes)} ago" if minutes else "just now"
    told = " \u00b7 ".join(filter(None, (run.why, age if run.written else "")))
    return {"name": run.name, "title": run.title, "state": run.state, "told": told, "can_show": run.can_show}


def query_of(*names: str) -> str:
    return "?" + urlencode([("run" if len(names) == 1 else "with", name) for name in names])


def sign_in_page(why: str = "") -> Response:
    return HTMLResponse(plain_page("Sign in", SIGN_IN.format(why=escape(why))), 401)


def run_names(request: Request) -> list[str]:
    """Return the run names in the query: `?run=A` shows one run, `?with=A&with=B` compares several."""
    query = request.query_params
    several = list(dict.fromkeys(query.getlist("with")))[:MOST_COMPARED]
    return several if len(several) > 1 else [*query.getlist("run"), *several][:1]


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a form, the first of each name; none if the body is not a form. ChatError if the Origin
    header, which browsers send with each POST, is missing or another site's (CSRF)."""
    scheme, _, place = request.headers.get("origin", "").partition("://")
    if scheme not in ("http", "https") or place != request.headers.get("host", ""):
        raise ChatError(403, f"the request comes from {request.headers.get('origin', 'nowhere')!r}; buttons of this "
                             "page are its own only", None, "wrong_origin")
    try:
        fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}


def page_app(page: Page, everywhere: bool = False, other: ASGIApp | None = None) -> ASGIApp:
    """Return the application that serves the page at `/` and below `/page`, with security headers; other paths go to
    `other`, if there is one. `everywhere` accepts any Host header. Users are known by a cookie, not by a key."""
    app = make_server_app({"": page_router(page)}, lambda key: True, Limits(body_bytes=MIB), everywhere)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if other is None or scope["path"] == "/" or scope["path"].startswith("/page/"):
            await app(scope, receive, send_safely)
        else:
            await other(scope, receive, send)

    return answer


def page_router(page: Page) -> APIRouter:
    """Return the page's routes: GET only reads, POST changes something."""
    router = APIRouter(redirect_slashes=False)

    @router.get("/page/files/{name}")
    async def file(name: str) -> Response:
        if name not in FILES:
            raise ChatError(404, f"the page has no file {name!r}", None, "no_such_file")
        return Response(FILES[name](), media_type=KINDS[name.rpartition(".")[2]])

    router.add_api_route("/", page.show)
    router.add_api_route("/page/data", page.data)
    router.add_api_route("/page/enter", page.enter, methods=["GET", "POST"])
    router.add_api_route("/page/leave", page.leave, methods=["POST"])
    router.add_api_route("/page/do/{action}", page.act, methods=["POST"])
    return router
