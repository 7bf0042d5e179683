"""The checks of what writers and readers in commit order noted (`ordering`), against the log itself."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any

from sqlalchemy import Connection

from tests.processes.ordering import LAST, name_of
from txnstore.db.schema import record_batches
from txnstore.log.codec import decode
from txnstore.model import ControlType

Notes = Sequence[Sequence[Any]]


@dataclass
class Partition:
    """What a reader in commit order has to get of one partition."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    """Of each record the place, and within a transaction its own offset: what is below a position is behind it."""

    records: list[tuple[int, str]] = field(default_factory=list)
    markers: dict[str, int] = field(default_factory=dict)
    """Where the transactions of these names were committed."""

    def index(self, place: int, within: int) -> int:
        """Return how many records are behind a position."""
        return bisect_left(self.keys, (place, within))


def in_order_of_markers(connection: Connection, partition_id: int) -> Partition:
    """Return what the batches and markers of the log say."""
    found = Partition()
    held: dict[int, list[tuple[int, str]]] = {}
    batches = record_batches.select().where(record_batches.c.partition_id == partition_id)
    for row in connection.execute(batches.order_by(record_batches.c.last_offset)):
        if row.control_type is not None:
            ended = held.pop(row.producer_id)
            if row.control_type == ControlType.COMMIT:
                found.records += ended
                found.keys += [(row.last_offset, offset) for offset, _ in ended]
                found.markers[name_of(ended[0][1])] = row.last_offset
            continue
        records = [(record.offset, (record.value or b"").decode()) for record in decode(row).records()]
        if row.is_transactional:
            held.setdefault(row.producer_id, []).extend(records)
        else:
            found.records += records
            found.keys += [(offset, 0) for offset, _ in records]
    assert not held
    return found


def check_writers(partitions: Sequence[Partition], notes: Notes) -> Counter[str]:
    """Whatever was acknowledged is there, what was not asked for is not, and all of it or nothing."""
    there: dict[str, dict[int, list[str]]] = {}
    for number, partition in enumerate(partitions):
        for _, value in partition.records:
            if value != LAST:
                there.setdefault(name_of(value), {}).setdefault(number, []).append(value)
    asked = {
        note[2]: {int(number): values for number, values in note[3].items()} for note in notes if note[1] == "asks"
    }
    committed = {note[2] for note in notes if note[1] == "committed"}
    begun = {note[2] for note in notes if note[1] == "begins"}
    for name, values in there.items():
        assert values == asked.get(name), name
    assert committed <= there.keys()
    return Counter(committed=len(there), unknown=len(asked.keys() - committed), aborted=len(begun - asked.keys()))


class ReaderCheck:
    """What one reader has got and committed, over its lives."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self.again = 0
        """How many records came once more, because a life had ended before it committed them."""
        self._partitions = partitions
        self._reached = [0] * len(partitions)
        #: Of each partition what may be committed: also with the commit in which a life has ended.
        self._committed = [{0} for _ in partitions]
        self._asked: dict[int, int] = {}

    def check(self, lives: Iterable[Notes]) -> None:
        """Each life goes on where the last commit says, and gets what comes next, up to the end."""
        steps: dict[str, Callable[..., None]] = {
            "begins": self._begins,
            "got": self._got,
            "commits": self._commits,
            "has committed": self._has_committed,
        }
        for life in lives:
            for _, what, *facts in life:
                steps[what](*facts)
        assert self._reached == [len(partition.records) for partition in self._partitions]

    def _begins(self, positions: Any) -> None:
        start = dict.fromkeys(range(len(self._partitions)), 0) | self._indices(positions)
        for number, index in start.items():
            assert index in self._committed[number], (number, index)
            self.again += self._reached[number] - index
            self._reached[number] = index
            self._committed[number] = {index}

    def _got(self, records: Any) -> None:
        for number, offset, value in records:
            assert self._partitions[number].records[self._reached[number]] == (offset, value)
            self._reached[number] += 1

    def _commits(self, positions: Any) -> None:
        self._asked = self._indices(positions)
        for number, index in self._asked.items():
            assert index == self._reached[number]
            self._committed[number].add(index)

    def _has_committed(self) -> None:
        for number, index in self._asked.items():
            self._committed[number] = {index}

    def _indices(self, positions: Any) -> dict[int, int]:
        return {number: self._partitions[number].index(place, within) for number, place, within in positions}


def check_order(lives: Iterable[Notes], notes: Notes) -> int:
    """All comes in one strict order, transactions whole: behind what they have read, or what was acknowledged before.

    Returns how often one had read another one.
    """
    asked = {note[2]: note[0] for note in notes if note[1] == "asks"}
    acknowledged = {note[2]: note[0] for note in notes if note[1] == "committed"}
    reads = [(note[2], other) for note in notes if note[1] == "reads" for other in note[3]]
    transactions = {note[2] for note in notes if note[1] == "begins"}
    count = 0
    for names in _orders(lives):
        runs = Counter(name for name in names if name in transactions)
        assert all(number == 1 for number in runs.values()), runs.most_common(1)
        first_acknowledged, which = inf, ""
        for name in reversed(names):
            assert asked[name] <= first_acknowledged, f"{name} comes before {which}"
            if acknowledged.get(name, inf) < first_acknowledged:
                first_acknowledged, which = acknowledged[name], name
        at = {name: index for index, name in enumerate(names)}
        for name, other in reads:
            if name in at and other in at:
                assert at[other] < at[name], f"{name} has read {other} and comes before it"
                count += other in transactions
    return count


def _orders(lives: Iterable[Notes]) -> list[list[str]]:
    """Return the order in which each reader has got something, and that in which it has come for the first time."""
    seen: list[list[str]] = []
    for _, what, *facts in (note for life in lives for note in life):
        if what == "begins":
            seen.append([])
        elif what == "got":
            seen[-1] += [name_of(value) for _, _, value in facts[0] if value != LAST]
    # Whoever begins goes on behind the last commit: what came again is in its order, and so is all of it.
    firsts = list(dict.fromkeys(name for names in seen for name in names))
    return [*([name for name, _ in groupby(names)] for names in seen), firsts]


def check_cuts(partitions: Sequence[Partition], looks: Notes, acknowledged: Mapping[str, int]) -> int:
    """What was seen at the ends is of one snapshot: of each transaction all or nothing, and all that had committed."""
    if not looks:
        return 0
    (_, _, starts), *looks = looks
    counts = [partitions[number].index(place, 0) for number, place in starts]
    began: list[int] = []
    ends: list[list[int]] = [[] for _ in partitions]
    for _, _, began_ns, got, places in looks:
        for number, offset, value in got:
            assert partitions[number].records[counts[number]] == (offset, value)
            counts[number] += 1
        if places is not None:
            began.append(began_ns)
            for number, place in places:
                assert counts[number] == partitions[number].index(place, 0)
                ends[number].append(place)
    firsts: dict[str, set[int]] = {}
    for number, partition in enumerate(partitions):
        for name, marker_offset in partition.markers.items():
            firsts.setdefault(name, set()).add(bisect_right(ends[number], marker_offset))
    for name, indices in firsts.items():
        assert len(indices) == 1, f"{name} appears in cuts {indices}"
        if name in acknowledged:
            assert indices.pop() <= bisect_left(began, acknowledged[name]), f"{name} appears late"
    return len(began)
