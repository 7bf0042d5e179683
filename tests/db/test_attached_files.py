"""Which files of an SQLite connection are committed at once."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from txnstore.db.callers.attached_files import check_one_commit
from txnstore.errors import InvalidRequest

pytestmark = pytest.mark.parametrize("main_mode", ["wal", "delete", "truncate", "persist", "off", "memory"])


def connect(folder, main_mode, other_mode):
    connection = sqlite3.connect(folder / "main.db", isolation_level=None)
    connection.execute(f"ATTACH '{folder / 'other.db'}' AS other")
    for name, mode in (("main", main_mode), ("other", other_mode)):
        assert connection.execute(f"PRAGMA {name}.journal_mode = {mode}").fetchone() == (mode,)
        connection.execute(f"CREATE TABLE {name}.orders (item)")
    return contextlib.closing(connection)


@pytest.mark.parametrize("other_mode", ["wal", "delete", "truncate", "persist", "off", "memory"])
def test_only_with_a_journal_that_they_share(tmp_path, main_mode, other_mode):
    with connect(tmp_path, main_mode, other_mode) as connection:
        if {main_mode, other_mode} <= {"delete", "truncate", "persist"}:
            check_one_commit(connection.execute)
        else:
            with pytest.raises(InvalidRequest, match="another file attached"):
                check_one_commit(connection.execute)


@pytest.mark.parametrize("name", ["main", "other"])
def test_not_if_one_of_them_waits_for_no_disk(tmp_path, main_mode, name):
    with connect(tmp_path, main_mode, "delete") as connection:
        connection.execute(f"PRAGMA {name}.synchronous = OFF")
        with pytest.raises(InvalidRequest, match="another file attached"):
            check_one_commit(connection.execute)
