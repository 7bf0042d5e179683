"""The program as such: its version, its help, its exit codes, and errors as one line."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from txnstore.cli import main
from txnstore.cli.program import NAMES, _named, program_with
from txnstore.errors import InvalidUrl, OutcomeUnknown, StoreUnavailable

SECRET = "Hunter2SecretWord"
PROGRAM = "from txnstore.cli import main; main()"


@pytest.mark.slow
def test_python_runs_the_package_as_the_program():
    command = [sys.executable, "-m", "txnstore", "no such command"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Usage: txnstore" in ended.stderr


@pytest.mark.parametrize("command", [[], ["verify"], ["topics"], ["topics", "list"]])
def test_help_has_a_short_name(command):
    shown = [CliRunner().invoke(program_with(NAMES), [*command, option]) for option in ("-h", "--help")]
    assert [ended.exit_code for ended in shown] == [0, 0]
    assert shown[0].output == shown[1].output
    assert "Usage: " in shown[0].output


def in_shell(text, url, **environment):
    """Run a line of the shell in which $TXN is the program."""
    variables = {**os.environ, "TXN": f"{sys.executable} -m txnstore", "TXNSTORE_URL": url, **environment}
    return subprocess.run(
        ["/bin/sh", "-c", text], capture_output=True, text=True, check=False, timeout=300, env=variables
    )


NO_OUTPUT = "txnstore: the output cannot be written: Bad file descriptor\n"


@pytest.mark.slow
def test_a_closed_output_takes_no_records_and_what_is_said_beside_them_goes_nowhere(txnstore_sqlite_url):
    ended = in_shell("$TXN topics create orders >&-", txnstore_sqlite_url)
    assert (ended.returncode, ended.stderr) == (1, NO_OUTPUT)
    ended = in_shell("echo a | $TXN produce orders >&- 2>&- && $TXN consume orders 2>&-", txnstore_sqlite_url)
    assert (ended.returncode, ended.stdout) == (0, "a\n")
    ended = in_shell("$TXN consume orders --group billing >&-", txnstore_sqlite_url)
    assert (ended.returncode, ended.stderr) == (1, NO_OUTPUT)
    # It has committed nothing that nobody got.
    assert in_shell("$TXN consume orders --group billing", txnstore_sqlite_url).stdout == "a\n"
    ended = in_shell("$TXN topics list <&- >&-", txnstore_sqlite_url)
    assert (ended.returncode, ended.stderr) == (1, NO_OUTPUT)
    ended = in_shell("$TXN produce orders <&-", txnstore_sqlite_url)
    assert (ended.returncode, ended.stderr) == (1, "txnstore: standard input is closed\n")
    assert in_shell("$TXN consume orders", txnstore_sqlite_url).stdout == "a\n"


@pytest.mark.slow
def test_what_the_encoding_of_the_output_lacks_is_shown_by_its_number(txnstore_sqlite_url):
    in_shell("$TXN topics create orders", txnstore_sqlite_url)
    line = "echo 'k\u00e9' | $TXN produce orders -t '\u00e9' && $TXN transactions list && $TXN timeline orders"
    line += " && $TXN consume orders"
    ended = in_shell(line, txnstore_sqlite_url, PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert ended.returncode == 0, ended
    # Records are bytes.
    assert ended.stdout.splitlines()[-1] == "k\u00e9"
    assert ended.stdout.count(r"\xe9") == 2


def test_a_program_that_makes_a_call_itself_writes_after_it_as_before(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="replace"))
    with pytest.raises(SystemExit):
        main(["--version"])
    sys.stdout.write("\xe9\n")
    sys.stdout.flush()
    assert written.getvalue().endswith(b"\n?\n")


def test_the_version_is_that_of_the_package(txnstore, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2.3 of {name}")
    assert txnstore("--version") == (0, "txnstore 1.2.3 of txnstore\n", "")


def test_a_folder_that_is_not_installed_has_no_version(txnstore, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert txnstore("--version").out == "txnstore from a folder that is not installed\n"


def test_the_package_installs_the_program():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"txnstore": "txnstore.cli:main"}


@pytest.mark.parametrize("arguments", [["--help"], ["migrate", "--help"], ["maintain", "--help"]])
def test_every_command_explains_itself(txnstore, arguments):
    ended = txnstore(*arguments)
    assert ended.code == 0
    assert "Usage: txnstore" in ended.out


def test_the_help_of_the_program_is_the_same_before_its_commands_are_imported(txnstore, monkeypatch):
    """What a command is for stands in `program.py`, too."""
    shown = txnstore("--help").out
    monkeypatch.setenv("_TXNSTORE_COMPLETE", "")
    assert _named([]) == NAMES
    whole = CliRunner().invoke(program_with(NAMES), ["--help"], prog_name="txnstore")
    assert (whole.output, whole.exit_code) == (shown, 0)
    assert all(name in shown for name in NAMES)


@pytest.mark.slow
def test_help_imports_no_command_and_no_database():
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {PROGRAM}"
    answer = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    imported = set(answer.stdout.split())
    needless = {"alembic", "asyncio", "psycopg", "sqlalchemy", "txnstore.clients.admin", "txnstore.db"}
    assert imported & (needless | {f"txnstore.cli.{name}" for name in NAMES}) == set()
    assert "txnstore.cli.program" in imported


@pytest.mark.slow
def test_a_call_imports_the_command_that_it_names_and_no_other(tmp_path):
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {PROGRAM}"
    call = ["info", "--url", f"sqlite:///{tmp_path}/nothing.db"]
    answer = subprocess.run([sys.executable, "-c", program, *call], capture_output=True, text=True, check=False)
    imported = set(answer.stdout.split())
    assert answer.returncode == 1
    needless = {"alembic", "psycopg", "txnstore.cli.relay", "txnstore.cli.topics", "txnstore.cli.timeline"}
    assert imported & needless == set()
    assert "txnstore.cli.information" in imported


#: What the help of the program is made up with; all other brackets are to be read.
STYLES = {"[bold]", "[/bold]", "[dim]", "[/dim]"}


def help_texts(command, path=()):
    """Yield every text of a command's help with the command that it belongs to, and those of the commands in it."""
    options = [getattr(parameter, "help", None) for parameter in command.params]
    for text in (command.help, command.short_help, command.epilog, *options):
        yield path, text or ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from help_texts(inner, (*path, name))


