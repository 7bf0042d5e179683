"""What the tests of the command line share: the program, in this process and as one of its own."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from txnstore import cli

PROGRAM = "from txnstore.cli import main; main()"


class Ended(NamedTuple):
    """What a run of the program came to."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once():
    """Typer builds all commands anew at each call, which takes longer than most of them; a process calls it once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        get_command = functools.cache(typer.main.get_command)
        for name in ("typer.main.get_command", "typer.testing._get_command"):
            monkeypatch.setattr(name, get_command)
        yield


@pytest.fixture
def txnstore(capsys, monkeypatch):
    """Run the program in this process, with these bytes on its standard input."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def run(txnstore, url, monkeypatch):
    """Run the program on a fresh store, on each database."""
    monkeypatch.setenv("TXNSTORE_URL", url)
    return txnstore


@pytest.fixture
def done(run):
    """Run the program, which succeeds, and return what it printed."""

    def done(*arguments, stdin=b""):
        ended = run(*arguments, stdin=stdin)
        assert ended.code == 0, ended
        return ended.out

    return done


@pytest.fixture
def answer(done):
    """Run the program with --json, which succeeds, and return what it answered."""
    return lambda *arguments: json.loads(done(*arguments, "--json"))


@pytest.fixture
def start():
    """Start the program as a process, which is ended after the test."""
    processes = []

    def start(*arguments, before=""):
        command = [sys.executable, "-c", before + PROGRAM, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
