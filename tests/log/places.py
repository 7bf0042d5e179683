"""What a reader in commit order gets of one partition: a model in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from txnstore.log.commit_order import CommitPosition


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
