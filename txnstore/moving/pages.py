"""Pages: all rows of a table in the order of its key, as many at a time as memory has room for.

A table is read while nobody can write to it, so pages that are read one by one are of one state, however long it takes
and however often the reader is started again; no snapshot is held open meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, literal, select, tuple_

from txnstore.db.sqlite.any_text import any_text
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest
from txnstore.moving.tables import CopiedTable

#: How many rows are in memory at once, and about how many bytes of them: at least one row.
PAGE_ROWS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_INT32_END: Final = 2**31

Key = tuple[Any, ...]


def pages(store: Store, copied: CopiedTable, after: Key | None = None) -> Iterator[Sequence[Row[Any]]]:
    """Return the rows after the one with the key `after`, or all of them."""
    is_last = False
    while not is_last:
        rows, is_last = store.read(lambda connection: _page(connection, copied, after))  # noqa: B023 - called at once
        if rows:
            yield rows
            after = key_of(copied, rows[-1])


def key_of(copied: CopiedTable, row: Any) -> Key:
    """Return the key of a row."""
    return tuple(getattr(row, column.name) for column in copied.key)


def check_values(copied: CopiedTable, rows: Sequence[Row[Any]], *, into_sqlite: bool) -> None:
    """Refuse what the other database cannot hold: SQLite keeps any bytes as text, and has one type of integers.

    Raises:
        InvalidRequest: a text is not Unicode; or, where it is not to go `into_sqlite`, has a NUL in it, or a number is
            too large for its column.
    """
    for row in rows:
        for name in copied.texts:
            text = getattr(row, name)
            if text is not None and not (_is_unicode(text) and (into_sqlite or "\0" not in text)):
                raise _no_place(copied, row, name, "text")
        for name in () if into_sqlite else copied.short_integers:
            number = getattr(row, name)
            if number is not None and not -_INT32_END <= number < _INT32_END:
                raise _no_place(copied, row, name, "a number")


def _no_place(copied: CopiedTable, row: Row[Any], name: str, what: str) -> InvalidRequest:
    key = ", ".join(f"{column.name} {getattr(row, column.name)!r}" for column in copied.key)
    return InvalidRequest(
        f"column {name} of table {copied.name} (row {key}) holds {what} that the other database cannot store:"
        " open the store again with `txnstore copy --cancel`, and correct it"
    )


def _page(connection: Connection, copied: CopiedTable, after: Key | None) -> tuple[Sequence[Row[Any]], bool]:
    """Return the rows of a page, and whether it is the last one."""
    place = tuple_(*copied.key)
    behind = [] if after is None else [place > _values(copied, after)]
    statement = select(*copied.columns).where(*behind).order_by(*copied.key).execution_options(binary_rows=True)
    with any_text(connection):
        if copied.size_bytes is None:
            rows = connection.execute(statement.limit(PAGE_ROWS_MAX)).all()
            return rows, len(rows) < PAGE_ROWS_MAX
        sizes = select(*copied.key, copied.size_bytes.label("size_of_row")).where(*behind).order_by(*copied.key)
        listed = connection.execute(sizes.limit(PAGE_ROWS_MAX)).all()
        count = _count_that_fit(row.size_of_row for row in listed)
        if count == 0:
            return (), True
        last = _values(copied, key_of(copied, listed[count - 1]))
        return connection.execute(statement.where(place <= last)).all(), count == len(listed) < PAGE_ROWS_MAX


def _count_that_fit(sizes_bytes: Iterable[int]) -> int:
    """Return how many rows make a page: one that is larger than a page is one by itself."""
    count = total_bytes = 0
    for size_bytes in sizes_bytes:
        total_bytes += size_bytes
        if count and total_bytes > PAGE_BYTES_MAX:
            break
        count += 1
    return count


def _values(copied: CopiedTable, key: Key) -> Any:
    return tuple_(*(literal(value, column.type) for value, column in zip(key, copied.key, strict=True)))


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
