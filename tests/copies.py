"""Copies of databases, as people make them: dumps that are restored elsewhere, and files by SQLite's backup."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing

import pytest

from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import NoServerProgramsError, find_programs


def restore_dump(url, target_url):
    """Copy a PostgreSQL database as people do: a dump, restored elsewhere."""
    try:
        programs = find_programs() / "bin"
    except NoServerProgramsError as error:
        pytest.skip(f"needs the program pg_dump: {error}")
    command = [str(programs / "pg_dump"), "--format=custom", "--no-owner", "-d", connection_string(url)]
    dump = subprocess.run(command, capture_output=True, check=True, timeout=300).stdout
    command = [str(programs / "pg_restore"), "--no-owner", "-d", connection_string(target_url)]
    subprocess.run(command, input=dump, capture_output=True, check=True, timeout=300)


def copy_schema(url, schema, copy):
    """Copy a schema within its PostgreSQL database under another name, which stands nowhere in its data."""
    try:
        programs = find_programs() / "bin"
    except NoServerProgramsError as error:
        pytest.skip(f"needs the program pg_dump: {error}")
    command = [str(programs / "pg_dump"), "--no-owner", f"--schema={schema}", "-d", connection_string(url)]
    dump = subprocess.run(command, capture_output=True, check=True, timeout=300, text=True).stdout
    command = [str(programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-d", connection_string(url)]
    subprocess.run(
        command, input=dump.replace(schema, copy), stdout=subprocess.DEVNULL, check=True, timeout=300, text=True
    )


def copy_file(url, target_url):
    """Copy an SQLite file by its backup API: it may be in use."""
    path, target_path = (each.removeprefix("sqlite:///") for each in (url, target_url))
    with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(target_path)) as copy:
        original.backup(copy)
