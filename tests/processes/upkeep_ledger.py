"""What processes note of their doings, outside of the database, and what has to follow from it in the end.

Each life of a process has a file of JSON lines that is only ever appended to: what it is about to write comes before
the call, what it was told after it.  Every value is written once, as `WRITER#LIFE/PRODUCER:NUMBER`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

#: Where a record lies: topic, partition, offset.
Position = tuple[str, int, int]

#: How many of a kind of violations are shown.
SHOWN_MAX: Final = 10
#: What a writer may be told of a transaction that it asked to commit; without a word from it nothing was asked for.
COMMITTED, UNKNOWN, REFUSED, ABORTED = "committed", "unknown", "refused", "aborted"


class Ledger:
    """The file of one life."""

    def __init__(self, folder: Path, process: str) -> None:
        self._path = folder / f"{process}.ledger"
        self._file: int | None = None

    def note(self, what: str, **details: object) -> None:
        """Add a line; when it returns, the line outlives this process."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._file, (json.dumps({"at": round(time.time(), 3), "what": what, **details}) + "\n").encode())


def read_ledgers(folder: Path, name: str = "*") -> Iterator[dict[str, Any]]:
    """Yield the lines of all lives of a process, or of all processes, life by life in order."""
    for path in sorted(folder.glob(f"{name}#*.ledger"), key=_name_and_life):
        # The last line may be cut where its writer was killed: it had not come to its call then.
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def _name_and_life(path: Path) -> tuple[str, int]:
    name, life = path.stem.rsplit("#", 1)
    return name, int(life)


