"""The rules for Prometheus: every one asks for metrics and labels that there are, and says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from txnstore import observability
from txnstore.observability.metric_table import METRICS, MetricKind

FILE = Path(observability.__file__).parent / "prometheus_alerts.yml"
RULES = FILE.read_text(encoding="utf-8")
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


# --- as Prometheus itself reads them ----------------------------------------------------------------------------------

DATABASE = {"database": "shop"}
IN_PARTITION = {**DATABASE, "topic": "orders", "partition": "0"}


@dataclass(frozen=True)
class Course:
    """What is measured once a minute, and what comes of it."""

    series: dict[str, str]
    """By metric and labels, values as promtool writes them."""

    quiet: int
    """The last minute of which it is known that nothing is told."""

    told: int
    """A minute in which it is told."""

    labels: dict[str, str]
    value: str = ""
    """The value as the texts show it."""


def series(name, *, of=DATABASE, **labels):
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in {**of, **labels}.items()) + "}"


LAG = {**IN_PARTITION, "group": "mail"}
DUTY = {**DATABASE, "duty": "batches"}
COURSES = {
    "TxnstoreDatabaseAway": Course({series("txnstore_up"): "1 0x10"}, 2, 3, DATABASE),
    "TxnstoreReadersHeldBack": Course(
        {series("txnstore_partition_lso_age_seconds", of=IN_PARTITION): "200+60x10"}, 2, 3, IN_PARTITION, "6m 20s"
    ),
    "TxnstoreDecidedNotCompleted": Course(
        {
            series("txnstore_oldest_transaction_age_seconds", state="Decided"): "30+60x10",
            series("txnstore_oldest_transaction_age_seconds", state="Ongoing"): "1000+60x10",
        },
        2,
        3,
        {**DATABASE, "state": "Decided"},
    ),
    "TxnstoreNobodyMaintains": Course(
        {series("txnstore_maintenance_overdue_seconds"): "3500+60x20"}, 6, 7, DATABASE, "1h 5m 20s"
    ),
    "TxnstoreMaintenanceFails": Course(
        {
            series("txnstore_maintenance_portions_total", of=DUTY, outcome="failed"): "7x60 8+1x30",
            series("txnstore_maintenance_portions_total", of=DUTY, outcome="done"): "0+10x90",
        },
        60,
        75,
        {**DUTY, "outcome": "failed"},
    ),
    "TxnstoreOutboxStandsStill": Course(
        {
            series("txnstore_outbox_waiting_rows"): "5x40",
            series("txnstore_outbox_sequenced_rows_total"): "0+1x10 10x30",
        },
        28,
        31,
        DATABASE,
        "5",
    ),
    "TxnstoreOutboxRowsRefused": Course({series("txnstore_outbox_refused_rows"): "0x5 3x5"}, 5, 6, DATABASE, "3"),
    "TxnstoreGroupFallsBehind": Course(
        {
            series("txnstore_group_lag_records", of=LAG): "0+60x90",
            series("txnstore_group_lag_records", of={**LAG, "group": "catches up"}): "9000-60x90",
        },
        59,
        62,
        LAG,
        "1",
    ),
    "TxnstoreGroupStandsStill": Course(
        {
            # Of an idle topic, in the end; and what is read all the time.
            series("txnstore_group_lag_records", of=LAG): "35-1x30 5x90",
            series("txnstore_group_lag_records", of={**LAG, "group": "reads"}): "1000-1x120",
            series("txnstore_group_lag_records", of={**LAG, "group": "is there"}): "0x120",
        },
        88,
        91,
        LAG,
        "5",
    ),
}


@pytest.fixture
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool, which comes with Prometheus (Debian: apt-get install prometheus)")
    return found


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def filled_in(text, course):
    """Return what a template says of the course's labels and value."""
    text = re.sub(r"\{\{ \$value( \| humanizeDuration)? \}\}", course.value, text.strip('"'))
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: course.labels[found[1]], text)


def test_prometheus_takes_every_rule(promtool):
    assert f"{len(ALERTS)} rules found" in run(promtool, "check", "rules", str(FILE))


def test_every_rule_has_a_course_that_it_tells_of():
    assert list(COURSES) == list(ALERTS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", COURSES)
def test_a_rule_tells_of_what_it_is_for_and_not_before(promtool, tmp_path, name):
    course, rule = COURSES[name], ALERTS[name]
    alert = {
        "exp_labels": {"severity": one(rule, "severity"), **course.labels},
        "exp_annotations": {field: filled_in(one(rule, field), course) for field in ("summary", "description")},
    }
    looks = [(course.quiet, []), (course.told, [alert])]
    told = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": values} for each, values in course.series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts} for minute, alerts in looks
                ],
            }
        ],
    }
    # JSON is YAML, too.
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(told), encoding="utf-8")
    assert "SUCCESS" in run(promtool, "test", "rules", str(file))
