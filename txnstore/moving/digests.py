"""Digests: what two databases have to agree on, table by table and partition by partition.

The digest of some rows is the sum of the digests of each, so it does not depend on the order in which a database
returns them; and it is made of the values, not of how a database keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row, select

from txnstore.db.schema import stores
from txnstore.db.store import Store
from txnstore.errors import PermissionDenied
from txnstore.moving.pages import pages
from txnstore.moving.tables import COPIED, STORE_COLUMNS, CopiedTable

_BYTES: Final = 16
_MODULUS: Final = 2 ** (8 * _BYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """What is counted together: a table, or the rows of one partition in it."""

    table: str
    partition_id: int | None = None

    def __str__(self) -> str:
        """Return what people are told."""
        return self.table if self.partition_id is None else f"{self.table} of partition {self.partition_id}"


@dataclass(frozen=True, slots=True)
class Digest:
    """How many rows there are, and what they hold."""

    row_count: int
    sum_: int

    def __str__(self) -> str:
        """Return both."""
        return f"{self.row_count} rows, {self.sum_:0{2 * _BYTES}x}"

    def __add__(self, other: Digest) -> Digest:
        """Return the digest of both together."""
        return Digest(self.row_count + other.row_count, (self.sum_ + other.sum_) % _MODULUS)


NOTHING: Final = Digest(0, 0)


def digest_of(store: Store, *, told: Callable[[int], None] | None = None) -> dict[Part, Digest]:
    """Return the digests of everything in the store; `told` hears of the number of rows as they are read."""
    digests: dict[Part, Digest] = {}
    for copied in COPIED:
        has_partitions = "partition_id" in copied.table.c
        for rows in pages(store, copied):
            for row in rows:
                part = Part(copied.name, row.partition_id if has_partitions else None)
                digests[part] = digests.get(part, NOTHING) + Digest(1, row_digest(row))
            if told is not None:
                told(len(rows))
    of_store = store.read(lambda connection: connection.execute(select(*STORE_COLUMNS)).one())
    digests[Part(str(stores.name))] = Digest(1, row_digest(of_store))
    for copied in COPIED:
        if copied.own_key is not None:
            digests[part_of_next_key(copied)] = Digest(1, next_key(store, copied))
    return digests


def differences(left: Mapping[Part, Digest], right: Mapping[Part, Digest]) -> Iterator[str]:
    """Return where two stores differ, in words: what is in the first, and what in the second."""
    for part in dict.fromkeys([*left, *right]):
        of_left, of_right = left.get(part, NOTHING), right.get(part, NOTHING)
        if of_left != of_right:
            yield f"{part}: {of_left}; and there {of_right}"


def by_table(digests: Mapping[Part, Digest]) -> dict[str, Digest]:
    """Return the digests of whole tables."""
    tables = {copied.name: NOTHING for copied in COPIED}
    for part, digest in digests.items():
        if part.table in tables:
            tables[part.table] += digest
    return tables


def part_of_next_key(copied: CopiedTable) -> Part:
    """Return what the key that a table gives out next is counted as."""
    return Part(f"the next {copied.own_key}")


def next_key(store: Store, copied: CopiedTable) -> int:
    """Return the key that a table with keys of its own gives out next."""
    name = copied.own_key
    assert name is not None
    key = store.read(lambda connection: store.backend.next_key(connection, store.schema, copied.name, name))
    if key is None:
        raise PermissionDenied(
            f"this role may not read which {name} {store.url} gives out next: it owns no tables there"
        )
    return key


def row_digest(values: Row[Any] | Iterable[Any]) -> int:
    """Return a number for the values of a row; the same for the same ones, in whichever database."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for value in values:
        if value is None:
            digest.update(b"-")
            continue
        # A flag is not the number that it equals, and text is not the bytes of its UTF-8.
        kind = b"b" if isinstance(value, bool | bytes) else b"t"
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        digest.update(b"%c%d:" % (kind, len(raw)))
        digest.update(raw)
    return int.from_bytes(digest.digest(), "big")
