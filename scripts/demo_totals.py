"""The demonstration's totals: refunds in all and by country, and whether two counts are the same."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from scripts.demo_lines import EXACT
from txnstore import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

#: How long a reader waits for a record that has to be there.
_SILENCE_SECONDS: Final = 60.0
#: A call returns once it has so many records, or after this time.
_FETCHED: Final = 5_000
_FETCH_SECONDS: Final = 0.1


class NoAnswerError(Exception):
    """Records that have to be there did not come; its text is what the user reads."""


@dataclass
class Refunds:
    """Refunds as somebody counted them."""

    count: int = 0
    amount: Decimal = Decimal(0)
    invoices: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """By country; so are the amounts."""

    amounts: dict[str, Decimal] = field(default_factory=dict)
    repeated: int = 0
    """How many came of a settlement that another one came of before."""

    _sources: set[tuple[int, int]] = field(default_factory=set)

    def add(self, invoice: str, country: str, amount: Decimal) -> None:
        """Count a refund."""
        self.count += 1
        self.amount = EXACT.add(self.amount, amount)
        self.invoices.add(invoice)
        self.counts[country] += 1
        self.amounts[country] = EXACT.add(self.amounts.get(country, Decimal(0)), amount)

    def add_record(self, value: bytes) -> None:
        """Count the refund in a record's value."""
        refund: dict[str, Any] = json.loads(value)
        self.add(refund["invoice"], refund["country"], Decimal(refund["amount"]))
        source = (refund["source_partition"], refund["source_offset"])
        self.repeated += source in self._sources
        self._sources.add(source)

    def countries(self) -> list[str]:
        """Return the countries, those with most refunds first."""
        return [country for country, _ in self.counts.most_common()]


def differences(expected: Refunds, found: Refunds) -> list[str]:
    """Return in what two counts differ, a line each; none if they are the same."""
    lines = []
    if found.repeated:
        lines.append(f"{found.repeated:,} refunds come of a settlement that was refunded before")
    if found.count != expected.count:
        lines.append(f"{found.count:,} refunds and not {expected.count:,}")
    if found.amount != expected.amount:
        lines.append(f"an amount of {found.amount:f} and not {expected.amount:f}")
    if missing := len(expected.invoices - found.invoices):
        lines.append(f"{missing:,} cancelled invoices without a refund")
    if extra := len(found.invoices - expected.invoices):
        lines.append(f"{extra:,} refunded invoices that nobody cancelled")
    for country in sorted(expected.counts | found.counts):
        ours, theirs = (
            (refunds.counts[country], refunds.amounts.get(country, Decimal(0))) for refunds in (found, expected)
        )
        if ours != theirs:  # as numbers: 50.0 is 50.00
            lines.append(f"{country}: {ours[0]:,} refunds, {ours[1]:f} and not {theirs[0]:,} refunds, {theirs[1]:f}")
    return lines


def read_topic(url: str, topic: str, on_records: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the values of all committed records of a topic, and say after each fetch how many it had.

    Raises:
        NoAnswerError: the end of the topic was not reached and nothing came any more.
        KafkaException: the database cannot be read.
    """
    configuration = {
        "bootstrap.servers": url,
        "group.id": "refunds-control",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        # Nothing more is written: its end is said at once.
        "fetch.wait.max.ms": 0,
    }
    with Consumer(configuration) as consumer:
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        left = set(partitions)
        deadline = time.monotonic() + _SILENCE_SECONDS
        while left:
            messages = consumer.consume(_FETCHED, timeout=_FETCH_SECONDS)
            if messages:
                deadline = time.monotonic() + _SILENCE_SECONDS
            elif time.monotonic() > deadline:
                raise NoAnswerError(f"{topic}: its end was not reached, and nothing came for {_SILENCE_SECONDS:.0f} s")
            records = 0
            for message in messages:
                error = message.error()
                if error is None:
                    records += 1
                    yield message.value() or b""
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise KafkaException(error)
            on_records(records)
