"""A job's buttons in a browser, with a real queue, a real dispatcher and the processes of real jobs."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra [serve]")
pytest.importorskip("selenium", reason="the page is driven by selenium (the extra [dev])")

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.dispatcher import Dispatcher
from lowmem_grpo.server.jobs.queue import JobQueue, JobRequest
from lowmem_grpo.server.jobs.routes import JobsSource
from lowmem_grpo.server.page.page import page_app
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.users import OWNER
from tests.support.page_server import browsing, needs_chromium, page_of, served

pytestmark = [needs_chromium, pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux")]
RECIPE = '''
import json, signal, time
from dataclasses import dataclass
from pathlib import Path
from lowmem_grpo.recipes.options import RecipeOptions

@dataclass
class Options(RecipeOptions):
    pass

OPTIONS = Options

def run(options):
    folder, asked = Path(options.config["output_dir"]), []
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    step = 0
    while not asked:
        step += 1
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "reward": step / 100}) + "\\n")
        print("step", step, flush=True)
        time.sleep(0.2)
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": step}))
    raise SystemExit(143)
'''
STATE = "return document.querySelector('#list .status').textContent"
PRESS = "document.querySelector('#actions button').click()"


@pytest.mark.slow
def test_a_job_is_watched_stopped_and_resumed_by_its_buttons(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    database = Database(tmp_path / "server.sqlite")
    queue = JobQueue(database, tmp_path / "jobs")
    dispatcher = Dispatcher(queue, tmp_path)
    number = queue.submit(JobRequest("small.py"), OWNER).id
    page = page_of(JobsSource(queue, "here"))
    dispatcher.start()
    try:
        with served(page_app(page), page) as url, browsing(url, page) as browser:
            browser.open("/")
            browser.until(STATE, lambda state: state == "running")
            step = "return curves.find(({ plot }) => plot)?.plot.data[0].at(-1) ?? 0"
            first = browser.until(step)  # without the page being loaded again
            browser.until(step, lambda now: now > first)
            assert "step 1" in browser.until("return document.querySelector('#log pre')?.textContent")
            assert browser.run("return document.querySelector('#actions').textContent") == "Stop"
            browser.run(PRESS)
            browser.until(STATE, lambda state: state == "stopped")
            browser.until("return document.querySelector('#actions').textContent", lambda words: words == "Resume")
            assert "This run was stopped" in browser.until("return document.querySelector('.ending')?.textContent")
            assert queue.one(number).exit_code == 143
            browser.run(PRESS)
            browser.until(STATE, lambda state: state == "running")
            assert queue.one(number).goes == 2
            browser.run(PRESS)
            browser.until(STATE, lambda state: state == "stopped")
    finally:
        dispatcher.close()
        for job in queue.live():  # of a test that failed
            keeper.ask_to_stop(queue.folder_of(job))
        database.close()
