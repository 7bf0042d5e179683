"""This file is what a producer is made of, put together from its configuration."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Final

from txnstore.clients.callbacks import Callbacks, ErrorReporter
from txnstore.clients.configuration.configuration import Configuration
from txnstore.clients.connection import DatabaseLook, StoreConnection
from txnstore.clients.model.errors import kafka_error_of
from txnstore.clients.producer.branches import BranchedTransactions
from txnstore.clients.producer.partition_choice import PartitionChoice
from txnstore.clients.producer.queue import Accumulator
from txnstore.clients.producer.reports import DeliveryReports
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, ProducerSession
from txnstore.clients.producer.sender import Sender, SenderSettings
from txnstore.clients.producer.thread import DelayedJob, SenderThread
from txnstore.clients.producer.transactions import CLOSED_TEXT
from txnstore.clients.producer.unassigned_topics import UnassignedTopics
from txnstore.clients.producer.writer import TransactionWriterClient
from txnstore.clients.statistics import Statistics
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.backend import Limits
from txnstore.errors import UnsupportedCompression
from txnstore.log.compression import Codec, require_codec

_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ProducerParts:
    """The parts; none of them holds the producer, so that one can be dropped."""

    configuration: Configuration
    connection: StoreConnection
    changed: threading.Condition
    accumulator: Accumulator
    reports: DeliveryReports
    choice: PartitionChoice
    directory: TopicDirectory
    thread: SenderThread
    sender: Sender
    transactions: BranchedTransactions | TransactionWriterClient | None
    has_statistics: bool
    callbacks: Callbacks
    """For the producer to hold: its parts know them weakly."""
    look: DatabaseLook | None
    """What tells an idle application of a database that is away, if it wants to hear of it."""


def make_producer_parts(configuration: Configuration) -> ProducerParts:
    """Return the parts of a producer; nothing is started or connected yet."""
    names = ("on_delivery", "error_cb", "stats_cb")
    callbacks = Callbacks(**{name: configuration[name] for name in names})
    configuration = configuration.without(*names)
    # Short tries: the sender looks between them whether what it tries is still wanted.
    connection = StoreConnection(configuration, limits=Limits(retry_timeout_ms=TRY_TIMEOUT_MS))
    # Reentrant: the collector of garbage may close another producer in the middle of anything.
    lock = threading.RLock()
    changed = threading.Condition(lock)
    accumulator = Accumulator(
        lock,
        changed,
        records_max=configuration["queue.buffering.max.messages"],
        size_bytes_max=configuration["queue.buffering.max.kbytes"] * 1024,
        batch_records_max=configuration["batch.num.messages"],
        batch_bytes_max=min(configuration["batch.size"], configuration["message.max.bytes"]),
    )
    reports = DeliveryReports(
        changed,
        accumulator,
        default_callback=callbacks.weakly("on_delivery"),
        only_errors=configuration["delivery.report.only.error"],
    )
    choice = PartitionChoice(
        configuration["partitioner"], sticky_seconds=configuration["sticky.partitioning.linger.ms"] / 1000
    )
    directory = TopicDirectory(
        connection,
        refresh_ms=configuration["topic.metadata.refresh.interval.ms"],
        allow_create=configuration["allow.auto.create.topics"],
    )
    name = f"producer-{next(_numbers)}"
    trouble = ErrorReporter(callbacks.weakly("error_cb"), reports.add_event, lambda: connection.is_alone)
    thread = SenderThread(
        f"txnstore-{name}",
        changed,
        backoff_seconds=configuration["retry.backoff.ms"] / 1000,
        backoff_max_seconds=configuration["retry.backoff.max.ms"] / 1000,
        report_trouble=trouble.report,
    )
    sender = _make_sender(configuration, connection, thread, accumulator, reports, directory, choice)
    statistics = Statistics(
        name=name,
        client_id=configuration["client.id"],
        kind="producer",
        interval_seconds=configuration["statistics.interval.ms"] / 1000,
        callback=callbacks.weakly("stats_cb"),
        add_event=reports.add_event,
        collect=sender.facts,
        connection=connection,
    )
    thread.timed_work.append(statistics)
    return ProducerParts(
        configuration,
        connection,
        changed,
        accumulator,
        reports,
        choice,
        directory,
        thread,
        sender,
        _make_transactions(configuration, changed, sender, directory, reports),
        has_statistics=statistics.due_seconds(0.0) is not None,
        callbacks=callbacks,
        look=None
        if callbacks["error_cb"] is None
        else DatabaseLook(connection, thread.submit, lambda error: trouble.report(kafka_error_of(error))),
    )


def _make_sender(  # noqa: PLR0917 - the parts that it is put together from
    configuration: Configuration,
    connection: StoreConnection,
    thread: SenderThread,
    accumulator: Accumulator,
    reports: DeliveryReports,
    directory: TopicDirectory,
    choice: PartitionChoice,
) -> Sender:
    session = ProducerSession(
        connection,
        is_idempotent=configuration["enable.idempotence"],
        transactional_id=configuration["transactional.id"] or None,
        codec=_usable_codec(configuration),
        token=configuration["txnstore.transaction.token"],
    )
    settings = SenderSettings(
        linger_seconds=configuration["linger.ms"] / 1000,
        message_timeout_seconds=configuration["message.timeout.ms"] / 1000,
        retries_unknown=configuration["retries"] > 0,
    )
    topics = UnassignedTopics(accumulator, directory, choice)
    return Sender(thread, accumulator, reports, session, topics, settings=settings)


def _make_transactions(
    configuration: Configuration,
    changed: threading.Condition,
    sender: Sender,
    directory: TopicDirectory,
    reports: DeliveryReports,
) -> BranchedTransactions | TransactionWriterClient | None:
    if configuration["txnstore.transaction.token"] is not None:
        joined = TransactionWriterClient(changed, sender, reports.serve_reports, CLOSED_TEXT)
        sender.listener = joined
        return joined
    transactional_id = configuration["transactional.id"]
    if not transactional_id:
        return None
    delayed = DelayedJob(changed, configuration["linger.ms"] / 1000)
    sender.thread.timed_work.append(delayed)
    transactions = BranchedTransactions(
        transactional_id,
        configuration["transaction.timeout.ms"],
        changed,
        sender,
        directory,
        delayed,
        reports.serve_reports,
        two_phase_commit=configuration["transaction.two.phase.commit.enable"],
    )
    sender.listener = transactions
    return transactions


def _usable_codec(configuration: Configuration) -> Codec:
    """Return the configured codec, or none where its package is missing: the records are the same."""
    codec = Codec[configuration["compression.type"].upper()]
    try:
        require_codec(codec)
    except UnsupportedCompression as error:
        configuration.logger.warning("compression.type=%s: %s; records are not compressed", codec.label, error)
        return Codec.NONE
    return codec
