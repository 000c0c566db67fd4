"""The routes of the queue: what `lowmem-grpo submit`, `jobs`, `logs`, `cancel` and `resume` ask for."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from lowmem_grpo.jobs import process
from lowmem_grpo.jobs.job import Asked, Job
from lowmem_grpo.jobs.queue import JobQueue, NoSuchJobError
from lowmem_grpo.service.errors import ChatError

PIECE = 256 * 1024  # bytes of a log that are sent at a time
Owner = Callable[[Request], tuple[str, bool]]
Check = Callable[[str, list[str]], None]


class Jobs:
    """Answers requests about a queue."""

    def __init__(self, queue: JobQueue, owner: Owner, check: Check) -> None:
        """`owner` says whose request it is, and whether they may see the jobs of all. `check` raises what is wrong with
        a recipe and its options."""
        self.queue, self.owner, self.check = queue, owner, check

    def seen_by(self, request: Request) -> str | None:
        """Whose jobs a request may see; None for all."""
        name, all_of_them = self.owner(request)
        return None if all_of_them else name

    async def submit(self, request: Request) -> Job:
        asked = refused(lambda given: Asked.of(given), await body_of(request))
        refused(lambda _: self.check(asked.recipe, asked.options), None)
        return self.queue.submit(asked, self.owner(request)[0])

    async def resume(self, number: int, request: Request) -> Job:
        given = await body_of(request)
        options = given.get("options", []) if isinstance(given, dict) else None
        job = self.queue.one(number, self.seen_by(request))
        asked = refused(lambda _: Asked(job.recipe, options), None)  # type: ignore[arg-type]
        refused(lambda _: self.check(job.recipe, job.options + asked.options), None)
        return refused(lambda _: self.queue.resume(number, asked.options), None)

    def cancel(self, number: int, request: Request) -> Job:
        owner = self.seen_by(request)
        return refused(lambda _: self.queue.cancel(number, owner), None)

    def log(self, number: int, offset: int, request: Request) -> bytes:
        """A piece of a job's log, from a byte on."""
        path = self.queue.folder_of(self.queue.one(number, self.seen_by(request))) / process.LOG
        if offset < 0:
            raise ChatError(400, f"from is {offset}; it is a byte of the log, from 0", "from", "invalid")
        if not path.is_file():
            return b""
        with open(path, "rb") as log:
            log.seek(offset)
            return log.read(PIECE)


def jobs_router(jobs: Jobs) -> APIRouter:
    """The routes below /jobs. An unknown number is a ChatError with the status 404."""
    router = APIRouter(redirect_slashes=False)

    @router.post("")
    async def submit(request: Request) -> dict[str, Any]:
        return (await jobs.submit(request)).to_dict()

    @router.get("")
    async def listed(request: Request) -> dict[str, Any]:
        return {"jobs": [job.to_dict() for job in jobs.queue.all(jobs.seen_by(request))]}

    @router.get("/{number}")
    async def one(number: int, request: Request) -> dict[str, Any]:
        return known(lambda: jobs.queue.one(number, jobs.seen_by(request))).to_dict()

    @router.get("/{number}/log")
    async def log(number: int, request: Request) -> Response:
        offset = whole(request.query_params.get("from", "0"))
        return Response(known(lambda: jobs.log(number, offset, request)), media_type="application/octet-stream")

    @router.post("/{number}/cancel")
    async def cancel(number: int, request: Request) -> dict[str, Any]:
        return known(lambda: jobs.cancel(number, request)).to_dict()

    @router.post("/{number}/resume")
    async def resume(number: int, request: Request) -> dict[str, Any]:
        known(lambda: jobs.queue.one(number, jobs.seen_by(request)))
        return (await jobs.resume(number, request)).to_dict()

    return router


async def body_of(request: Request) -> Any:
    """The JSON of a request."""
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise ChatError(400, f"the request's body is no JSON ({error}); send a JSON object", None,
                        "invalid_json") from None


def refused(call: Callable[[Any], Any], given: Any) -> Any:
    """What a call returns; its refusal as that of the request."""
    try:
        return call(given)
    except ChatError:
        raise
    except (ValueError, OSError) as error:
        raise ChatError(400, str(error), None, "invalid") from error


def known(call: Callable[[], Any]) -> Any:
    """What a call returns; a job that is not there is one that was not found."""
    try:
        return call()
    except NoSuchJobError as error:
        raise ChatError(404, str(error), None, "no_such_job") from None


def whole(text: str) -> int:
    """A whole number of a query."""
    try:
        return int(text)
    except ValueError:
        raise ChatError(400, f"from is {text!r}; it is a byte of the log, a whole number", "from", "invalid") from None
