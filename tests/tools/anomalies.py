"""What can be wrong with a history: one check for each kind of anomaly, under its name.

    assert find_anomalies(History.of(events)) == []

A check looks at a whole history and says what breaks its rule. The rules follow Jepsen's and Elle's definitions for
logs and transactions, worked out for one store: a poll is one snapshot, and a transaction flips at one instant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Final

from tests.tools.histories import Batch, Decision, History, Kind, Operation, Page, Poll, Transaction
from txnstore.transactions.protocol import EPOCH_EXHAUSTED


def reads(history: History) -> Iterator[tuple[Poll, Page, int, str]]:
    """Return every record that was read, with its poll, its page and its offset."""
    for poll in history.polls:
        for page in poll.pages:
            for offset, value in page.records:
                yield poll, page, offset, value


def final_reads(history: History, *, committed: bool) -> dict[tuple[str, str], int] | None:
    """Return what could be read when all was quiet, with offsets; None if nobody looked."""
    finals = [poll for poll in history.polls if poll.is_final and poll.is_committed == committed]
    if not finals:
        return None
    return {(page.partition, value): offset for poll in finals for page in poll.pages for offset, value in page.records}


def visible_offsets(history: History) -> dict[bool, dict[str, list[int]]]:
    """Return the offsets with records, ascending: False for all of them, True for committed ones."""
    visible: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
    for partition, values_at in history.log.items():
        visible[False][partition] = sorted(values_at)
        visible[True][partition] = sorted(
            offset
            for offset, values in values_at.items()
            if any(history.is_committed(partition, value) for value in values)
        )
    return visible


def offset_of(history: History, partition: str, value: str) -> int | None:
    """Return where the value stands, if anybody was told."""
    return min(history.offsets.get((partition, value), ()), default=None)


def where(poll: Poll, page: Page) -> str:
    """Return which poll, and where it began."""
    return f"{poll.operation.process} at {page.partition}@{page.from_offset}"


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


def _aborted_read(history: History) -> Iterator[str]:
    """A reader of committed records got one of a transaction that did not commit."""
    for poll, page, offset, value in reads(history):
        writer = history.writers.get((page.partition, value))
        if poll.is_committed and writer is not None and writer.decision is Decision.ABORTED:
            yield f"{where(poll, page)} returned {value}@{offset} of {writer.name}"


def _early_read(history: History) -> Iterator[str]:
    """A reader of committed records got one before its commit was asked for."""
    for poll, page, offset, value in reads(history):
        writer = history.writers.get((page.partition, value))
        if poll.is_committed and writer is not None and writer.commit_invoked_ns > poll.operation.completed_ns:
            yield f"{where(poll, page)} returned {value}@{offset} of {writer.name}"


def _lso_violation(history: History) -> Iterator[str]:
    """A reader of committed records got one behind a transaction that was still open."""
    ends = _committed_ends(history)
    for poll in history.polls:
        if not poll.is_committed:
            continue
        for page in poll.pages:
            offsets, latest_end = ends.get(page.partition, ((), ()))
            if not page.records or not offsets:
                continue
            before = bisect_left(offsets, page.records[-1][0]) - 1
            if before >= 0 and latest_end[before] > poll.operation.completed_ns:
                yield f"{where(poll, page)} returned {page.records[-1]} behind an open transaction"


def _boundary(history: History) -> Iterator[str]:
    """A record at the last stable offset, or behind it, was returned as committed; or a page goes past its bound."""
    for poll in history.polls:
        for page in poll.pages:
            bound = page.last_stable_offset if poll.is_committed else page.high_watermark
            beyond = [offset for offset, _ in page.records if offset >= bound]
            if beyond or page.next_offset > max(bound, page.from_offset):
                yield f"{where(poll, page)} returned {beyond} and went to {page.next_offset}, past {bound}"


def _bounds_order(history: History) -> Iterator[str]:
    """The last stable offset is above the high watermark, or one of them went back."""
    seen: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for poll in history.polls:
        for page in poll.pages:
            stable, high = page.last_stable_offset, page.high_watermark
            if stable > high:
                yield f"{where(poll, page)}: last stable offset {stable}, high watermark {high}"
            earlier = seen[page.partition]
            index = bisect_left(earlier, (float(poll.operation.invoked_ns), -1, -1)) - 1
            if index >= 0 and (earlier[index][1] > stable or earlier[index][2] > high):
                yield f"{where(poll, page)}: bounds {(stable, high)} after {earlier[index][1:]}"
            _note_bounds(earlier, poll.operation.completed_ns, stable, high)


def _note_bounds(earlier: list[tuple[float, int, int]], completed_ns: float, stable: int, high: int) -> None:
    """Keep the highest bounds that anybody had seen by each time."""
    index = bisect_left(earlier, (completed_ns, -1, -1))
    if index:
        stable, high = max(stable, earlier[index - 1][1]), max(high, earlier[index - 1][2])
    insort(earlier, (completed_ns, stable, high))
    for later in range(index + 1, len(earlier)):
        at, of_stable, of_high = earlier[later]
        earlier[later] = (at, max(stable, of_stable), max(high, of_high))


def _fractured_read(history: History) -> Iterator[str]:
    """One poll returned a part of a transaction, and not another part that it had come to."""
    for poll in history.polls:
        if not poll.is_committed:
            continue
        pages = {page.partition: page for page in poll.pages}
        returned = {(page.partition, value) for page in poll.pages for _, value in page.records}
        for transaction in _distinct(history.writers.get(record) for record in returned):
            if not transaction.is_atomic:
                continue
            for partition, value in transaction.records.keys() - returned:
                page, offset = pages.get(partition), offset_of(history, partition, value)
                if page is not None and offset is not None and _should_show(history, page, offset, transaction):
                    yield f"{where(poll, page)} returned a part of {transaction.name} without {value}@{offset}"


def _should_show(history: History, page: Page, offset: int, transaction: Transaction) -> bool:
    """Return whether the page came to the offset, or stopped because this very transaction seemed open."""
    if page.from_offset <= offset < page.next_offset:
        return True
    stopped_at_bound = page.next_offset == page.last_stable_offset <= offset and page.from_offset <= offset
    return stopped_at_bound and history.stands_at(page.partition, page.last_stable_offset) is transaction


def _stale_poll(history: History) -> Iterator[str]:
    """A poll did not see what had been acknowledged before it began."""
    appended = _acknowledged_offsets(history)
    for poll in history.polls:
        for page in poll.pages:
            offsets, times = appended.get(page.partition, ((), ()))
            behind = bisect_left(offsets, page.high_watermark)
            if behind < len(offsets) and times[behind] < poll.operation.invoked_ns:
                yield f"{where(poll, page)}: high watermark {page.high_watermark}, appended were {offsets[behind]}"
            is_held = page.last_stable_offset < page.high_watermark
            holder = history.stands_at(page.partition, page.last_stable_offset) if is_held else None
            if holder is not None and holder.ended_ns < poll.operation.invoked_ns:
                yield f"{where(poll, page)} held at {page.last_stable_offset} by {holder.name}, which is over"


def _unresolved(history: History) -> Iterator[str]:
    """In the end nobody knows how a transaction ended."""
    if not any(poll.is_final for poll in history.polls):
        return
    for transaction in history.transactions.values():
        if transaction.decision is None:
            yield transaction.name


def _decision_divergence(history: History) -> Iterator[str]:
    """Answers contradict each other, or what was read, on how a transaction ended."""
    read = {(page.partition, value) for poll, page, _, value in reads(history) if poll.is_committed}
    for transaction in history.transactions.values():
        answers = set(transaction.resolved)
        if any(end.kind is Kind.OK and end.details.get("commit", True) for end in transaction.ends):
            answers.add(Decision.COMMITTED)
        if not read.isdisjoint(transaction.records):
            answers.add(Decision.COMMITTED)
        if len(answers) > 1:
            yield f"{transaction.name} is said to be committed and aborted"


def _committed_ends(history: History) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Return the offsets of committed records, and when the last commit up to each of them was asked for."""
    ends: dict[str, dict[int, float]] = defaultdict(dict)
    for (partition, value), writer in history.writers.items():
        offset = offset_of(history, partition, value)
        if offset is not None and writer.decision is Decision.COMMITTED:
            ends[partition][offset] = writer.commit_invoked_ns
    return {
        partition: (sorted(of), list(accumulate((of[offset] for offset in sorted(of)), max)))
        for partition, of in ends.items()
    }


