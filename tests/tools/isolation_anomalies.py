"""This file is what can be wrong with transactions in a history: seen in part, too early, too late, or undecided."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from tests.tools.histories import Decision, History, Kind, Page, Transaction
from tests.tools.history_views import offset_of, reads, where


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
