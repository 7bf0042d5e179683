"""What a reader in commit order gets of one partition: a model in memory, and histories for it and for a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import strategies as st

from tests.log.histories import Log
from txnstore.log.commit_order import CommitPosition
from txnstore.model import ControlType

PRODUCERS: Final = st.sampled_from("ABC")
#: Steps of a history, see `take`.
STEPS: Final = st.one_of(
    st.tuples(st.just("plain"), st.integers(1, 3)),
    st.tuples(st.just("write"), PRODUCERS, st.integers(1, 3)),
    st.tuples(st.just("write"), PRODUCERS, st.integers(1, 3)),
    st.tuples(st.just("end"), PRODUCERS, st.sampled_from([True, True, True, False])),
)
#: What comes of `write_figure`, in commit order.
FIGURE: Final = [b"N1", b"X2 a", b"X2 b", b"N2", b"X1 a", b"X1 b", b"N3"]


def write_figure(log: Log) -> None:
    """Write what the proposal for transactions in Kafka has a figure of: X2 commits before X1."""
    log.write("A", b"X1 a")
    log.write("B", b"X2 a")
    log.plain(b"N1")
    log.write("A", b"X1 b")
    log.write("B", b"X2 b")
    log.commit("B")
    log.plain(b"N2")
    log.commit("A")
    log.plain(b"N3")


@dataclass
class Delivered:
    """A record as it should come: what is behind it is `behind`."""

    offset: int
    value: bytes
    place: int
    behind: CommitPosition


@dataclass
class Model:
    """One partition in memory."""

    end_offset: int = 0
    log_start: int = 0
    open: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    delivered: list[Delivered] = field(default_factory=list)

    def append(self, count: int) -> list[tuple[int, bytes]]:
        values = self.values(count)
        self.end_offset += count
        return values

    def values(self, count: int) -> list[tuple[int, bytes]]:
        """Return the next offsets with the values that are written there."""
        return [(offset, b"%d" % offset) for offset in range(self.end_offset, self.end_offset + count)]

    def plain(self, count: int) -> None:
        for offset, value in self.append(count):
            self.delivered.append(Delivered(offset, value, offset, CommitPosition(offset + 1)))

    def write(self, producer: str, count: int) -> None:
        self.open.setdefault(producer, []).extend(self.append(count))

    def end(self, producer: str, *, commit: bool) -> None:
        place = self.end_offset
        self.end_offset += 1
        for offset, value in self.open.pop(producer, []) if commit else []:
            self.delivered.append(Delivered(offset, value, place, CommitPosition(place, offset + 1)))
        self.open.pop(producer, None)

    def delete_before(self, offset: int) -> None:
        """Move the log start; what is open goes on, but never comes."""
        self.log_start = offset
        firsts: dict[int, int] = {}
        for one in self.delivered:
            firsts.setdefault(one.place, one.offset)
        self.delivered = [one for one in self.delivered if firsts[one.place] >= offset and one.place >= offset]
        self.open = {name: records for name, records in self.open.items() if records[0][0] >= offset}


def take(log: Log, model: Model, step: tuple[Any, ...]) -> None:
    """Take one step of a history, in the log and in the model."""
    match step:
        case "plain", count:
            log.plain(*(value for _, value in model.values(count)))
            model.plain(count)
        case "write", producer, count:
            log.write(producer, *(value for _, value in model.values(count)))
            model.write(producer, count)
        case "end", producer, commit:
            log.end(producer, ControlType.COMMIT if commit else ControlType.ABORT)
            model.end(producer, commit=commit)
        case _:
            raise AssertionError(step)