def _acknowledged_offsets(history: History) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
    """Return the offsets that were acknowledged, and when the first of those from each one on was."""
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for operation in history.of_function("append", "end"):
        if operation.kind is Kind.OK:
            for partition, base in operation.details.get("base_offsets", {}).items():
                last = base + len(operation.details["values"][partition]) - 1
                times[partition][last] = min(operation.completed_ns, times[partition].get(last, operation.completed_ns))
    found: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for partition, of in times.items():
        offsets = sorted(of)
        earliest = list(accumulate((of[offset] for offset in reversed(offsets)), min))
        found[partition] = (offsets, earliest[::-1])
    return found


def _distinct(transactions: Iterator[Transaction | None]) -> list[Transaction]:
    return list({id(transaction): transaction for transaction in transactions if transaction is not None}.values())


#: The checks by the name of what they find; part of `anomalies.CHECKS`.
ISOLATION_CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {
        "A1 aborted-read": _aborted_read,
        "A2 early-read": _early_read,
        "A5 lso-violation": _lso_violation,
        "A6 boundary": _boundary,
        "A7 bounds-order": _bounds_order,
        "A8 fractured-read": _fractured_read,
        "A11 stale-poll": _stale_poll,
        "V1 unresolved": _unresolved,
        "V1 decision-divergence": _decision_divergence,
    }
)


