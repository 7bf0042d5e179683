"""The check of what the members of a group noted that get transactions whole (`group_ordering`), against the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from tests.processes.ordering import LAST, name_of
from tests.processes.ordering_checks import Notes, Partition, check_order

#: How long `Consumer.close` goes on at most: it waits for its commits no longer.
CLOSE_NS = 10 * 10**9


@dataclass
class Stretch:
    """What a member gets from one change of its assignment to the next."""

    halves: set[str] = field(default_factory=set)
    """Of what was half behind its beginnings that which came last there: it may come before its turn."""

    firsts: set[str] = field(default_factory=set)
    """Of these that which came last in any case and goes on at once: it has to come first."""

    scattered: set[str] = field(default_factory=set)
    """Of these that which does not go on at once wherever it goes on: it may come in several pieces."""

    records: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass
class Life:
    """What a life of a member has had."""

    reached: dict[int, int] = field(default_factory=dict)
    """Of each of its partitions how many records are behind it."""

    committed: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    """Of each partition what had been committed for certain when it asked where to begin: until it notes the answer it
    may lose the partition to another one that commits more."""

    given: dict[int, int] = field(default_factory=dict)
    """Of each partition that it gave back how many records were to be committed by then."""

    was_refused: bool = False
    now_ns: int = 0
    leaves_at_ns: int = 0
    stretch: Stretch = field(default_factory=Stretch)


class GroupCheck:
    """What the members of one group have got and committed, over all their lives."""

    def __init__(self, partitions: Sequence[Partition], written: Notes) -> None:
        """Check against the log, and what its writers noted."""
        self.facts: Counter[str] = Counter()
        self._partitions = partitions
        self._names = [[name_of(value) for _, value in partition.records] for partition in partitions]
        self._transactions = {name for partition in partitions for name in partition.markers}
        self._written = written
        #: Of each partition what has been committed for certain, and what may have been.
        self._committed = [0] * len(partitions)
        self._asked = [{0} for _ in partitions]

    def check(self, lives: Iterable[Notes], committed: Any) -> None:
        """Each goes on where the last commit says, until all is committed; all notes are of one clock."""
        steps: dict[str, Callable[..., None]] = {
            "asks for": self._asks_for,
            "is given": self._is_given,
            "got": self._got,
            "commits": self._commits,
            "has committed": self._has_committed,
            "gives": self._gives,
            "loses": self._loses,
            "leaves": self._leaves,
            "left": self._left,
        }
        states = [(Life(), notes) for notes in lives]
        for life, (at_ns, what, *facts) in sorted(
            ((life, note) for life, notes in states for note in notes), key=lambda each: each[1][0]
        ):
            life.now_ns = at_ns
            steps[what](life, *facts)
        for life, _ in states:
            self._end_stretch(life)
        everything = [len(partition.records) for partition in self._partitions]
        assert list(self._indices(committed).values()) == everything

    # --- the notes

    def _asks_for(self, life: Life, numbers: list[int]) -> None:
        life.known |= {number: self._committed[number] for number in numbers}

    def _is_given(self, life: Life, numbers: list[int], positions: Any) -> None:
        starts = dict.fromkeys(numbers, 0) | self._indices(positions)
        for number, index in starts.items():
            assert number not in life.reached
            assert index >= life.known[number], f"{number} goes on at {index}, below what was committed"
            assert index in self._asked[number], f"{number} goes on at {index}, which nobody has committed"
            self._committed[number] = max(self._committed[number], index)
        life.committed |= starts
        self._change(life, life.reached | starts)
        self.facts["given"] += bool(numbers)

    def _got(self, life: Life, records: Any, is_whole: bool) -> None:
        for number, offset, value in records:
            assert number in life.reached, f"{value} came from {number}, which it does not have"
            assert self._partitions[number].records[life.reached[number]] == (offset, value)
            life.reached[number] += 1
        life.stretch.records += records
        if is_whole:
            (name,) = {name_of(value) for _, _, value in records}
            self.facts["whole"] += name in self._transactions and len({number for number, _, _ in records}) > 1
            if name in self._transactions and name not in life.stretch.scattered:
                left = [number for number, index in life.reached.items() if name in self._names[number][index:]]
                assert not left, f"{name} came as a whole without its part of {left}"

    def _commits(self, life: Life, positions: Any) -> None:
        for number, index in self._indices(positions).items():
            assert index == life.reached[number]
            self._asked[number].add(index)

    def _has_committed(self, life: Life, positions: Any) -> None:
        if positions is None:
            life.was_refused = True
            return
        for number, index in self._indices(positions).items():
            self._committed[number] = max(self._committed[number], index)
            life.committed[number] = index

    def _gives(self, life: Life, numbers: list[int], is_automatic: bool) -> None:
        for number in numbers:
            if is_automatic:
                life.given[number] = life.reached[number]
        self._change(life, {number: index for number, index in life.reached.items() if number not in numbers})

    def _loses(self, life: Life, numbers: list[int]) -> None:
        self._change(life, {number: index for number, index in life.reached.items() if number not in numbers})
        self.facts["lost"] += 1

    def _leaves(self, life: Life) -> None:
        life.leaves_at_ns = life.now_ns

    def _left(self, life: Life) -> None:
        """Whatever was to be committed by itself has been, when partitions were given back at the latest."""
        if life.was_refused or life.now_ns - life.leaves_at_ns >= CLOSE_NS:
            return
        for number, index in life.given.items():
            assert life.committed[number] >= index, f"{number} was given back at {index}, which is not committed"

    # --- the stretches

    def _change(self, life: Life, reached: dict[int, int]) -> None:
        """Let a stretch end, and another one begin behind so many records."""
        self._end_stretch(life)
        life.reached = reached
        behind = [self._names[number][:index] for number, index in reached.items()]
        ahead = [self._names[number][index:] for number, index in reached.items()]
        shared = set(chain(*behind)) & set(chain(*ahead)) & self._transactions
        last = {names[-1] for names in behind if names}
        last_ended = {next((name for name in reversed(names) if name in self._transactions), "") for names in behind}
        heads = {names[0] for names in ahead if names}
        halves = shared & last_ended
        scattered = {name for name in halves if any(name in names and name != names[0] for names in ahead)}
        life.stretch = Stretch(halves, halves & last & heads, scattered)

    def _end_stretch(self, life: Life) -> None:
        stretch = life.stretch
        names = [name for name, _ in groupby(name_of(value) for _, _, value in stretch.records if value != LAST)]
        runs = Counter(name for name in names if name in self._transactions and name not in stretch.scattered)
        assert all(number == 1 for number in runs.values()), runs.most_common(1)
        firsts = list(dict.fromkeys(names))[: len(stretch.firsts)]
        assert stretch.halves.issuperset(firsts), f"{firsts} came before {stretch.firsts}, which had begun"
        self.facts["gone on with"] += len(stretch.firsts.intersection(firsts))
        in_turn = [record for record in stretch.records if name_of(record[2]) not in stretch.halves]
        self.facts["reads"] += check_order([[[0, "begins", []], [0, "got", in_turn]]], self._written)

    def _indices(self, positions: Any) -> dict[int, int]:
        return {number: self._partitions[number].index(place, within) for number, place, within in positions}
