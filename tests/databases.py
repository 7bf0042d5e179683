"""The choice of databases for tests that need not run on each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

#: For what does not depend on the database: refusals that never reach it, plans of Spark. In front of tests with `url`,
#: `store`, or whatever else takes a fresh store.
on_sqlite_alone = pytest.mark.parametrize("txnstore_url", ["sqlite"], indirect=True)


def on_sqlite_and_some_on_postgresql(
    name: str, values: Iterable[Any], some: Collection[Any], words: Callable[[Any], str] = str
) -> pytest.MarkDecorator:
    """Return what runs a test with all values on SQLite, and with some of them on PostgreSQL as well.

    For steps of which each is a database transaction of its own, as those of a transaction over several databases are:
    one comes after the other, whichever database it is, and that each does the same on both is shown for each.
    """
    parameters = [
        pytest.param(database, value, id=f"{database}-{words(value)}")
        for database in ("sqlite", "postgresql")
        for value in values
        if database == "sqlite" or value in some
    ]
    return pytest.mark.parametrize(("txnstore_url", name), parameters, indirect=["txnstore_url"])


def where_it_writes(name: str) -> pytest.MarkDecorator:
    """Return what tells a test whether it writes to several databases, which is seen on SQLite alone."""
    return on_sqlite_and_some_on_postgresql(
        name, [False, True], [False], lambda several: "over several databases" if several else "in one database"
    )


#: For groups whose members are processes. Each database and each assignor, and not each with each: what is assigned to
#: whom is worked out by the members, whatever database they tell it.
an_assignor_on_each_database = pytest.mark.parametrize(
    ("txnstore_url", "assignor"),
    [
        pytest.param("sqlite", "range", id="sqlite-range"),
        pytest.param("postgresql", "cooperative-sticky", id="postgresql-cooperative-sticky"),
    ],
    indirect=["txnstore_url"],
)
