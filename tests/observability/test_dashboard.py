"""The dashboard for Grafana: every panel can be drawn, and asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from txnstore import observability
from txnstore.observability.metric_table import METRICS, MetricKind

BOARD = json.loads((Path(observability.__file__).parent / "grafana_dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SERIES = {name: metric for metric in METRICS for name in metric.series_names}
WORD = re.compile(r"\btxnstore_\w+")


def labels_of(metric):
    return {*metric.labels, "le"} if metric.kind is MetricKind.HISTOGRAM else set(metric.labels)


def test_it_can_be_imported():
    assert (BOARD["title"], BOARD["uid"]) == ("txnstore", "txnstore")
    assert BOARD["schemaVersion"] >= 36
    assert "id" not in BOARD
    identifiers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "stat", "table"}
        assert panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


def test_every_panel_asks_the_chosen_source_and_database():
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert {name: variable["type"] for name, variable in variables.items()} == {
        "datasource": "datasource",
        "database": "query",
    }
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["database"]["definition"] == "label_values(txnstore_up, database)"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["database"]["datasource"] == source
    for panel in PANELS:
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [
            source,
            *(source for _ in panel["targets"]),
        ]
    used = set(re.findall(r"\$(\w+)", " ".join(EXPRESSIONS)))
    assert used == {"database", "__rate_interval"}


def test_panels_stand_side_by_side_within_the_page():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_about_metrics_and_labels_that_there_are(expression):
    names = WORD.findall(expression)
    assert names
    assert set(names) <= SERIES.keys()
    for name in names:
        metric = SERIES[name]
        is_counter = metric.kind is not MetricKind.GAUGE or name == "txnstore_partition_high_watermark"
        # Only what goes up has a rate.
        if re.search(rf"(rate|increase)\({name}\b", expression):
            assert is_counter
        chosen = re.search(rf"{name}\{{([^}}]*)\}}", expression)
        if chosen:
            assert set(re.findall(r"(\w+)=~?\"", chosen[1])) <= labels_of(metric)
        assert "database" not in metric.labels or (chosen is not None and 'database=~"$database"' in chosen[1])
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert set(by.split(", ")) <= set.union(*(labels_of(SERIES[name]) for name in names))
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_legends_name_labels_that_are_left():
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            left = set(by[1].split(", ")) if by else labels_of(SERIES[WORD.findall(target["expr"])[0]])
            assert wanted <= left, target


def test_every_metric_is_shown_somewhere_but_those_that_explain_others():
    shown = {SERIES[name].name for expression in EXPRESSIONS for name in WORD.findall(expression)}
    hidden = {metric.name for metric in METRICS} - shown
    assert hidden == {"txnstore_group_lag_is_exact"}
