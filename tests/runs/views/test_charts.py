"""Several runs on one chart."""

from lowmem_grpo.runs.views.charts import comparison, figures
from tests.support.run_pages import metric


def test_each_run_has_its_first_line_under_its_name_and_keeps_its_place() -> None:
    runs = {"a": figures([metric(1), metric(2)]), "b": figures([metric(step, turns=1) for step in (1, 2, 3)]),
            "c": figures([{"step": 7, "kl": 0.5}])}
    charts = {chart.title: chart for chart in comparison(runs)}
    assert [(line.name, len(line.points)) for line in charts["Reward"].lines] == [("a", 2), ("b", 3), ("c", 0)]
    assert charts["KL divergence"].lines[2].points == [(7, 0.5)]
    assert "Where the time goes" not in charts
    assert all(len(chart.to_dict(100)["lines"]) == 3 for chart in charts.values())


def test_a_chart_says_which_of_its_lines_is_compared() -> None:
    rows = [{"step": step, "completions/mean_length": 5.0, "completions/max_length": 9.0} for step in (1, 2)]
    [chart] = comparison({"a": figures(rows), "b": figures(rows)})
    assert chart.note == "mean" and [line.name for line in chart.lines] == ["a", "b"]