def _sequence_gap(history: History) -> Iterator[str]:
    """The sequence numbers of a producer in a partition are not 0, 1, 2, ..."""
    for partition, batches in history.batches().items():
        expected: dict[tuple[int, int], int] = defaultdict(int)
        for batch in batches:
            if batch.marker is not None or batch.producer_id < 0:
                continue
            producer = (batch.producer_id, batch.producer_epoch)
            if batch.base_sequence != expected[producer]:
                yield f"{partition}@{batch.base_offset}: {producer} at {batch.base_sequence}, not {expected[producer]}"
            expected[producer] = batch.base_sequence + batch.last_offset - batch.base_offset + 1


def _moved_by_retry(history: History) -> Iterator[str]:
    """A batch that was sent again got another offset."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for operation in history.of_function("append", "end"):
        if operation.kind is not Kind.OK:
            continue
        for partition, base_offset in operation.details.get("base_offsets", {}).items():
            value = operation.details["values"][partition][0]
            before = first.setdefault((partition, value), (base_offset, operation.process))
            if before[0] != base_offset:
                yield f"{value} in {partition}: {before[1]} was told {before[0]}, {operation.process} {base_offset}"


def _zombie_accepted(history: History) -> Iterator[str]:
    """Something of an older epoch took effect after a newer producer had been initialised."""
    newest: dict[str, list[Operation]] = defaultdict(list)
    for operation in history.of_function("init"):
        if operation.kind is Kind.OK:
            newest[operation.details["transactional_id"]].append(operation)
    for operation in history.of_function("append", "end"):
        for init in newest.get(operation.details.get("transactional_id") or "", ()):
            if init.completed_ns < operation.invoked_ns and operation.producer < init.producer:
                if operation.kind is Kind.OK:
                    yield f"{operation.process}: {operation.function} of {operation.producer} after {init.producer}"
                break


def _epoch_reused(history: History) -> Iterator[str]:
    """Two producers are the same one, or a later one is not newer."""
    last: dict[str, Operation] = {}
    given: dict[tuple[int, int], str] = {}
    for operation in _by_answer(history.of_function("init", "end")):
        transactional_id = operation.details["transactional_id"]
        if transactional_id is None:
            continue
        identity = _given_by(operation)
        # An end that is repeated has the same answer again, and that alone.
        is_end = operation.function == "end"
        source = f"the end of {operation.details['transaction']}" if is_end else f"the start of {operation.process}"
        if given.setdefault(identity, source) != source:
            yield f"{identity} was given by {given[identity]} and by {source}"
        if operation.function == "init":
            before = last.get(transactional_id)
            if before is not None and before.completed_ns < operation.invoked_ns and before.producer >= identity:
                yield f"{transactional_id}: {identity} follows {before.producer}"
            last[transactional_id] = operation


def _epoch_exhausted(history: History) -> Iterator[str]:
    """A number that is not an epoch, or a new producer id that does not begin at 0."""
    for operation in _by_answer(history.of_function("init", "end")):
        producer_id, epoch = _given_by(operation)
        if not 0 <= epoch <= EPOCH_EXHAUSTED:
            yield f"{operation.process} was given epoch {epoch}"
        if operation.function == "end" and producer_id != operation.producer[0] and epoch != 0:
            yield f"{operation.process}: {(producer_id, epoch)} follows {operation.producer}"


def _offset_gap(history: History) -> Iterator[str]:
    """An offset that belongs to no batch, or to two."""
    for partition, batches in history.batches().items():
        next_offset = 0
        for batch in batches:
            if batch.base_offset != next_offset:
                yield f"{partition}: a batch begins at {batch.base_offset}, not at {next_offset}"
            next_offset = batch.last_offset + 1


def _divided_decision(history: History) -> Iterator[str]:
    """A transaction has other markers in one partition than in another, or none in one."""
    markers: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for partition, batches in history.batches().items():
        open_: dict[int, tuple[int, int]] = {}
        for batch in batches:
            producer = (batch.producer_id, batch.producer_epoch)
            if batch.marker is None and batch.is_transactional:
                if open_.setdefault(batch.producer_id, producer) != producer:
                    yield f"{partition}@{batch.base_offset}: {producer} within {open_[batch.producer_id]}"
            elif batch.marker is not None and batch.producer_id in open_:
                markers[open_.pop(batch.producer_id)][partition] = batch.marker
        for producer in open_.values():
            markers[producer][partition] = "none"
    for producer, of in markers.items():
        if len(set(of.values())) > 1:
            yield f"{producer}: {of}"


def _marker_twice(history: History) -> Iterator[str]:
    """A marker that ends nothing follows another one of the same producer and epoch."""
    for partition, batches in history.batches().items():
        seen: set[tuple[int, int]] = set()
        for batch in batches:
            if batch.marker is not None:
                if _of(batch) in seen:
                    yield f"{partition}@{batch.base_offset}: {_of(batch)} {batch.marker}"
                seen.add(_of(batch))


def _by_answer(operations: list[Operation]) -> list[Operation]:
    """Return those that succeeded, in the order of their answers."""
    succeeded = [operation for operation in operations if operation.kind is Kind.OK]
    return sorted(succeeded, key=lambda operation: operation.completed_ns)


def _given_by(operation: Operation) -> tuple[int, int]:
    """Return who the producer is from now on."""
    producer_id, epoch = operation.details.get("next_producer", operation.details["producer"])
    return producer_id, epoch


def _of(batch: Batch) -> tuple[int, int]:
    return batch.producer_id, batch.producer_epoch


#: The checks by the name of what they find; part of `anomalies.CHECKS`.
PRODUCER_CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {
        "I1 sequence-gap": _sequence_gap,
        "I2 moved-by-retry": _moved_by_retry,
        "F1 zombie-accepted": _zombie_accepted,
        "F2 epoch-reused": _epoch_reused,
        "F3 epoch-exhausted": _epoch_exhausted,
        "G3 offset-gap": _offset_gap,
        "G6 divided-decision": _divided_decision,
        "G6 marker-twice": _marker_twice,
    }
)


#: Every check by the name of what it finds.
CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {**LOG_CHECKS, **ISOLATION_CHECKS, **PRODUCER_CHECKS}
)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One thing that is wrong."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def find_anomalies(history: History) -> list[Anomaly]:
    """Return everything that is wrong with the history, by the order of `CHECKS`."""
    return [Anomaly(name, detail) for name, check in CHECKS.items() for detail in check(history)]
