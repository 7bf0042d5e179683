"""Prometheus metrics: collectors for a store and its maintenance, and an HTTP server for them.

from prometheus_client import REGISTRY
from txnstore.observability.metrics import StoreCollector

REGISTRY.register(StoreCollector("postgresql://monitor@db/shop"))
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.cluster.membership import addresses_of, split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.errors import TxnStoreError
from txnstore.observability import metric_table as table
from txnstore.observability.metric_table import Metric, MetricKind
from txnstore.observability.prometheus import (
    Collector,
    CollectorRegistry,
    Counter,
    CounterMetricFamily,
    Family,
    Gauge,
    GaugeMetricFamily,
    Histogram,
    HistogramMetricFamily,
    ProcessCollector,
    start_http_server,
)
from txnstore.observability.store_figures import (
    FigureLimits,
    PartitionFigures,
    StoreFigures,
    read_cluster_figures,
)
from txnstore.trouble import RepeatedTrouble, kind_of

_log = logging.getLogger(__name__)

#: How long a scrape waits for the figures of a store.
TIMEOUT_SECONDS: Final = 5.0
#: How many transactions that hold readers back are told of by their names.
HOLDERS_MAX: Final = 20
#: What is longer is cut, but for the names of topics, which are bounded: a label is not the place for a text.
LABEL_LENGTH_MAX: Final = 120
#: How many digits of a hash take the place of what was cut: two series never have the same labels.
_DIGEST_LENGTH: Final = 8

_FAMILIES: Final[dict[MetricKind, Any]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


def family_of(metric: Metric) -> Any:
    """Return an empty family of the metric."""
    return _FAMILIES[metric.kind](metric.name.removesuffix("_total"), metric.about, labels=metric.labels)


@dataclass(slots=True)
class _Scrape:
    """What one look at the store has found, by the databases' labels."""

    figures: dict[str, StoreFigures | None] = field(default_factory=dict)
    seconds: float = 0.0


