"""The rules for Prometheus: every one asks for metrics and labels that there are, and says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txnstore import observability
from txnstore.observability.metric_table import METRICS, MetricKind

RULES = (Path(observability.__file__).parent / "prometheus_alerts.yml").read_text(encoding="utf-8")
SERIES = {name: metric for metric in METRICS for name in metric.series_names}
#: By name, the lines of each rule; an expression is one line.
ALERTS = {rule.split("\n", 1)[0]: rule for rule in RULES.split("      - alert: ")[1:]}


def one(rule, field):
    (value,) = re.findall(rf"^ +{field}: (.*)$", rule, re.MULTILINE)
    return value


def test_each_rule_has_a_name_of_its_own_and_says_what_it_is_and_what_to_do():
    assert 6 <= len(ALERTS) == RULES.count("expr: ") == RULES.count("alert: ")
    for name, rule in ALERTS.items():
        assert re.fullmatch("Txnstore[A-Za-z]+", name)
        assert one(rule, "severity") in {"warning", "critical"}
        for field in ("summary", "description"):
            # Between quotes: a template begins with what YAML takes for a mapping.
            assert re.fullmatch(r'"[^"\\]+"', one(rule, field))


MINUTES = {"two minutes": 2, "twenty minutes": 20, "an hour": 60}


@pytest.mark.parametrize("name", ALERTS)
def test_a_rule_tells_what_its_value_is_and_how_long_it_has_been_so(name):
    expression, description = one(ALERTS[name], "expr"), one(ALERTS[name], "description")
    # A and B has the value of A.
    assert ("{{ $value }} records more each second" in description) == expression.startswith("deriv(")
    # What is looked at lies before the time for which it has to be so.
    looked_at = max(map(int, re.findall(r"\[(\d+)m\]", expression)), default=0)
    for told in re.findall(r" for (an hour|\w+ minutes)\b", description):
        assert MINUTES[told] == looked_at + int(one(ALERTS[name], "for").removesuffix("m"))


@pytest.mark.parametrize("name", ALERTS)
def test_a_rule_is_about_metrics_and_labels_that_there_are(name):
    rule = ALERTS[name]
    expression = one(rule, "expr")
    metrics = re.findall(r"\btxnstore_\w+", expression)
    assert metrics
    assert set(metrics) <= SERIES.keys()
    labels = set.intersection(*({*SERIES[each].labels} for each in metrics))
    for each, chosen in re.findall(r"(txnstore_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r'(\w+)="', chosen)) <= set(SERIES[each].labels)
    assert set(re.findall(r"\$labels\.(\w+)", rule)) <= labels
    for each in re.findall(r"(?:rate|increase)\((\w+)", expression):
        assert SERIES[each].kind is MetricKind.COUNTER
    # YAML reads a line up to what it takes for a comment, or for a key.
    assert " #" not in expression
    assert ": " not in expression
    assert expression.count("(") == expression.count(")")
