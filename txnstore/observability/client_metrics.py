"""Prometheus metrics of the clients of a process: records, commits, aborts, and producers that were fenced."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.membership.member import ConsumerMember, MemberStage
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.producer.producer import Producer
from txnstore.clients.producer.progress import TransactionProgress
from txnstore.clients.producer.queue import DeliveryReport, DeliveryReports
from txnstore.observability import metric_table as table
from txnstore.observability.metrics import family_of, instrument
from txnstore.observability.prometheus import Collector, Counter, Family, Histogram
from txnstore.observability.wrapping import Onlooker, around_reading, aside

#: How many topics, and groups with topics, have counts of their own; what comes later counts as this.
NAMES_MAX: Final = 100
#: No topic can be called so.
OTHER: Final = "(other)"
#: The bounds of the histogram of commits, in seconds.
BUCKETS_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ClientCollector(Collector):
    """Tells a registry what the clients of this process do, from the making of the collector on.

        REGISTRY.register(ClientCollector())

    Make it before the clients: those that are there already are not counted as open, nor their queues.  Their calls
    are, like those of all others, whatever store they use.
    """

    def __init__(self, *, names_max: int = NAMES_MAX) -> None:
        """Begin to look at the clients; `names_max` topics have counts of their own, and as many groups with topics."""
        self._names_max = names_max
        self._names: dict[str, set[tuple[str, ...]]] = {}
        self._counts: dict[tuple[str, str], Counter] = {}
        self._lock = threading.Lock()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._produced: Counter = instrument(Counter, table.PRODUCED)
        self._consumed: Counter = instrument(Counter, table.CONSUMED)
        self._commits: Histogram = instrument(Histogram, table.COMMIT_SECONDS, buckets=BUCKETS_SECONDS)
        self._aborts: Counter = instrument(Counter, table.ABORTS)
        self._fences: Counter = instrument(Counter, table.FENCES)
        self._onlooker = Onlooker()
        for owner, name, around in (
            (Producer, "__init__", self._around_making(self._producers)),
            (Producer, "commit_transaction", self._around_commit),
            (Producer, "commit_transaction_async", self._around_commit_async),
            (Producer, "abort_transaction", self._around_abort),
            (DeliveryReports, "add", self._around_report),
            (DeliveryReports, "add_instead", self._around_several),
            (TransactionProgress, "fail", self._around_failure),
            (Consumer, "__init__", self._around_making(self._consumers)),
            (Consumer, "poll", around_reading(self._count_consumed)),
            (Consumer, "consume", around_reading(self._count_consumed)),
            (Consumer, "consume_transaction", around_reading(self._count_consumed)),
            (ConsumerMember, "_lose", self._around_loss),
        ):
            self._onlooker.look_at(owner, name, around)

    def close(self) -> None:
        """Look at the clients no more; what was counted is still told."""
        self._onlooker.go()

    def describe(self) -> Iterator[Family]:
        """Return the metrics without figures: a registry asks for their names."""
        return map(family_of, table.CLIENT_METRICS)

    def collect(self) -> Iterator[Family]:
        """Return the counts, and what is open and queued at this moment."""
        clients, queued = family_of(table.CLIENTS), family_of(table.QUEUED)
        producers = [one for one in _members(self._producers) if not one._is_closed]
        clients.add_metric(["producer"], len(producers))
        clients.add_metric(["consumer"], sum(not one._closed for one in _members(self._consumers)))
        queued.add_metric([], sum(one._accumulator.record_count for one in producers))
        yield clients
        yield queued
        for counted in (self._produced, self._consumed, self._commits, self._aborts, self._fences):
            yield from counted.collect()

    def _bounded(self, of: str, *names: str) -> tuple[str, ...]:
        """Return the names as labels; those beyond the limit have a label together."""
        known = self._names.get(of)
        if known is not None and names in known:
            return names
        with self._lock:
            known = self._names.setdefault(of, set())
            if len(known) >= self._names_max and names not in known:
                return (OTHER,) * len(names)
            known.add(names)
        return names

    # --- what passes by ---------------------------------------------------------------------------------------------

    def _around_making(self, made: weakref.WeakSet[Any]) -> Callable[..., None]:
        def making(original: Callable[..., None], client: Any, *arguments: Any, **keywords: Any) -> None:
            original(client, *arguments, **keywords)
            with aside:
                made.add(client)

        return making

    def _around_commit(self, original: Callable[..., None], producer: Producer, *rest: Any, **keywords: Any) -> None:
        began = time.monotonic()
        outcome = "failed"
        try:
            original(producer, *rest, **keywords)
            outcome = "committed"
        except KafkaException as error:
            with aside:
                if error.args[0].code() == KafkaError._TIMED_OUT:
                    # It goes on, and the call that takes its answer counts it.
                    outcome = "unfinished"
            raise
        finally:
            with aside:
                self._commits.labels(outcome).observe(time.monotonic() - began)

    def _around_commit_async(self, original: Callable[..., Future[None]], producer: Producer) -> Future[None]:
        began = time.monotonic()

        def count(done: Future[None]) -> None:
            outcome = "committed" if not done.cancelled() and done.exception() is None else "failed"
            with aside:
                self._commits.labels(outcome).observe(time.monotonic() - began)

        future = original(producer)
        future.add_done_callback(count)
        return future

    def _around_abort(self, original: Callable[..., None], producer: Producer, *rest: Any, **keywords: Any) -> None:
        original(producer, *rest, **keywords)
        with aside:
            self._aborts.inc()

    def _around_report(self, original: Callable[..., None], reports: DeliveryReports, report: DeliveryReport) -> None:
        with aside:
            self._count(report)
        original(reports, report)

    def _around_several(
        self, original: Callable[..., bool], reports: DeliveryReports, several: Sequence[DeliveryReport], *rest: Any
    ) -> bool:
        is_added = original(reports, several, *rest)
        with aside:
            for report in several if is_added else ():
                self._count(report)
        return is_added

    def _count(self, report: DeliveryReport) -> None:
        (topic,) = self._bounded("produced", report.batch.topic)
        outcome = "delivered" if report.error is None else "failed"
        self._produced.labels(topic, outcome).inc(report.batch.record_count)

    def _around_failure(self, original: Callable[..., None], progress: TransactionProgress, error: KafkaError) -> None:
        before = progress.error
        original(progress, error)
        with aside:
            reason = _fence_reason(error)
            if progress.error is error and before is not error and reason is not None:
                self._fences.labels(reason).inc()

    def _around_loss(self, original: Callable[..., None], member: ConsumerMember, stage: MemberStage) -> None:
        with aside:
            if stage is MemberStage.FENCED:
                self._fences.labels("newer_instance").inc()
        original(member, stage)

    def _count_consumed(self, consumer: Consumer, messages: Iterable[Message], began_ns: int) -> None:
        for message in messages:
            topic = message.topic()
            if message.error() is None and topic is not None:
                self._count_of(consumer._core.options.group_id, topic).inc()

    def _count_of(self, group_id: str, topic: str) -> Counter:
        """Return the count of what a group reads of a topic; for each record, so it is looked up once."""
        found = self._counts.get((group_id, topic))
        if found is None:
            found = self._consumed.labels(*self._bounded("consumed", group_id, topic))
            if len(self._counts) < self._names_max:
                self._counts[group_id, topic] = found
        return found


def _members(clients: weakref.WeakSet[Any]) -> list[Any]:
    while True:
        try:
            return list(clients)
        except RuntimeError:
            # Another thread has made a client meanwhile.
            continue


def _fence_reason(error: KafkaError) -> str | None:
    """Return by whom the producer lost its transaction; None: it did not lose it to anybody."""
    if error.code() == KafkaError._FENCED:
        return "newer_producer"
    if error.code() != KafkaError.TRANSACTION_ABORTABLE:
        return None
    text = error.str()
    if "longer than its timeout" in text:
        return "timeout"
    return "administrator" if "was aborted:" in text else None