class StoreCollector(Collector):
    """Tells the figures of a store to a registry, at each scrape those of this moment.

    It opens the store at the first scrape, with connections of its own, and reads one snapshot of each database with
    statements that a long log makes no slower.  A database that cannot be read has `txnstore_up` 0 and no other
    figures; a scrape raises nothing and waits for `timeout_seconds` at most.  A registry takes one: for a second store
    make a registry of its own.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        timeout_seconds: float = TIMEOUT_SECONDS,
        holders_max: int = HOLDERS_MAX,
        limits: FigureLimits | None = None,
    ) -> None:
        """Take the URL, or the comma-separated list, that clients have as `bootstrap.servers`; connects to nothing yet.

        Args:
            url: where the store is.
            schema: the PostgreSQL schema with its tables.
            timeout_seconds: how long a scrape waits for it.
            holders_max: how many transactions that hold readers back have a series with their name.
            limits: how much is read at most.

        Raises:
            InvalidUrl: the URL cannot be understood.
        """
        addresses = [address.lasting() for address in addresses_of(split_urls(url))]
        self._url = ",".join(address.text for address in addresses)
        self._schema = schema
        self._timeout_seconds = timeout_seconds
        self._holders_max = holders_max
        self._limits = limits or FigureLimits()
        self._labels = [address.label for address in addresses]
        self._cluster: Cluster | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._trouble = RepeatedTrouble()

    def close(self) -> None:
        """Close its connections; later scrapes say that the store is not up."""
        self._is_closed = True
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def describe(self) -> Iterator[Family]:
        """Return the metrics without figures: a registry asks for their names."""
        return map(family_of, table.STORE_METRICS)

    def collect(self) -> Iterator[Family]:
        """Return the figures of this moment."""
        reading = self._read_within()
        families = {metric.name: family_of(metric) for metric in table.STORE_METRICS}

        def add(metric: Metric, labels: Sequence[object], value: float) -> None:
            texts = [_label(name, label) for name, label in zip(metric.labels, labels, strict=True)]
            families[metric.name].add_metric(texts, value)

        add(table.SCRAPE_SECONDS, (), reading.seconds)
        holders = _oldest_holders(reading.figures, self._holders_max)
        for database, figures in reading.figures.items():
            add(table.UP, [database], 0 if figures is None else 1)
            if figures is not None:
                for metric, labels, value in _samples(figures):
                    add(metric, [database, *labels], value)
        for database, partition in holders:
            holder = partition.holder
            assert holder is not None, "these are those with one"
            name = partition.name
            who = holder.transactional_id or "", holder.producer_id
            add(table.LSO_HOLDER, [database, name.topic, name.partition, *who], holder.age_ms / 1000)
        return iter(families.values())

    def _read_within(self) -> _Scrape:
        """Return what can be read in time; a database of which nothing is known in time is not up."""
        began = time.monotonic()
        reading: _Scrape | None = None
        if not self._is_closed and self._lock.acquire(timeout=self._timeout_seconds):
            try:
                reading = self._read_in_thread(began + self._timeout_seconds)
            finally:
                self._lock.release()
        found = reading or _Scrape(dict.fromkeys(self._labels))
        # What comes too late shows nobody that all is well.
        if None not in found.figures.values() and self._trouble.passed():
            fields = {"event": "metrics_available", "database": self._labels[0]}
            _log.info("the figures of %s can be read again", self._labels[0], extra=fields)
        found.seconds = time.monotonic() - began
        return found

    def _read_in_thread(self, deadline: float) -> _Scrape | None:
        """Read in a thread, which a scrape can leave behind; none is begun before the last one has ended."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                return None
        done: list[_Scrape] = []
        self._thread = threading.Thread(target=lambda: done.append(self._read()), name="txnstore-metrics", daemon=True)
        self._thread.start()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note_trouble("they did not come in time")
            return None
        self._thread = None
        return done[0] if done else None

    def _read(self) -> _Scrape:
        try:
            cluster = self._opened()
            found = read_cluster_figures(cluster, self._limits)
        except TxnStoreError as error:
            self._note_trouble(str(error))
            return _Scrape(dict.fromkeys(self._labels))
        except Exception as error:  # noqa: BLE001 - whatever it is, the application's other metrics are scraped
            if self._trouble.may_be_told(kind_of(error)):
                fields = {"event": "metrics_failed", "database": self._labels[0]}
                _log.exception("the figures of %s cannot be read", self._labels[0], extra=fields)
            return _Scrape(dict.fromkeys(self._labels))
        labels = {number: database_label(cluster, number, self._labels[0]) for number in found}
        self._labels = list(labels.values())
        failed = [one for one in found.values() if isinstance(one, TxnStoreError)]
        if failed:
            self._note_trouble(str(failed[0]))
        return _Scrape(
            {
                labels[number]: figures if isinstance(figures, StoreFigures) else None
                for number, figures in found.items()
            }
        )

    def _opened(self) -> Cluster:
        if self._cluster is None:
            timeout_ms = max(1, int(self._timeout_seconds * 1000))
            limits = Limits(
                statement_timeout_ms=timeout_ms, lock_timeout_ms=timeout_ms, retry_timeout_ms=timeout_ms // 2
            )
            cluster = open_cluster(
                self._url, schema=self._schema, limits=limits, pool_size=1, create=False, takes_in=False
            )
            if self._is_closed:
                cluster.close()
            self._cluster = cluster
        else:
            # Others may have joined.
            self._cluster.refresh()
        return self._cluster

    def _note_trouble(self, why: str) -> None:
        if self._trouble.may_be_told(kind_of(why)):
            fields = {"event": "metrics_unavailable", "database": self._labels[0]}
            _log.warning("the figures of %s cannot be read: %s", self._labels[0], why, extra=fields)


def database_label(cluster: Cluster, database_id: int, of_url: str) -> str:
    """Return what metrics call a database: by its URL the only one, which has no name yet, else as the cluster does."""
    return of_url if cluster.is_alone else cluster.label_of(database_id)


def _label(name: str, value: object) -> str:
    text = str(value)
    if name == "topic" or len(text) <= LABEL_LENGTH_MAX:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    return f"{text[: LABEL_LENGTH_MAX - _DIGEST_LENGTH - 1]}~{digest}"


def _oldest_holders(figures: dict[str, StoreFigures | None], holders_max: int) -> list[tuple[str, PartitionFigures]]:
    held = [
        (database, partition)
        for database, one in figures.items()
        if one is not None
        for partition in one.partitions
        if partition.holder is not None
    ]
    held.sort(key=lambda item: (-item[1].holder.age_ms if item[1].holder else 0, item[0], item[1].name))
    return held[:holders_max]


_Sample = tuple[Metric, tuple[object, ...], float]


