"""`lowmem-grpo watch`: the live page of runs that were started elsewhere."""

from pathlib import Path

import click

from lowmem_grpo.views.terminal import plain_errors

LACKING = "`lowmem-grpo watch` needs fastapi and uvicorn: pip install 'lowmem-grpo[serve]'"


@click.command(short_help="Watch runs on a live page in the browser.")
@click.argument("runs_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--port", default=8401, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Which address of this machine listens. Any but "
              "loopback needs --key-file, and a proxy before it for TLS.")
@click.option("--key-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Who else may look, a line NAME KEY each.")
def watch(runs_dir: Path, port: int, host: str, key_file: Path | None) -> None:
    """Serve a page of the runs in RUNS_DIR and below it, which moves while they write.

    It reads their files and nothing else, so they may run anywhere that writes there. The link that is printed works
    once; the key signs further browsers in.
    """
    with plain_errors():
        try:
            from lowmem_grpo.service.page.page import Page, page_app
            from lowmem_grpo.service.page.sign_in import SignIn
            from lowmem_grpo.service.page.sources import RunsSource
            from lowmem_grpo.service.page.watching import CardUse
            from lowmem_grpo.service.server import ended_by_signals, is_loopback, made_for, open_socket
        except ImportError as error:
            raise ImportError(f"{LACKING} ({error})") from error
        from lowmem_grpo.service.users import OWNER, User, Users, new_key, read_users

        others = [] if key_file is None else read_users(key_file)
        if not is_loopback(host) and not others:
            raise ValueError(f"--host {host} is reached from other machines; give --key-file FILE, in which each who "
                             "may look has a key, and put a proxy with TLS before the page")
        key = new_key()
        sign_in = SignIn(Users(key, others))
        page = Page(RunsSource(runs_dir), sign_in, CardUse())
        with ended_by_signals(), open_socket(host, port) as listening:
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{listening.getsockname()[1]}"
            click.echo(f"watching {runs_dir}\nopen {url}{sign_in.link(User(OWNER))} (works once)\n"
                       f"key {key} (for further browsers, at {url})")
            server = made_for(page_app(page, not is_loopback(host)))
            page.closing = lambda: server.should_exit
            server.run(sockets=[listening])
