"""The routes of the page, and the application that has them."""

from fastapi import APIRouter, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowmem_grpo.service.errors import ChatError, Limits
from lowmem_grpo.service.page.page import Page
from lowmem_grpo.service.server import make_server_app
from lowmem_grpo.utils import MIB
from lowmem_grpo.views.page_file import asset, drawing_script, style

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
                               "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
                               "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store", "X-Accel-Buffering": "no",  # a proxy hands on what is new at once
}
FILES = {"page.css": style, "uplot.js": drawing_script, "page.js": lambda: asset("page/page.js")}
KINDS = {"js": "text/javascript", "css": "text/css"}


def page_app(page: Page, everywhere: bool = False) -> ASGIApp:
    """Return the page at `/` and below `/page`. `everywhere` takes requests for any name of this machine. Who signed in
    is known by a cookie, so the gate asks for no key."""
    return WithHeaders(make_server_app({"": page_router(page)}, lambda key: True, Limits(body_bytes=MIB), everywhere,
                                       "GET / and those below /page"))


def page_router(page: Page) -> APIRouter:
    """Return the routes: those with GET show something, the others change something."""
    router = APIRouter(redirect_slashes=False)

    @router.get("/page/files/{name}")
    async def file(name: str) -> Response:
        if name not in FILES:
            raise ChatError(404, f"the page has no file {name!r}", None, "no_such_file")
        return Response(FILES[name](), media_type=KINDS[name.rpartition(".")[2]])

    router.add_api_route("/", page.show)
    router.add_api_route("/page/data", page.data)
    router.add_api_route("/page/events", page.events)
    router.add_api_route("/page/enter", page.enter)
    router.add_api_route("/page/enter", page.enter_by_key, methods=["POST"])
    router.add_api_route("/page/leave", page.leave, methods=["POST"])
    router.add_api_route("/page/do/{action}", page.act, methods=["POST"])
    return router


class WithHeaders:
    """Every answer forbids a browser what the page does not need."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, with_headers)


class Beside:
    """The page in front of another application, which gets what is not the page's."""

    def __init__(self, page: ASGIApp, other: ASGIApp) -> None:
        self.page, self.other = page, other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = scope["type"] == "http" and (path == "/" or path.startswith("/page/"))
        await (self.page if ours else self.other)(scope, receive, send)
