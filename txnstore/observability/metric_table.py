"""The table of metrics: name, kind, labels and meaning of each; collectors, reference and dashboard follow it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class MetricKind(enum.Enum):
    """What Prometheus takes a metric for."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    about: str

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its series as they are scraped."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.name,)


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_DATABASE = ("database",)
_PARTITION = ("database", "topic", "partition")
_POSITION = ("database", "group", "topic", "partition")

# --- of a store -------------------------------------------------------------------------------------------------------

UP: Final = Metric("txnstore_up", _G, _DATABASE, "1 if the figures of the database could be read, else 0.")
SCRAPE_SECONDS: Final = Metric("txnstore_scrape_seconds", _G, (), "How long it took to read the figures.")
LOG_START: Final = Metric("txnstore_partition_log_start_offset", _G, _PARTITION, "The first offset that can be read.")
HIGH_WATERMARK: Final = Metric(
    "txnstore_partition_high_watermark", _G, _PARTITION, "The offset that the next record will get."
)
LSO_LAG: Final = Metric(
    "txnstore_partition_lso_lag_offsets",
    _G,
    _PARTITION,
    "High watermark minus last stable offset: what open transactions keep from readers of committed records.",
)
LSO_AGE: Final = Metric(
    "txnstore_partition_lso_age_seconds",
    _G,
    _PARTITION,
    "How long the transaction that holds back the last stable offset has been open; 0 without one.",
)
LSO_HOLDER: Final = Metric(
    "txnstore_partition_lso_holder_age_seconds",
    _G,
    (*_PARTITION, "transactional_id", "producer_id"),
    "The same, with its name, for the oldest transactions alone; without a name: its coordinator does not know it.",
)
OPEN_TRANSACTIONS: Final = Metric(
    "txnstore_open_transactions", _G, (*_DATABASE, "state"), "Transactions by state: Ongoing, or Decided and not ended."
)
OLDEST_TRANSACTION: Final = Metric(
    "txnstore_oldest_transaction_age_seconds",
    _G,
    (*_DATABASE, "state"),
    "How long the oldest of them has been open; 0 without one.",
)
GROUP_LAG: Final = Metric(
    "txnstore_group_lag_records",
    _G,
    _POSITION,
    "Committed records that the group has not read: no markers, nothing aborted.",
)
GROUP_LAG_OFFSETS: Final = Metric(
    "txnstore_group_lag_offsets", _G, _POSITION, "Offsets from the group's position to the last stable offset."
)
GROUP_LAG_EXACT: Final = Metric(
    "txnstore_group_lag_is_exact",
    _G,
    _POSITION,
    "1 if all of the lag was counted; 0: after the batches that were, offsets stand in for records.",
)
GROUP_MEMBERS: Final = Metric(
    "txnstore_group_members", _G, (*_DATABASE, "group"), "Members of a group that has committed."
)
OUTBOX_WAITING: Final = Metric(
    "txnstore_outbox_waiting_rows", _G, _DATABASE, "Rows of the outbox that wait to become records."
)
OUTBOX_REFUSED: Final = Metric(
    "txnstore_outbox_refused_rows", _G, _DATABASE, "Rows of the outbox that cannot become records."
)
OUTBOX_SEQUENCED: Final = Metric(
    "txnstore_outbox_sequenced_rows_total", _C, _DATABASE, "Rows of the outbox that have become records."
)
OVERDUE: Final = Metric(
    "txnstore_maintenance_overdue_seconds",
    _G,
    _DATABASE,
    "How long the duty of the maintenance has been due that has waited longest for somebody to do it without an error;"
    " 0: none is.",
)
OVERDUE_DUTIES: Final = Metric(
    "txnstore_maintenance_overdue_duties",
    _G,
    _DATABASE,
    "Duties of the maintenance of which a portion is due, and that nobody is at, or that failed last.",
)
STORAGE_BYTES: Final = Metric(
    "txnstore_storage_bytes",
    _G,
    (*_DATABASE, "what"),
    "Room taken. SQLite: file, wal_file, shm_file; PostgreSQL: the database with all that it holds, txnstore's tables.",
)
LEFT_OUT: Final = Metric(
    "txnstore_series_left_out",
    _G,
    (*_DATABASE, "what"),
    "Partitions without figures of their own; positions of groups: 1 if there are more than are shown.",
)

STORE_METRICS: Final = (
    *(UP, SCRAPE_SECONDS, LOG_START, HIGH_WATERMARK, LSO_LAG, LSO_AGE, LSO_HOLDER),
    *(OPEN_TRANSACTIONS, OLDEST_TRANSACTION, GROUP_LAG, GROUP_LAG_OFFSETS, GROUP_LAG_EXACT, GROUP_MEMBERS),
    *(OUTBOX_WAITING, OUTBOX_REFUSED, OUTBOX_SEQUENCED, OVERDUE, OVERDUE_DUTIES, STORAGE_BYTES, LEFT_OUT),
)

# --- of the maintenance -----------------------------------------------------------------------------------------------

DUTIES_DUE: Final = Metric("txnstore_maintenance_duties_due", _G, _DATABASE, "Duties that are due and not done yet.")
PORTIONS: Final = Metric(
    "txnstore_maintenance_portions_total",
    _C,
    (*_DATABASE, "duty", "outcome"),
    "Portions of duties by outcome: done or failed.",
)
ITEMS: Final = Metric(
    "txnstore_maintenance_items_total", _C, (*_DATABASE, "duty"), "What they did: how many of what the duty is called."
)
PORTION_SECONDS: Final = Metric("txnstore_maintenance_portion_seconds", _H, _DATABASE, "How long each took.")

MAINTENANCE_METRICS: Final = (DUTIES_DUE, PORTIONS, ITEMS, PORTION_SECONDS)

# --- of the clients of a process --------------------------------------------------------------------------------------

CLIENTS: Final = Metric("txnstore_client_open", _G, ("kind",), "Producers and consumers that are open.")
QUEUED: Final = Metric(
    "txnstore_client_queued_records", _G, (), "Records that producers hold until they are delivered and reported."
)
PRODUCED: Final = Metric(
    "txnstore_client_records_produced_total",
    _C,
    ("topic", "outcome"),
    "Records by what became of them: delivered or failed. Those of a transaction count once they are in the log.",
)
CONSUMED: Final = Metric(
    "txnstore_client_records_consumed_total", _C, ("group", "topic"), "Records that consumers handed out."
)
COMMIT_SECONDS: Final = Metric(
    "txnstore_client_commit_seconds",
    _H,
    ("outcome",),
    "How long commit_transaction() took, and of commit_transaction_async() until the commit: committed,"
    " failed, or unfinished: its time was up, and the call that takes its answer counts, too.",
)
ABORTS: Final = Metric("txnstore_client_aborts_total", _C, (), "Transactions that abort_transaction() has ended.")
FENCES: Final = Metric(
    "txnstore_client_fences_total",
    _C,
    ("reason",),
    "Producers told that they have lost their transaction, to newer_producer, timeout or administrator; consumers that"
    " have lost their group.instance.id: newer_instance.",
)

CLIENT_METRICS: Final = (CLIENTS, QUEUED, PRODUCED, CONSUMED, COMMIT_SECONDS, ABORTS, FENCES)

METRICS: Final = (*STORE_METRICS, *MAINTENANCE_METRICS, *CLIENT_METRICS)
