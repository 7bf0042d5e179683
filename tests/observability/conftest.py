"""What the tests of metrics share: what a scrape tells, by name and labels."""

from __future__ import annotations

from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from txnstore.db.cluster.cluster import open_cluster
from txnstore.observability.metrics import StoreCollector

#: However busy the machine is: what a test does not ask about is not to be a matter of time.
PATIENCE_SECONDS = 60.0


def scraped(registry):
    """Return what a scrape tells: by name, a value for the labels but the database's, as they are ordered by name."""
    told: dict[str, dict[tuple[str, ...], float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "database")
            told.setdefault(sample.name, {})[labels] = sample.value
    return told


@pytest.fixture
def collect(url, clock, monkeypatch):
    """Scrape the test's store, by the test's clock, through one collector for each set of arguments."""
    monkeypatch.setattr("txnstore.observability.metrics.open_cluster", partial(open_cluster, clock=clock))
    collectors: list[tuple[object, StoreCollector, CollectorRegistry]] = []

    def collect(**arguments):
        if not collectors or collectors[-1][0] != arguments:
            collector = StoreCollector(url, timeout_seconds=PATIENCE_SECONDS, **arguments)
            registry = CollectorRegistry()
            registry.register(collector)
            collectors.append((arguments, collector, registry))
        return scraped(collectors[-1][2])

    yield collect
    for _, collector, _ in collectors:
        collector.close()
