"""The programs on the page about the server run as they are printed."""

import asyncio
import re
import runpy
from pathlib import Path

import pytest
from served import OWNER, serving

from lowmem_grpo.server.openai.routes import Completions, openai_router
from lowmem_grpo.server.openai.sessions import OpenSessions
from lowmem_grpo.server.requests import Limits

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def test_the_program_without_a_client_trains_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("requests")
    [code] = [one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "import requests" in one]
    with serving(tmp_path / "server", "tiny") as served:
        for shown, meant in (("http://127.0.0.1:8400", served.url), ("tml-...", OWNER), ("Qwen/Qwen3-4B", "tiny")):
            assert shown in code
            code = code.replace(shown, meant)
        program = tmp_path / "program.py"
        program.write_text(code)
        runpy.run_path(str(program))["server"].close()
    said = capsys.readouterr().out
    losses = [float(one) for one in re.findall(r"'loss:sum': ([\d.]+)", said)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert said.count("'stop_reason'") == 2


def test_every_route_of_openais_api_is_on_the_page() -> None:
    limits = Limits()
    router = openai_router(Completions(lambda holder: None, OpenSessions(limits), limits, asyncio.Event()))
    routes = {f"`/v1{route.path.replace('{name:path}', 'NAME')}`" for route in router.routes}
    assert len(routes) == 4 and {route for route in routes if route not in PAGE.read_text()} == set()
