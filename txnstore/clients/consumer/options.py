"""This file is what a consumer's configuration means for it: values of its own types, in its own units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from txnstore.clients.configuration.configuration import Configuration
from txnstore.log.fetch import PAGE_BYTES_MAX, PAGE_RECORDS_MAX
from txnstore.model import IsolationLevel

_ISOLATION_LEVELS: Final = {
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
    "read_committed": IsolationLevel.READ_COMMITTED,
}
#: What is read ahead at most, beside the page that is on its way: enough to keep a reader busy, and little memory.
READ_AHEAD_RECORDS: Final = 2 * PAGE_RECORDS_MAX
READ_AHEAD_BYTES: Final = 2 * PAGE_BYTES_MAX
#: Without a wake-up a reader looks by itself, but not more often than this.
LOOK_AGAIN_MS_MIN: Final = 100


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The settings of one consumer; times are in seconds where they are waited for, in milliseconds where stored."""

    group_id: str
    group_instance_id: str | None
    client_id: str
    assignors: tuple[str, ...]
    session_timeout_ms: int
    heartbeat_seconds: float
    max_poll_seconds: float
    isolation: IsolationLevel
    offset_reset: str
    """earliest, latest or error."""
    reports_eof: bool
    stores_offsets: bool
    commits_by_itself: bool
    commits_unowned: bool
    """Whether it may commit partitions that it does not own."""
    commit_interval_seconds: float
    """0: only when partitions are given back."""
    read_ahead_records: int
    read_ahead_bytes: int
    page_bytes_max: int
    look_again_seconds: float
    fetch_min_bytes: int
    """With less to read, what there is is held back for so long:"""
    fetch_wait_seconds: float
    metadata_refresh_ms: int
    creates_topics: bool
    request_timeout_seconds: float
    """How long calls take that have no timeout of their own."""

    @property
    def is_cooperative(self) -> bool:
        """Whether the application is told of changes of the assignment only, not of all of it each time."""
        return "cooperative-sticky" in self.assignors


def consumer_options(configuration: Configuration) -> ConsumerOptions:
    """Return what the configuration says."""
    return ConsumerOptions(
        group_id=configuration["group.id"],
        group_instance_id=configuration["group.instance.id"] or None,
        client_id=configuration["client.id"],
        assignors=tuple(configuration["partition.assignment.strategy"]),
        session_timeout_ms=configuration["session.timeout.ms"],
        heartbeat_seconds=configuration["heartbeat.interval.ms"] / 1000,
        max_poll_seconds=configuration["max.poll.interval.ms"] / 1000,
        isolation=_ISOLATION_LEVELS[configuration["isolation.level"]],
        offset_reset=configuration["auto.offset.reset"],
        reports_eof=configuration["enable.partition.eof"],
        stores_offsets=configuration["enable.auto.offset.store"],
        commits_by_itself=configuration["enable.auto.commit"],
        commits_unowned=configuration["txnstore.commit.ownership"] == "member",
        commit_interval_seconds=configuration["auto.commit.interval.ms"] / 1000,
        read_ahead_records=min(configuration["queued.min.messages"], READ_AHEAD_RECORDS),
        read_ahead_bytes=min(configuration["queued.max.messages.kbytes"] * 1024, READ_AHEAD_BYTES),
        page_bytes_max=min(configuration["fetch.max.bytes"], PAGE_BYTES_MAX),
        look_again_seconds=max(configuration["fetch.wait.max.ms"], LOOK_AGAIN_MS_MIN) / 1000,
        fetch_min_bytes=configuration["fetch.min.bytes"],
        fetch_wait_seconds=configuration["fetch.wait.max.ms"] / 1000,
        metadata_refresh_ms=configuration["topic.metadata.refresh.interval.ms"],
        creates_topics=bool(configuration["allow.auto.create.topics"]),
        request_timeout_seconds=configuration["socket.timeout.ms"] / 1000,
    )
