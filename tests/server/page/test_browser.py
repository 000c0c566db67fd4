"""The page in Chromium, offline: it moves when a run writes, and nothing of a run is run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra [serve]")
pytest.importorskip("selenium", reason="the page is driven by selenium (the extra [dev])")

from lowmem_grpo.runs.views.report import write_report
from tests.support.page_server import Browser, browsing, needs_chromium, watched
from tests.support.run_pages import append, completion, metric, write_hostile, write_run

pytestmark = needs_chromium
REWARD = "return curves.find(({ chart, plot }) => chart.title === 'Reward' && plot)?.plot.data[0].at(-1)"
DRAWN = "return curves.filter(({ plot }) => plot).length"
POINTS = "return Math.max(...curves.flatMap(({ chart }) => chart.lines.map(({ steps }) => steps.length)))"
LONG = 100_000  # steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("browser") / "runs"
    write_run(runs / "short", 60, {"status": "finished", "recipe": "arithmetic", "model": "tiny"})
    write_run(runs / "moving", 40)
    write_hostile(runs / "hostile", runs.parent)
    write_run(runs / "long", LONG, {"status": "finished"})
    return runs


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with watched(folder) as (url, page), browsing(url, page) as found:
        yield found


def test_curves_samples_and_numbers_move_when_the_run_writes(browser: Browser, folder: Path) -> None:
    browser.asked_for()
    browser.open("/?run=moving")
    browser.until(REWARD, lambda step: step == 40)
    browser.until("return link.textContent", lambda words: words == "live")
    append(folder / "moving/metrics.jsonl", [metric(step) for step in range(41, 46)])
    append(folder / "moving/completions.jsonl", [completion(45, "a new answer")])
    browser.until(REWARD, lambda step: step == 45)
    browser.until("return element('rows')?.textContent", lambda text: "a new answer" in text)
    assert "45" in browser.run("return document.querySelector('.tile').textContent")
    asked = browser.asked_for()
    assert asked and all(address.startswith(browser.url) for address in asked), asked
    assert browser.errors() == []


def test_what_a_model_wrote_is_text(browser: Browser) -> None:
    for path in ("/?run=hostile", "/?with=hostile&with=short"):
        browser.open(path)
        browser.until(DRAWN)
        assert browser.run("return document.title") != "taken"
        assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    browser.open("/?run=hostile")
    assert "onerror=" in browser.until("return element('rows')?.textContent")
    with pytest.raises(Exception, match="TrustedHTML"):
        browser.run("document.body.innerHTML = '<img>'")
    browser.errors()  # that refusal


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280, 1920])
@pytest.mark.every(3)
def test_no_width_needs_scrolling_to_the_side_and_colours_follow_the_system(
    browser: Browser, scheme: str, width: int
) -> None:
    browser.look(scheme, width)
    for path in ("/?run=short", "/?run=hostile") if scheme == "light" else ("/?run=short",):
        browser.open(path)
        browser.run("element('curves').scrollIntoView()")
        browser.until(DRAWN)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run("return curves.every(({ figure }) => figure.scrollWidth <= figure.clientWidth)")
    dark = browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    assert dark == (scheme == "dark")
    browser.look()


@pytest.mark.slow
def test_100_000_steps_are_drawn_in_few_points_and_the_next_ones_as_they_come(browser: Browser, folder: Path) -> None:
    browser.open("/?run=long")
    for step in range(LONG, LONG + 3):
        browser.until(REWARD, lambda shown, step=step: shown == step)  # type: ignore[misc]
        assert browser.run(POINTS) <= 2000
        append(folder / "long/metrics.jsonl", [metric(step + 1)])
    assert browser.errors() == []


def test_the_report_of_a_run_is_the_same_page_without_a_server(browser: Browser, folder: Path) -> None:
    report = write_report(folder / "short")
    browser.driver.get("about:blank")  # what the page before still asked for is not the report's
    browser.asked_for()
    browser.driver.get(report.as_uri())
    browser.until("return document.readyState")
    browser.run("element('curves').scrollIntoView()")
    assert browser.until(REWARD) == 60
    browser.until("return document.querySelectorAll('#curves .uplot').length", lambda count: count >= 4)
    assert browser.run("return document.querySelectorAll('#rows .said.sampled').length") == 2
    assert browser.asked_for() == {report.as_uri()}
    assert browser.errors() == []


def test_an_episode_is_shown_turn_by_turn(browser: Browser, folder: Path) -> None:
    turn = {"text": "what is it?", "tokens": 5, "calls": [{"name": "look", "arguments": {"at": "<b>"}}], "reward": 0.5,
            "replies": [{"role": "tool", "name": "look", "content": "a <b> there"}]}
    write_run(folder / "played", 3, {"status": "finished"})
    append(folder / "played/completions.jsonl", [completion(3, ending="answer", num_turns=2, turns=[turn, turn])])
    browser.open("/?run=played")
    words = browser.until("return element('rows')?.innerText")
    for expected in ("\u25cf 1. assistant", "reward 0.5", '\u2192 calls look(at="<b>")', "\u25cb tool look",
                     "a <b> there", "\u25cf 2. assistant", "ended by answer: a turn without a call of a tool"):
        assert expected in words, words
    assert "[object" not in browser.run("return document.body.innerText")
    assert browser.run("return [...document.querySelectorAll('header, article')].every(each => "
                       "[...each.childNodes].every(child => child.nodeType === Node.ELEMENT_NODE))")


def test_a_completion_without_rewards_would_be_shown_with_an_empty_reward(browser: Browser, folder: Path) -> None:
    write_run(folder / "taught", 0, {"status": "finished", "method": "distillation"})
    append(folder / "taught/completions.jsonl", [completion(1, reward=None, rewards={}, advantage=0.0)])
    browser.open("/?run=taught")
    words = browser.until("return element('rows')?.innerText")
    assert words.split()[:2] == ["step", "1"] and "reward" not in words and "advantage" not in words


def test_colours_follow_the_system_and_paper_is_light_with_every_curve(browser: Browser) -> None:
    browser.open("/?run=short")
    before = browser.until(DRAWN)
    picture = "return [curves[0].plot.series.at(-1).stroke(), curves[0].plot.ctx.canvas.toDataURL()]"
    light = browser.run(picture)
    browser.look("dark")
    browser.until(picture, lambda dark: (light[0], dark[0]) == ("#0065d2", "#4d94ff") and dark[1] != light[1])
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(picture)[0] == "#0065d2" and browser.run(DRAWN) == browser.run("return curves.length") > before
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(picture)[0] == "#4d94ff"
    browser.look()


def test_intervals_are_drawn_whole_and_axes_have_titles_at_every_width(browser: Browser, folder: Path) -> None:
    write_run(folder / "measured", 3, {"status": "finished", "accuracy_before": 0.5, "accuracy_after": 0.9,
                                       "eval_problems": 8})
    for width in (1280, 400):
        browser.look(width=width)
        browser.open("/?run=measured")
        browser.until(DRAWN)
        assert browser.run("return curves.filter(({ plot }) => plot).every(({ plot, chart }) => "
                           "plot.axes[0].label === 'step' && plot.axes[1].label === chart.axis && chart.axis)")
        assert browser.until("""const { plot, chart } = curves.find(({ chart }) => chart.title === 'Accuracy');
            return plot && chart.lines.some(({ kind, low }) => kind === 'dots' && low)""")
    browser.look()
    low, high = browser.run("return range({ lines: [{ kind: 'dots', low: [0.3], high: [0.8] }] }, 0.5, 0.6)")
    assert low <= 0.3 and high >= 0.8


def test_boxes_turn_smoothing_off_and_axes_logarithmic_where_values_allow_it(browser: Browser) -> None:
    browser.open("/?run=short")
    browser.until(REWARD)
    series = "return curves.find(({ chart }) => chart.title === 'Reward').plot?.series.length"
    before = browser.until(series)
    browser.run("element('smooth').click()")
    assert browser.until(series) < before
    browser.run("element('log').click()")
    scales = browser.until("return curves.filter(({ plot }) => plot).map(({ chart, plot }) => "
                           "[isLog(chart), plot.scales.y.distr === 3])")
    assert all(wanted == logarithmic for wanted, logarithmic in scales)
    assert {wanted for wanted, _ in scales} == {True, False}
    browser.run("element('log').click()")
    assert browser.errors() == []


def test_no_two_ticks_of_an_axis_read_the_same(browser: Browser) -> None:
    browser.open("/?run=short")
    for share in ("false", "true"):
        assert browser.run(f"""return [1e-7, 2e-5, 5e-4, 0.02, 0.5, 1, 20, 5e3, 1e7].every(step => new Set(
            [0, 1, 2, 3, 4, 5].map(place => label({{ share: {share} }}, place * step, step))).size === 6)""")


def test_runs_are_compared_by_their_boxes(browser: Browser) -> None:
    browser.open("/?run=short")
    for name in ("short", "moving"):
        browser.run(f"document.querySelector('input[value={name}]').click()")
    browser.run("element('compare').click()")
    browser.until("return document.title", lambda title: title == "2 runs")
    keys = browser.until("return document.querySelector('#curves .keys')?.textContent")
    assert "short" in keys and "moving" in keys
    assert browser.errors() == []
