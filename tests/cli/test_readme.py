"""The READMEs' sessions at a terminal: the commands print what is printed there."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest

from tests.copies import copy_file
from tests.tools.program_forks import LIBRARIES, forks
from tests.tools.readmes import TOP, block_of
from txnstore import Producer
from txnstore.db.identity import check_original
from txnstore.db.opening import open_store

MINUTE_MS = 60_000


@pytest.fixture(scope="module")
def program():
    """The command that starts the program, which imports all of the package anew each time."""
    with forks(LIBRARIES) as forked:
        yield f"{forked} -m txnstore"


@pytest.fixture
def terminal(tmp_path, program):
    """A folder, and what runs a script there, in a shell that finds the program, and returns all that it prints."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("txnstore", program), ("python", shlex.quote(sys.executable))):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TXNSTORE_")}
    environment |= {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(TOP),
    }
    folder = tmp_path / "work"
    folder.mkdir()

    def run(script):
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        return done.stdout

    return folder, run


def without_times_and_trailing_spaces(text):
    return re.sub(r"\b1\d{12}\b|[ ]+$", "", text, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_session_prints_what_stands_there(terminal):
    folder, run = terminal
    (folder / "import.py").write_text(block_of(__file__, "A session").text)
    session = block_of(__file__, "A session", "console").text
    commands = re.findall(r"^\$ (.*)$", session, re.MULTILINE)
    printed = run("\n".join(f"printf '%s\\n' {_quoted(f'$ {command}')}\n{command}" for command in commands))
    assert without_times_and_trailing_spaces(printed) == without_times_and_trailing_spaces(session)


@pytest.mark.slow
def test_the_operations_chapter_prints_what_stands_there(terminal):
    folder, run = terminal
    (folder / "import.py").write_text(block_of(__file__, "When readers stand still").text)
    session = block_of(__file__, "When readers stand still", "console").text
    commands = re.findall(r"^\$ (.*)$", session, re.MULTILINE)
    printed = run("\n".join(f"printf '%s\\n' {_quoted(f'$ {command}')}\n{command}" for command in commands))
    assert f"importer ({socket.gethostname()}, process " in printed
    assert without_processes(printed) == without_processes(session)
    left = run(f"{commands[0]}\npython import.py\ntxnstore transactions list-open --json")
    # Whoever reads on for some minutes still has something to free.
    assert [row["timeout_ms"] for row in json.loads(left)] == [15 * MINUTE_MS]


def without_processes(text):
    """Return a text without ages, hosts and processes, and the widths of columns that they come to."""
    text = re.sub(r"\(\S+, process \d+\)", "(HOST, process NUMBER)", re.sub(r"\b[\d.]+ (ms|s|min)\b", "AGE", text))
    return re.sub(" +", " ", text)


def test_the_view_of_the_operations_chapter_shows_what_the_command_does(url, answer, sql_program):
    statement = block_of(__file__, "When readers stand still", "sql").text
    if not url.startswith("sqlite"):
        (of_postgresql,) = re.findall("PostgreSQL: (.*)", statement)
        statement = re.sub("FROM .*", f"FROM {of_postgresql}", statement)
    with Producer({"bootstrap.servers": url, "transactional.id": "import"}) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce("orders", b"a")
        assert producer.flush(60) == 0
        (row,) = answer("transactions", "list-open")
        printed = re.sub(r"^orders,0,\d+,", "", sql_program(url, statement)).strip()
    wanted = (row["client_id"], row["client_host"], str(row["client_process_id"]), "NULL", "NULL", row["freed_by"])
    assert printed.replace('"', "") == ",".join(wanted)


@pytest.mark.slow
def test_a_store_moves_as_it_stands_there(terminal):
    folder, run = terminal
    session = block_of(__file__, "A store moves", "console").text
    commands = re.findall(r"^\$ (.*)$", session, re.MULTILINE)
    printed = run("\n".join(f"printf '%s\\n' {_quoted(f'$ {command}')}\n{command}" for command in commands))
    printed = printed.replace(str(folder), "/home/ann")
    # Where the machine takes its time something of the maintenance is due before the store moves.
    printed = re.sub(r"^maintenance_duties .*\n", "", printed, flags=re.MULTILINE)
    assert without_digests(printed) == without_digests(session)


@pytest.mark.slow
def test_a_topic_is_archived_and_loaded_as_it_stands_there(terminal):
    _, run = terminal
    session = block_of(__file__, "Archives", "console").text
    commands = re.findall(r"^\$ (.*)$", session, re.MULTILINE)
    printed = run("\n".join(f"printf '%s\\n' {_quoted(f'$ {command}')}\n{command}" for command in commands))
    assert printed == session


def without_digests(text):
    """Leave out what is another one in each store."""
    return re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{32}\b", "", text)


def _quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def test_a_copy_says_what_it_is(txnstore, txnstore_sqlite_url, tmp_path):
    with open_store(txnstore_sqlite_url) as original:
        check_original(original)
    commands = block_of(__file__, "Restoring and copying", "sh").commands
    assert len(commands) == 2
    for number, (program, *arguments) in enumerate(commands):
        assert program == "txnstore"
        copy = f"sqlite:///{tmp_path / f'copy{number}.db'}"
        copy_file(txnstore_sqlite_url, copy)
        assert txnstore(*(copy if argument == "URL" else argument for argument in arguments)).code == 0
        with open_store(copy) as adopted:
            assert (adopted.store_uuid == original.store_uuid) == ("--same" in arguments)