def _samples(figures: StoreFigures) -> Iterator[_Sample]:
    """Return what one database says: metrics, the labels after that of the database, and values."""
    for partition in figures.partitions:
        name, bounds = (partition.name.topic, partition.name.partition), partition.bounds
        yield table.LOG_START, name, bounds.log_start_offset
        yield table.HIGH_WATERMARK, name, bounds.high_watermark
        yield table.LSO_LAG, name, bounds.high_watermark - bounds.last_stable_offset
        yield table.LSO_AGE, name, 0 if partition.holder is None else partition.holder.age_ms / 1000
    yield table.OPEN_TRANSACTIONS, ("Ongoing",), figures.open_transactions
    yield table.OPEN_TRANSACTIONS, ("Decided",), figures.decided_transactions
    yield table.OLDEST_TRANSACTION, ("Ongoing",), figures.oldest_open_age_ms / 1000
    yield table.OLDEST_TRANSACTION, ("Decided",), figures.oldest_decided_age_ms / 1000
    for lag in figures.lags:
        position = (lag.group_id, lag.partition.topic, lag.partition.partition)
        yield table.GROUP_LAG, position, lag.counted.records
        yield table.GROUP_LAG_OFFSETS, position, lag.offsets
        yield table.GROUP_LAG_EXACT, position, int(lag.counted.is_exact)
    for group_id, count in figures.members.items():
        yield table.GROUP_MEMBERS, (group_id,), count
    yield table.OUTBOX_WAITING, (), figures.outbox_waiting
    yield table.OUTBOX_REFUSED, (), figures.outbox_refused
    yield table.OUTBOX_SEQUENCED, (), figures.outbox_sequenced
    yield table.OVERDUE, (), max(figures.overdue_ms, default=0) / 1000
    yield table.OVERDUE_DUTIES, (), len(figures.overdue_ms)
    for what, size_bytes in figures.sizes_bytes.items():
        yield table.STORAGE_BYTES, (what,), size_bytes
    yield table.LEFT_OUT, ("partitions",), max(0, figures.partition_count - len(figures.partitions))
    yield table.LEFT_OUT, ("group_partitions",), int(figures.has_more_positions)


# --- the maintenance --------------------------------------------------------------------------------------------------


class MaintenanceMetrics:
    """Counts what the loops of the maintenance do, one loop for each database."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Enter the counts in the registry."""
        self._due = instrument(Gauge, table.DUTIES_DUE, registry)
        self._portions = instrument(Counter, table.PORTIONS, registry)
        self._items = instrument(Counter, table.ITEMS, registry)
        self._seconds = instrument(Histogram, table.PORTION_SECONDS, registry)

    def of_database(self, label: str) -> DatabaseMaintenanceMetrics:
        """Return what observes the loop of one database."""
        return DatabaseMaintenanceMetrics(label, self._due, self._portions, self._items, self._seconds)


@dataclass(frozen=True, slots=True)
class DatabaseMaintenanceMetrics:
    """Counts what the loop of one database does; see `MaintenanceObserver`."""

    label: str
    due_gauge: Gauge
    portions: Counter
    items: Counter
    seconds: Histogram

    def due(self, count: int) -> None:
        """Take note of how many duties are due."""
        self.due_gauge.labels(self.label).set(count)

    def portion(self, duty: str, count: int | None, seconds: float) -> None:
        """Take note of a portion: how much it did, or None if it failed."""
        self.portions.labels(self.label, duty, "failed" if count is None else "done").inc()
        self.items.labels(self.label, duty).inc(count or 0)
        self.seconds.labels(self.label).observe(seconds)


def instrument(kind: Any, metric: Metric, registry: CollectorRegistry | None = None, **options: Any) -> Any:
    """Return what counts for the metric."""
    return kind(metric.name.removesuffix("_total"), metric.about, metric.labels, registry=registry, **options)


# --- the server -------------------------------------------------------------------------------------------------------


class MetricsServer:
    """An HTTP server for the metrics of a store, of its maintenance in this process, and of the process itself."""

    def __init__(self, url: str, *, port: int, address: str = "127.0.0.1", schema: str = DEFAULT_SCHEMA) -> None:
        """Listen, in threads of its own, on a port of the address; 0: on one that is free.

        Raises:
            InvalidUrl: the URL cannot be understood.
            OSError: the port is in use, or the address is not one of this machine.
        """
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._store = StoreCollector(url, schema=schema)
        registry.register(self._store)
        self._maintenance = MaintenanceMetrics(registry)
        self._label = addresses_of(split_urls(url))[0].label
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        self.port: int = self._server.server_port
        """The port that it listens on."""

    def observer_of(self, cluster: Cluster, database_id: int) -> DatabaseMaintenanceMetrics:
        """Return what observes the maintenance of one database."""
        return self._maintenance.of_database(database_label(cluster, database_id, self._label))

    def close(self) -> None:
        """Listen no more, and close the connections to the store."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._store.close()
