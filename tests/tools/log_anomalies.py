"""This file is what can be wrong with the log in a history: lost, twice, torn, skipped, out of order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from tests.tools.histories import Decision, History, Kind, Transaction
from tests.tools.history_views import final_reads, offset_of, reads, visible_offsets, where


def _inconsistent_offsets(history: History) -> Iterator[str]:
    """One offset, two values."""
    for partition, values_at in history.log.items():
        for offset, values in values_at.items():
            if len(values) > 1:
                yield f"{partition}@{offset} holds {sorted(values)}"


def _duplicate(history: History) -> Iterator[str]:
    """One value at two offsets."""
    for (partition, value), offsets in history.offsets.items():
        if len(offsets) > 1:
            yield f"{value} stands in {partition} at {sorted(offsets)}"


def _garbage_read(history: History) -> Iterator[str]:
    """A value that nobody ever tried to write there."""
    for poll, page, offset, value in reads(history):
        if (page.partition, value) not in history.writers:
            yield f"{poll.operation.process} read {value!r} in {page.partition}@{offset}"


def _lost_write(history: History) -> Iterator[str]:
    """Acknowledged and committed, others behind it were read, and it never was."""
    last_read: dict[str, int] = {}
    read = set()
    for poll, page, offset, value in reads(history):
        if poll.is_committed:
            last_read[page.partition] = max(last_read.get(page.partition, 0), offset)
            read.add((page.partition, value))
    for (partition, value), writer in history.writers.items():
        acknowledged = writer.records[partition, value] is Kind.OK and writer.decision is Decision.COMMITTED
        stands_at = offset_of(history, partition, value)
        if not acknowledged or stands_at is None or (partition, value) in read:
            continue
        if stands_at <= last_read.get(partition, -1):
            yield f"{value} in {partition}@{stands_at}"


def _torn_transaction(history: History) -> Iterator[str]:
    """In the end a part of a committed transaction is missing, or a part of an aborted one is there."""
    final = final_reads(history, committed=True)
    if final is None:
        return
    for transaction in history.transactions.values():
        there = [record for record in transaction.records if record in final]
        missing = [record for record, kind in transaction.records.items() if kind is Kind.OK and record not in final]
        if there and (missing or transaction.decision is Decision.ABORTED):
            yield f"{transaction.name}: {there} can be read, {missing} cannot; it {_said(transaction)}"


def _unseen(history: History) -> Iterator[str]:
    """Acknowledged and committed, and not there in the end."""
    final = final_reads(history, committed=True)
    if final is None:
        return
    for transaction in history.transactions.values():
        if transaction.decision is Decision.COMMITTED:
            for (partition, value), kind in transaction.records.items():
                if kind is Kind.OK and (partition, value) not in final:
                    yield f"{value} in {partition}"


def _skip_within_poll(history: History) -> Iterator[str]:
    """A poll went past a record that it should have returned, or returned records out of order."""
    visible = visible_offsets(history)
    for poll in history.polls:
        for page in poll.pages:
            returned = [offset for offset, _ in page.records]
            if any(left >= right for left, right in pairwise(returned)):
                yield f"{where(poll, page)} returned offsets {returned}"
            known = visible[poll.is_committed].get(page.partition, [])
            covered = known[bisect_left(known, page.from_offset) : bisect_left(known, page.next_offset)]
            skipped = sorted(set(covered).difference(returned))
            if skipped:
                yield f"{where(poll, page)} went to {page.next_offset} without {skipped}"


def _skip_between_polls(history: History) -> Iterator[str]:
    """A reader left a record out between two polls, or got one again."""
    visible = visible_offsets(history)
    position: dict[tuple[str, str], int] = {}
    for poll in history.polls:
        for page in poll.pages:
            at = (poll.operation.process, page.partition)
            came_from = position.get(at)
            position[at] = page.next_offset
            if came_from is None or came_from == page.from_offset:
                continue
            known = visible[poll.is_committed].get(page.partition, [])
            low, high = sorted((came_from, page.from_offset))
            between = known[bisect_left(known, low) : bisect_left(known, high)]
            if between:
                what = "again" if page.from_offset < came_from else "never"
                yield f"{where(poll, page)} came from {came_from} and reads {between} {what}"


def _nonmonotonic_send(history: History) -> Iterator[str]:
    """The records of one writer stand in another order than it wrote them in."""
    last: dict[tuple[str, str], tuple[int, str]] = {}
    seen: set[tuple[str, str]] = set()
    for operation in history.of_function("append", "end"):
        for partition, values in operation.details.get("values", {}).items():
            # What is sent again stays where it was.
            new = [value for value in values if (partition, value) not in seen]
            seen.update((partition, value) for value in new)
            for value in new:
                offset = offset_of(history, partition, value)
                if offset is None:
                    continue
                before = last.get((operation.writer, partition), (-1, ""))
                if before[0] > offset:
                    yield f"{operation.writer}: {value} stands in {partition}@{offset}, before {before[1]}"
                last[operation.writer, partition] = max(before, (offset, value))


def _order_differs(history: History) -> Iterator[str]:
    """What readers of committed records get in the end is not a part of what the others get, in the same order."""
    committed, everything = final_reads(history, committed=True), final_reads(history, committed=False)
    if committed is None or everything is None:
        return
    for record, offset in committed.items():
        if everything.get(record) != offset:
            yield f"{record} is at {offset} for the one, at {everything.get(record)} for the other"


def _said(transaction: Transaction) -> str:
    return "is unresolved" if transaction.decision is None else f"is {transaction.decision.value}"


#: The checks by the name of what they find; part of `anomalies.CHECKS`.
LOG_CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {
        "L1 inconsistent-offsets": _inconsistent_offsets,
        "L2 duplicate": _duplicate,
        "L3 garbage-read": _garbage_read,
        "L4 lost-write": _lost_write,
        "L5 torn-transaction": _torn_transaction,
        "L6 unseen": _unseen,
        "L7 skip-within-poll": _skip_within_poll,
        "L8 skip-between-polls": _skip_between_polls,
        "L9 nonmonotonic-send": _nonmonotonic_send,
        "A10 order-differs": _order_differs,
    }
)
