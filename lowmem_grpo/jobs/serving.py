"""The queue in a server: its dispatcher, and the application with its routes."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.types import ASGIApp

from lowmem_grpo.jobs.dispatcher import Dispatcher
from lowmem_grpo.jobs.jobs_source import JobsSource
from lowmem_grpo.jobs.queue import JobQueue
from lowmem_grpo.jobs.routes import Check, Jobs, jobs_router
from lowmem_grpo.preflight.machine import driver_version
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.errors import ChatError, Limits
from lowmem_grpo.service.page.card import CardUse
from lowmem_grpo.service.page.page import Page
from lowmem_grpo.service.page.sign_in import SignIn
from lowmem_grpo.service.server import make_server_app
from lowmem_grpo.service.users import JOBS, User, Users


def dispatcher_of(database: Database, folder: Path, recipes: Path | None) -> Dispatcher:
    """Of the jobs in a database, whose folders are in `folder`."""
    return Dispatcher(JobQueue(database, folder), recipes and recipes.resolve(), has_card=driver_version() is not None)


def app_of(
    queue: JobQueue, users: Users, check: Check, everywhere: bool = False, others: dict[str, APIRouter] | None = None
) -> ASGIApp:
    """The server's application, with `others` by their prefixes beside the queue. `check` raises ValueError for a
    recipe or an option that is wrong."""
    routers = {"/jobs": jobs_router(Jobs(queue, owner_of, check)), **(others or {})}
    return make_server_app(routers, users, Limits(), everywhere)


def page_of(queue: JobQueue, users: Users, title: str) -> Page:
    """The page of its jobs."""
    return Page(JobsSource(queue, title), SignIn(users), CardUse())


def owner_of(request: Request) -> tuple[str, bool]:
    """Whose request it is, and whether they see everybody's jobs. ChatError for a key without the right to jobs."""
    user: User = request.scope["holder"]
    if not user.may(JOBS):
        raise ChatError(403, f"the key of {user.name} may not use jobs, which run programs on the server's machine; "
                             "its owner can allow it, with `jobs` after the key in the key file", None, "no_right")
    return user.name, user.is_owner