@dataclass
class Transaction:
    """What is known of one transaction; of a producer without any, of all that it wrote."""

    values: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Where each value was sent to: topic and partition."""

    ended: str = ABORTED


@dataclass
class Account:
    """All that was noted, put together."""

    transactions: dict[str, Transaction] = field(default_factory=lambda: defaultdict(Transaction))
    plain: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What producers without transactions have sent, and where to."""

    delivered: set[str] = field(default_factory=set)
    """Which of it they were told to be there."""

    seen: dict[Position, tuple[str, int]] = field(default_factory=dict)
    """What was ever read as committed: value and timestamp."""

    doomed: set[str] = field(default_factory=set)
    """Topics that were deleted, or are about to be."""

    duties: Counter[str] = field(default_factory=Counter)
    """How much the maintenance did, by duty."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Account:
        """Put together what all processes have noted."""
        account = cls()
        for line in read_ledgers(folder):
            account.take(line)
        return account

    def take(self, line: Mapping[str, Any]) -> None:
        """Take up one line."""
        what = line["what"]
        if what == "send":
            sent = {value: (topic, partition) for topic, partition, values in line["to"] for value in values}
            name = line.get("transaction")
            (self.plain if name is None else self.transactions[name].values).update(sent)
        elif what in {"committing", COMMITTED, REFUSED, UNKNOWN}:
            self.transactions[line["transaction"]].ended = UNKNOWN if what == "committing" else what
        elif what == "seen":
            for topic, partition, offset, value, timestamp_ms in line["records"]:
                self.see((topic, partition, offset), value, timestamp_ms)
        elif what == "did":
            self.duties[line["duty"]] += line["count"]
        self.delivered.update(line["values"] if what == "delivered" else ())
        self.doomed.update([line["topic"]] if what == "doomed" else ())
        self.violations += [line["text"]] if what == "violation" else ()
        self.counts[what] += line.get("count", 1)

    def see(self, position: Position, value: str, timestamp_ms: int) -> None:
        """Take up a record that a reader of committed records has got."""
        known = self.seen.setdefault(position, (value, timestamp_ms))
        if known[0] != value:
            self.violations.append(f"{position} was {known[0]!r} to one reader and {value!r} to another")

    def check(self, *, outputs: str, source: str, producer_expiry_ms: int) -> dict[str, int]:
        """Add what is wrong to the violations; return how much was looked at.

        `outputs` is the topic that holds the records of `source` again, each under the key of where it was; for
        `producer_expiry_ms` a partition recognises a repeated batch.
        """
        places: dict[str, list[tuple[Position, int]]] = defaultdict(list)
        for position, (value, timestamp_ms) in self.seen.items():
            if position[0] != outputs:
                places[value].append((position, timestamp_ms))
        found = {
            "lost": list(self._lost(places)),
            "not to be seen": list(self._unwanted(places)),
            "half there": list(self._half_there(places)),
            "out of place": list(self._out_of_place(places)),
        }
        repeated = 0
        twice = found["twice"] = []
        for value, copies in places.items():
            if len(copies) == 1:
                continue
            if value in self.plain and _is_each_later(copies, producer_expiry_ms):
                # KIP-854: what is repeated after its producer was forgotten is taken for something new.
                repeated += 1
                continue
            twice.append(f"{value} {copies}")
        found["out of order"] = list(self._out_of_order(outputs))
        found["not transformed once"] = list(self._badly_transformed(source, outputs))
        for kind, texts in found.items():
            self.violations += [f"{kind}: {text}" for text in texts[:SHOWN_MAX]]
            if len(texts) > SHOWN_MAX:
                self.violations.append(f"{kind}: {len(texts)} in all")
        return {
            **{
                f"transactions {ended}": count
                for ended, count in Counter(each.ended for each in self.transactions.values()).items()
            },
            "records checked": len(self.seen),
            "plain records": len(self.plain),
            "repeated after expiry, as documented": repeated,
        }

    def _is_gone(self, value: str, to: Mapping[str, tuple[str, int]]) -> bool:
        return to[value][0] in self.doomed

    def _lost(self, places: Mapping[str, Any]) -> Iterator[str]:
        for name, transaction in self.transactions.items():
            if transaction.ended == COMMITTED:
                lost = [
                    f"{value} of {transaction.values[value]}"
                    for value in transaction.values
                    if value not in places and not self._is_gone(value, transaction.values)
                ]
                if lost:
                    yield f"of the committed transaction {name} nobody sees {lost} (of {len(transaction.values)})"
        for value in self.delivered:
            if value not in places:
                yield f"{value} was delivered to {self.plain[value]}"

    def _unwanted(self, places: Mapping[str, Any]) -> Iterator[str]:
        known = set(self.plain)
        for name, transaction in self.transactions.items():
            known.update(transaction.values)
            if transaction.ended in {ABORTED, REFUSED}:
                for value in transaction.values:
                    if value in places:
                        yield f"{value} of {name}, which is {transaction.ended}: {places[value]}"
        for value in places.keys() - known:
            yield f"nobody has written {value!r}: {places[value]}"

    def _half_there(self, places: Mapping[str, Any]) -> Iterator[str]:
        for name, transaction in self.transactions.items():
            if transaction.ended == UNKNOWN:
                stays = [value for value in transaction.values if not self._is_gone(value, transaction.values)]
                there = [value for value in stays if value in places]
                if there and len(there) < len(stays):
                    yield f"{name}: {len(there)} of {len(stays)} values, {there} and not {set(stays) - set(there)}"

    def _out_of_place(self, places: Mapping[str, list[tuple[Position, int]]]) -> Iterator[str]:
        sent = dict(self.plain)
        for transaction in self.transactions.values():
            sent |= transaction.values
        for value, copies in places.items():
            for (topic, partition, offset), _ in copies:
                if value in sent and sent[value] != (topic, partition):
                    yield f"{value} was sent to {sent[value]} and lies at {(topic, partition, offset)}"

    def _out_of_order(self, outputs: str) -> Iterator[str]:
        last: dict[tuple[str, int, str], tuple[int, int]] = {}
        for (topic, partition, offset), (value, _) in sorted(self.seen.items()):
            if topic == outputs:
                continue
            writer, _, number = value.rpartition(":")
            before = last.get((topic, partition, writer))
            if before is not None and int(number) < before[0] and value not in self.plain:
                yield f"{value} at {topic}/{partition}/{offset} comes after number {before[0]} at {before[1]}"
            last[topic, partition, writer] = (int(number), offset)

    def _badly_transformed(self, source: str, outputs: str) -> Iterator[str]:
        inputs = {position[1:]: value for position, (value, _) in self.seen.items() if position[0] == source}
        came_out: dict[tuple[int, int], list[Position]] = defaultdict(list)
        newest: dict[int, int] = {}
        for position, (text, _) in sorted(self.seen.items()):
            if position[0] != outputs:
                continue
            key, _, value = text.partition("=")
            partition, offset = map(int, key.split("/"))
            came_out[partition, offset].append(position)
            if inputs.get((partition, offset)) != value:
                yield f"{value} came out at {position}, {inputs.get((partition, offset))} was at {key}"
            if offset <= newest.get(partition, -1):
                yield f"{key} came out at {position}, behind {newest[partition]}"
            newest[partition] = offset
        for origin, positions in came_out.items():
            if len(positions) > 1:
                yield f"{origin} came out {len(positions)} times, at {positions}"
        for origin in sorted(inputs.keys() - came_out.keys()):
            yield f"{origin} ({inputs[origin]}) did not come out"


def _is_each_later(copies: Iterable[tuple[Position, int]], expiry_ms: int) -> bool:
    times = sorted(timestamp_ms for _, timestamp_ms in copies)
    return all(later - earlier >= expiry_ms for earlier, later in pairwise(times))
