"""The job queue over HTTP, for `lowmem-grpo submit`, `jobs`, `logs`, `cancel` and `resume`, and for the page."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from lowmem_grpo.server.jobs.keeper import LOG
from lowmem_grpo.server.jobs.queue import LIVE, OVER, STOPPING, Job, JobQueue, JobRequest
from lowmem_grpo.server.page.sources import Listed, has_adapter, is_run, so_far
from lowmem_grpo.server.requests import ChatError, json_of
from lowmem_grpo.server.users import JOBS, User

logger = logging.getLogger(__name__)
PIECE = 256 * 1024  # most bytes of a log in one reply
MOST_LISTED = 500


async def as_chat_errors() -> AsyncIterator[None]:
    """Answer a LookupError in a route with status 404, a ValueError with 400, and an OSError, whose words may name
    files of the server, with 500."""
    try:
        yield
    except LookupError as error:
        raise ChatError(404, str(error), None, "no_such_job") from None
    except ValueError as error:
        raise ChatError(400, str(error), None, "invalid") from error
    except OSError as error:
        logger.error("jobs: %s", error)
        raise ChatError(500, "the server could not read or write its files; its log says more", None,
                        "internal_error") from error


def owner_of(request: Request) -> str | None:
    """Return the user whose jobs a request may see (None: all users). ChatError if the key does not allow jobs."""
    user: User = request.scope["holder"]
    if not user.may(JOBS):
        raise ChatError(403, f"the key of {user.name} may not use jobs, which run programs on the server's machine; "
                             "its owner can allow it, with `jobs` after the key in the key file", None, "no_right")
    return None if user.is_owner else user.name


Owner = Annotated[str | None, Depends(owner_of)]


def jobs_router(queue: JobQueue, check: Callable[[str, list[str]], None]) -> APIRouter:
    """Return the routes of a queue. `check` raises ValueError for an invalid recipe or option."""
    router = APIRouter(redirect_slashes=False, dependencies=[Depends(as_chat_errors), Depends(owner_of)])

    @router.post("")
    async def submit(request: Request) -> Job:
        asked = JobRequest.from_json(json_of(await request.body()))
        await run_in_threadpool(check, asked.recipe, asked.options)  # may import the recipe, for seconds
        return await run_in_threadpool(queue.submit, asked, request.scope["holder"].name)

    @router.get("")
    def show_all(owner: Owner) -> dict[str, list[Job]]:
        return {"jobs": queue.all(owner)}

    @router.get("/{number}")
    def show(number: int, owner: Owner) -> Job:
        return queue.one(number, owner)

    @router.get("/{number}/log")
    def read_log(number: int, owner: Owner, offset: Annotated[str, Query(alias="from")] = "0") -> Response:
        """Answer with up to PIECE bytes of a log from `offset` on; none if there is no log yet."""
        log, piece = queue.folder_of(queue.one(number, owner)) / LOG, b""
        if not re.fullmatch("[0-9]{1,15}", offset):
            raise ValueError(f"from is {offset!r}; it is a byte of the log, a whole number from 0")
        with suppress(FileNotFoundError), open(log, "rb") as file:
            file.seek(int(offset))
            piece = file.read(PIECE)
        return Response(piece, media_type="application/octet-stream")

    @router.post("/{number}/cancel")
    def cancel(number: int, owner: Owner) -> Job:
        return queue.cancel(number, owner)

    @router.post("/{number}/resume")
    async def resume(number: int, owner: Owner, request: Request) -> Job:
        job, options = queue.one(number, owner), json_of(await request.body()).get("options", [])
        more = JobRequest.from_json({"recipe": job.recipe, "options": options}).options
        every = JobRequest.from_json({"recipe": job.recipe, "options": job.options + more}).options
        await run_in_threadpool(check, job.recipe, every)
        return queue.resume(number, more)

    return router


class JobsSource:
    """The jobs as a `RunSource` for the page: the server's owner sees all jobs, and other users see only their own."""

    def __init__(self, queue: JobQueue, title: str) -> None:
        self.queue, self.title = queue, title

    def all(self, user: User) -> list[Listed]:
        jobs = self.queue.all(None if user.is_owner else user.name) if user.may(JOBS) else []
        return [self.listed(job, user) for job in sorted(jobs, key=lambda job: job.state not in LIVE)[:MOST_LISTED]]

    def act(self, run: Listed, action: str) -> None:
        """Stop or resume a job. ValueError if it is not possible any more."""
        self.queue.cancel(int(run.name)) if action == "stop" else self.queue.resume(int(run.name), [])

    def listed(self, job: Job, user: User) -> Listed:
        actions: tuple[str, ...] = ("resume",) if job.state in OVER else () if job.state == STOPPING else ("stop",)
        asked_by, run = "" if job.owner == user.name else job.owner, self.queue.folder_of(job) / "run"
        actions += ("export",) if has_adapter(run) else ()
        told = ", ".join(filter(None, (asked_by, " ".join(job.options), so_far(run), job.why)))
        return Listed(str(job.id), f"{job.id} {job.recipe}", job.state, (run, run.parent / LOG), told,
                      job.ended or job.began or job.came, actions, can_show=is_run(run))
