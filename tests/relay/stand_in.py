"""A store in the place of a Kafka cluster: what depends on the calls alone is shown without a broker."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace

import txnstore
import txnstore.admin
from tests.relay.kafka_side import KafkaSide
from tests.tools.crashes import Crash, CrashPoint, When
from txnstore.relay.kafka_cluster import KafkaCluster

#: What a relay asks of its producer, in the order of one turn.
CALLS = (
    "init_transactions",
    "begin_transaction",
    "produce",
    "send_offsets_to_transaction",
    "commit_transaction",
)


class StandIn:
    """A cluster that is a store."""

    def __init__(self, url: str) -> None:
        """Stand in for Kafka with the store at `url`."""
        self.url = url

    @cached_property
    def side(self) -> KafkaSide:
        return KafkaSide(self.url, txnstore)

    def cluster(self, library=txnstore) -> KafkaCluster:
        return KafkaCluster(self.url, {}, library=library)


class CrashingLibrary:
    """confluent-kafka's names, whose producer dies at one side of one of its calls."""

    def __init__(self, step: int, when: When) -> None:
        """Count calls from 1."""
        self.step = step
        self.when = when
        self.count = 0
        self.point: CrashPoint | None = None

    def __getattr__(self, name):
        return getattr(txnstore, name)

    def Producer(self, settings):  # noqa: N802 - it stands for a class
        producer = txnstore.Producer(settings)

        def call(name):
            def called(*arguments, **keywords):
                self.count += 1
                self._die(When.BEFORE, name)
                result = getattr(producer, name)(*arguments, **keywords)
                self._die(When.AFTER, name)
                return result

            return called

        return SimpleNamespace(**{name: call(name) for name in CALLS}, poll=producer.poll, close=producer.close)

    def _die(self, when: When, name: str) -> None:
        if self.point is not None or (self.count, when) == (self.step, self.when):
            self.point = self.point or CrashPoint(self.count, when, name)
            raise Crash(self.point)