@pytest.mark.slow
def test_no_help_loses_what_stands_in_brackets(txnstore):
    eaten = []
    for path, text in help_texts(typer.main.get_command(program_with(NAMES))):
        brackets = [found for found in re.findall(r"\[[^\[\]]*\]", text) if found not in STYLES]
        plain = Text.from_markup(text).plain
        eaten += [(path, found) for found in brackets if found not in plain]
    assert eaten == []
    assert "txnstore[kafka]" in txnstore("relay", "--help").out.replace("\n", " ")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "arguments",
    [
        ["[bold]x[/red]"],
        ["consume", "--offset", "[bold]x[/red]", "t"],
        ["transactions", "list", "--state", "[bold]x[/red]"],
        ["topics", "describe", "[bold]x[/red]"],
        ["topics", "create", "t", "--config", "[bold]x[/red]=1"],
        ["migrate", "sqlite:///no/[bold]x[/red]"],
    ],
)
def test_no_error_loses_what_stands_in_brackets(txnstore, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("TXNSTORE_URL", f"sqlite:///{tmp_path}/store.db")
    txnstore("migrate")
    ended = txnstore(*arguments)
    assert ended.code != 0
    assert "[bold]x[/red]" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["migrate"], ["no-such-command"], ["migrate", "--no-such-option", "sqlite://"], ["migrate", "a", "b"]],
)
def test_a_wrong_call_ends_with_2_and_how_it_is_called(txnstore, arguments, monkeypatch):
    monkeypatch.delenv("TXNSTORE_URL", raising=False)
    ended = txnstore(*arguments)
    assert ended.code == 2
    assert "Usage: txnstore" in ended.out + ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("command", ["migrate", "maintain"])
@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        f"postgresql:/alice:{SECRET}@host/shop",
        f"mysql://alice:{SECRET}@host/shop",
        f"postgresql://alice:{SECRET}@host",
        "sqlite:////no/such/folder/store.db",
    ],
)
def test_an_error_is_one_line_and_code_1(txnstore, command, url):
    ended = txnstore(command, url)
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err.startswith("txnstore: ")
    assert ended.err.count("\n") == 1
    assert SECRET not in ended.err


@pytest.mark.parametrize(("error", "code"), [(StoreUnavailable, 75), (OutcomeUnknown, 75), (InvalidUrl, 1)])
def test_an_error_that_may_pass_has_a_code_of_its_own(txnstore, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("txnstore.cli.databases.connect_store", fail)
    assert txnstore("migrate", "sqlite:///none.db").code == code


def test_whatever_characters_an_error_holds_it_stays_one_plain_line(txnstore, monkeypatch):
    def fail(*_, **__):
        raise InvalidUrl("two\nlines\r\x1b[31m and [bold]marks[/bold] " + "long " * 100)

    monkeypatch.setattr("txnstore.cli.databases.connect_store", fail)
    ended = txnstore("migrate", "sqlite:///none.db")
    assert ended.err.count("\n") == 1
    assert "\x1b" not in ended.err
    assert "[bold]marks[/bold]" in ended.err


@pytest.mark.slow
def test_an_error_of_the_program_itself_shows_no_variables(start):
    # What is raised here is a bug as far as the program can tell.
    bug = "import txnstore.cli.databases as database; database.connect_store = 7; "
    process = start("migrate", f"postgresql://alice:{SECRET}@host/shop", before=bug)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "TypeError" in err
    assert SECRET not in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "list"],
        ["topics", "list", "--json"],
        ["info"],
        ["doctor"],
        ["verify", "--json"],
        ["consume", "orders", "--group", "billing"],
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_one_line_and_code_1(
    txnstore, start, txnstore_sqlite_url, monkeypatch, arguments, unbuffered
):
    """On one database: it is not asked."""
    monkeypatch.setenv("TXNSTORE_URL", txnstore_sqlite_url)
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    txnstore("topics", "create", "orders")
    txnstore("produce", "orders", stdin=b"3 apples\n")
    process = start(*arguments, before="import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); ")
    _, err = process.communicate(timeout=300)
    assert err.splitlines()[-1] == "txnstore: the output cannot be written: No space left on device"
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert process.returncode == 1
    # What a group was not shown it has not read.
    assert txnstore("consume", "orders", "--group", "billing").out == "3 apples\n"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_reads_no_further_is_told_nothing(start, txnstore_sqlite_url, monkeypatch, unbuffered):
    """On one database: it is not asked."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    gone = "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
    process = start("topics", "list", "--json", "--url", txnstore_sqlite_url, before=gone)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, "")
