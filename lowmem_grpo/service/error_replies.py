"""How an application answers errors: in OpenAI's form, and with nothing of what is inside."""

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from lowmem_grpo.service.attention import ClientGoneError
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.gate import CLOSE, as_response, unexpected

CLIENT_LEFT = 499  # as others write it in their logs: nobody reads it


def answer_errors(app: FastAPI, routes: str) -> None:
    """Of an application. `routes` says what there is."""

    @app.exception_handler(ChatError)
    async def refused(request: Request, error: ChatError) -> Response:
        return as_response(error)

    @app.exception_handler(ClientGoneError)
    async def left(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        return as_response(ChatError(error.status_code, f"there is no {request.method} {request.url.path}; there are "
                                                        f"{routes}", None, code, dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(unexpected(error), 500, CLOSE)
