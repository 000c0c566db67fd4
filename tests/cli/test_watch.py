"""`lowmem-grpo watch`: prints a link that works, and ends on Ctrl-C; other machines need keys."""

import re
import signal
import subprocess
import sys
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from click.testing import CliRunner
from programs import kept_open, program

pytest.importorskip("fastapi", reason="the page needs the extra [serve]")

from lowmem_grpo.cli.serve import watch
from tests.support.run_pages import write_run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.every(2)
def test_the_printed_link_opens_the_page_and_a_signal_ends_it_while_a_page_is_open(tmp_path: Path, number: int) -> None:
    write_run(tmp_path / "the-run", 5)
    command = [sys.executable, "-m", "lowmem_grpo", "watch", tmp_path, "--port", "0"]
    with program(*command, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(3))
        link = re.search(r"open (\S+)", said)
        assert link, said
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        browser.open(link[1], timeout=60)
        base = link[1].partition("/page")[0]
        assert "the-run" in browser.open(base + "/", timeout=60).read().decode()
        with kept_open(base):
            process.send_signal(number)
            rest = process.stdout.read()
            process.wait(60)
        assert "Traceback" not in rest, rest
    assert process.returncode == 128 + number


def test_other_machines_are_let_in_with_keys_only(tmp_path: Path) -> None:
    found = CliRunner().invoke(watch, [str(tmp_path), "--host", "0.0.0.0"])
    assert found.exit_code == 1 and "give --key-file FILE" in found.output
    missing = CliRunner().invoke(watch, [str(tmp_path / "none")])
    assert missing.exit_code == 2 and "does not exist" in missing.output
