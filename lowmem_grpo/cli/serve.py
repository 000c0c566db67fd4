"""`lowmem-grpo serve`: serves one card over HTTP; `watch`: serves a live page of runs that were started elsewhere."""

import logging
from collections import defaultdict
from functools import partial
from pathlib import Path
from shlex import quote
from socket import socket

import click

from lowmem_grpo.config.launcher import one_process
from lowmem_grpo.models.stored_model import find, public_name
from lowmem_grpo.runs.views.terminal import BetweenWords, CurrentStderr, UserPath, plain_errors
from lowmem_grpo.utils import is_adapter

LACKING = "`lowmem-grpo {}` needs fastapi and uvicorn: pip install 'lowmem-grpo[serve]'"
HOST = click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address of this machine to listen at. 0.0.0.0 accepts "
    "requests from other machines. Any address but 127.0.0.1 and localhost needs --key-file, and a proxy for TLS.")


@click.command(short_help="Serve this card over HTTP: a queue of jobs.")
@click.option("--port", default=8400, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@HOST
@click.option("--folder", type=UserPath(file_okay=False), default=Path("~/.lowmem-grpo"),
              show_default=True, help="Where the server keeps its files; one server at a time uses it.")
@click.option("--key-file", type=UserPath(exists=True, dir_okay=False),
              help="A file with further users: a line NAME KEY for each. The word `jobs` after KEY lets the user "
              "submit jobs. Limits after KEY, such as models=8, are for this user.")
@click.option("--limits", default="", help="Limits of each key. The defaults are \"requests=4096 bodies=1GiB "
              "storage=100GiB models=64 sessions=1024 samplers=16384\": unanswered requests, bytes of stored "
              "requests, bytes on disk, models, sessions of clients, and sampling sessions.")
@click.option("--model", type=UserPath(str),
              help="A model for clients of the Tinker protocol to train: its name on the hub, or a folder.")
@click.option("--max-seq-length", default=2048, show_default=True, type=click.IntRange(2),
              help="The longest sequence, in tokens.")
@click.option("--4bit/--16bit", "load_in_4bit", default=None, help="Load the model in 4 or 16 bits.  [default: 4bit]")
@click.option("--fp8", "load_in_fp8", is_flag=True, help="Load the model in FP8, with a scale for each row.")
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), default="transformers", show_default=True,
              help="The engine that samples. vllm is refused: only recipes can use it.")
@click.option("--train-unembed", "heads", default=0, show_default=True, metavar="N", type=click.IntRange(0),
              help="Train the whole output head of models that clients create with train_unembed=True, of at most N "
              "models in memory at a time; each takes 12 bytes for each number of the head.")
@click.option("--offload-embedding", is_flag=True, help="Keep the embedding on the host, to save the card's memory.")
@click.option("--recipes", type=UserPath(exists=True, file_okay=False),
              help="A folder of recipe files (NAME.py) that users may submit.")
def serve(
    port: int, host: str, folder: Path, key_file: Path | None, limits: str, model: str | None, max_seq_length: int,
    load_in_4bit: bool | None, load_in_fp8: bool, engine: str, heads: int, offload_embedding: bool,
    recipes: Path | None,
) -> None:
    """Run submitted recipes from a queue on this card, and show them on a live page.

    The command prints its address and a key. `lowmem-grpo submit` finds both in the server's --folder. If the server
    ends, running jobs continue, and the next server finds them."""
    with plain_errors():
        one_process("the server")
        check_loading(load_in_4bit, load_in_fp8, engine, model)
        from lowmem_grpo.server.server_dir import Address, ServerDir

        try:
            from lowmem_grpo.server.jobs.dispatcher import Dispatcher
            from lowmem_grpo.server.jobs.queue import JobQueue
            from lowmem_grpo.server.jobs.routes import JobsSource, jobs_router
            from lowmem_grpo.server.page.page import Page, page_app
            from lowmem_grpo.server.requests import Limits
            from lowmem_grpo.server.server import (
                REPEATS,
                ended_by_signals,
                is_loopback,
                made_for,
                make_server_app,
                open_socket,
            )

            if model is not None:  # imports torch, which a queue alone does not need
                from lowmem_grpo.server.tinker.serving import serve_model
        except ImportError as error:
            raise ImportError(f"{LACKING.format('serve')} ({error})") from error
        from lowmem_grpo.server.users import OWNER, Allowance, SignIn, User, Users, read_users

        (log := CurrentStderr()).addFilter(REPEATS)
        log.setFormatter(BetweenWords("%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[log])
        usual = Allowance().but(limits.split())
        others = [] if key_file is None else read_users(key_file, usual)
        own = {user.name: user.allowance for user, _ in others if user.allowance}
        if not is_loopback(host) and not others:
            raise ValueError(f"--host {host} is reached from other machines; give --key-file FILE, in which each user "
                             "has a key, and put a proxy with TLS before the server")
        home = ServerDir(folder)
        with ended_by_signals(), home.owned() as database:
            listening = open_socket(host, port)
            address = Address(address_of(host, listening), home.key())
            path = home.announce(address)
            queue = JobQueue(database, home.jobs)
            dispatcher = Dispatcher(queue, recipes)
            served = None if model is None else serve_model(
                model, database, home.models, defaultdict(lambda: usual, own), not others, heads,
                load_in_4bit=load_in_4bit, load_in_fp8=load_in_fp8, max_seq_length=max_seq_length,
                offload_embedding=offload_embedding)
            users, everywhere = Users(address.key, others), not is_loopback(host)
            routers = {"/jobs": jobs_router(queue, partial(checked, recipes)), **(served.routers() if served else {})}
            app = make_server_app(routers, users, Limits(), everywhere)
            page = Page(JobsSource(queue, visible_name(host)), SignIn(users))
            server = made_for(page_app(page, everywhere, app))
            click.echo(f"serving at {address.url}\nkey {address.key}\n(both are in {path}, which only you can read)\n"
                       f"page {address.url}{page.sign_in.link(User(OWNER))} (works once; later the key signs in)")
            if model is not None:
                click.echo(client_name(model))
            dispatcher.start()
            try:
                server.run(sockets=[listening])
            finally:
                dispatcher.close()
                if served is not None:
                    served.close()


def client_name(model: str) -> str:
    name = public_name(model)
    folder = (" (its name for clients of the Tinker protocol, who find its tokenizer there; recipes of tinker-cookbook "
              "do not know it, and need renderer_name=role_colon, or that of its family)")
    return f"model {name}{folder if Path(name).is_dir() else ''}"


def check_loading(load_in_4bit: bool | None, load_in_fp8: bool, engine: str, model: str | None = None) -> None:
    """Raise ValueError for unsupported options of a served model, OSError for an unknown model. Nothing is loaded."""
    if model is not None and is_adapter(Path(model)):
        raise ValueError(f"--model {model} is an adapter, and clients train adapters of their own on a whole model: "
                         f"lowmem-grpo export {quote(model)} --out FOLDER merges it with its base, then serve "
                         "that FOLDER")
    if engine == "vllm":
        raise ValueError("--engine is 'vllm'; a served model samples with its clients' adapters between two of their "
                         "steps, and is tested with our own engine only: leave --engine out. A recipe takes vLLM: "
                         "`lowmem-grpo submit RECIPE engine=vllm`")
    if load_in_fp8 and load_in_4bit is not None:
        raise ValueError(f"--fp8 and --{'4bit' if load_in_4bit else '16bit'} contradict each other; give one of them")
    if model is not None:
        find(model)


def checked(recipes: Path | None, recipe: str, options: list[str]) -> None:
    """Raise ValueError for options that the recipe would refuse, or a recipe file that is not in `recipes`."""
    from lowmem_grpo.cli.options import check_recipe
    from lowmem_grpo.recipes.recipe_file import unknown_recipe

    name, folder = recipe, ""
    if recipe.endswith(".py"):
        if recipes is None or not (recipes / recipe).is_file():
            names = sorted(path.name for path in recipes.glob("*.py")) if recipes is not None else []
            where = ("has none (--recipes FOLDER gives it some)" if recipes is None
                     else f"has {', '.join(names) or 'no files'}")
            raise ValueError(f"there is no recipe file {recipe!r} on the server, which {where}")
        recipe, folder = str(recipes / recipe), str(recipes)
    elif problem := unknown_recipe(recipe):
        raise ValueError(problem)
    try:
        check_recipe(recipe, options)
    except (click.ClickException, ValueError, OSError) as error:  # clients are not told where the server's files lie
        words = error.format_message() if isinstance(error, click.ClickException) else str(error)
        for own, said in ((recipe, name), (folder, "the folder of recipes"), (str(Path.home()), "~")):
            words = words.replace(own, said) if own else words
        raise ValueError(words) from error
    except SystemExit as error:  # a syntax error, which would end the server
        raise ValueError(f"the recipe file {name} has a syntax error; the server's log shows it") from error


def visible_name(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def address_of(host: str, listening: socket) -> str:
    return f"http://{visible_name(host)}:{listening.getsockname()[1]}"


@click.command(short_help="Watch runs on a live page in the browser.")
@click.argument("runs_dir", type=UserPath(exists=True, file_okay=False))
@click.option("--port", default=8401, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@HOST
@click.option("--key-file", type=UserPath(exists=True, dir_okay=False),
              help="A file with further users who may watch: a line NAME KEY for each.")
def watch(runs_dir: Path, port: int, host: str, key_file: Path | None) -> None:
    """Serve a live page of the runs in RUNS_DIR and the folders below it.

    The page only reads files, so it also shows runs of other machines that write there. The printed link works once;
    other browsers sign in with the key."""
    with plain_errors():
        try:
            from lowmem_grpo.server.page.page import Page, page_app
            from lowmem_grpo.server.page.sources import RunsSource
            from lowmem_grpo.server.server import ended_by_signals, is_loopback, made_for, open_socket
            from lowmem_grpo.server.users import SignIn
        except ImportError as error:
            raise ImportError(f"{LACKING.format('watch')} ({error})") from error
        from lowmem_grpo.server.users import OWNER, User, Users, new_key, read_users

        others = [] if key_file is None else read_users(key_file)
        if not is_loopback(host) and not others:
            raise ValueError(f"--host {host} is reached from other machines; give --key-file FILE, in which each who "
                             "may look has a key, and put a proxy with TLS before the page")
        key = new_key()
        sign_in = SignIn(Users(key, others))
        page = Page(RunsSource(runs_dir), sign_in)
        with ended_by_signals(), open_socket(host, port) as listening:
            url = address_of(host, listening)
            click.echo(f"watching {runs_dir}\nopen {url}{sign_in.link(User(OWNER))} (works once)\n"
                       f"key {key} (for further browsers, at {url})")
            server = made_for(page_app(page, not is_loopback(host)))
            server.run(sockets=[listening])
