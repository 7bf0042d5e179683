"""What every command of the program does alike: where its database comes from, how it fails, how Ctrl-C ends it."""

from __future__ import annotations

import sqlite3

import pytest
import typer

from tests.tools.silent_port import silent_port
from txnstore.cli import output
from txnstore.cli.program import NAMES, program_with
from txnstore.clients.model.errors import KafkaError, KafkaException

SECRET = "Hunter2SecretWord"


def test_the_url_comes_from_the_nearest_place(txnstore, txnstore_sqlite_url, monkeypatch):
    assert txnstore("topics", "create", "orders", "--url", txnstore_sqlite_url).code == 0
    monkeypatch.setenv("TXNSTORE_URL", "nonsense")
    assert "orders" in txnstore("--url", txnstore_sqlite_url, "topics", "list").out
    assert "orders" in txnstore("--url", "worse", "topics", "list", "--url", txnstore_sqlite_url).out
    assert txnstore("topics", "list").code == 1
    monkeypatch.setenv("TXNSTORE_URL", txnstore_sqlite_url)
    assert "orders" in txnstore("topics", "list").out
    assert txnstore("topics", "list", "--url", "").code == 1  # an empty one is a mistake, not none


@pytest.mark.parametrize("command", [["topics", "list"], ["info"], ["migrate"], ["maintain"]])
def test_without_a_url_the_call_is_wrong(txnstore, command, monkeypatch):
    monkeypatch.delenv("TXNSTORE_URL", raising=False)
    ended = txnstore(*command)
    assert ended.code == 2
    assert "TXNSTORE_URL" in ended.err


def test_migrate_takes_the_url_as_an_option_and_not_twice(txnstore, txnstore_sqlite_url):
    assert txnstore("migrate", "--url", txnstore_sqlite_url).code == 0
    assert txnstore("--url", txnstore_sqlite_url, "migrate").code == 0
    assert txnstore("maintain", "--url", txnstore_sqlite_url, "--once").code == 0
    assert txnstore("migrate", txnstore_sqlite_url, "--url", txnstore_sqlite_url).code == 2


def test_a_command_makes_no_tables(txnstore, txnstore_empty_url, tmp_path):
    for command in (["topics", "list"], ["topics", "create", "orders"], ["info"]):
        ended = txnstore(*command, "--url", txnstore_empty_url)
        assert ended.code == 1
        assert "run `txnstore migrate`" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        f"postgresql:/alice:{SECRET}@host/shop",
        f"mysql://alice:{SECRET}@host/shop",
        f"postgresql://alice:{SECRET}@host",
        f"postgresql://alice:{SECRET}@@host/shop",
        f"postgresql://alice:{SECRET}@host/shop?pasword={SECRET}",
        "sqlite:////no/such/folder/store.db",
    ],
)
def test_an_error_is_one_line_without_the_password(txnstore, url):
    for command in (["topics", "list"], ["info"]):
        ended = txnstore(*command, "--url", url)
        assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
        assert SECRET not in ended.err


def test_a_server_that_is_not_there_may_be_there_later(txnstore, monkeypatch):
    from txnstore.cli import options

    monkeypatch.setattr(options, "_RETRY_TIMEOUT_MS", 100)
    with silent_port() as port:
        ended = txnstore("topics", "list", "--url", f"postgresql://alice:{SECRET}@127.0.0.1:{port}/shop")
    assert ended.code == 75
    assert SECRET not in ended.err


def test_a_file_that_is_no_database_is_refused(txnstore, tmp_path):
    (tmp_path / "text.db").write_text("no database " * 1000)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE txnstore_topics (id INTEGER)")
    other.close()
    for name in ("text.db", "other.db"):
        ended = txnstore("topics", "list", "--url", f"sqlite:///{tmp_path / name}")
        assert (ended.code, ended.err.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KafkaException(KafkaError(KafkaError._TIMED_OUT, "too\nlate")), 75),
        (KafkaException(KafkaError(KafkaError._FAIL, "later", retriable=True)), 75),
        (KafkaException(KafkaError(KafkaError.INVALID_REQUEST, "never")), 1),
        (KafkaException("odd"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_code_says_what_kind_of_end_it_was(txnstore, txnstore_sqlite_url, monkeypatch, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr("txnstore.cli.topics.list_topic_rows", fail)
    ended = txnstore("topics", "list", "--url", txnstore_sqlite_url)
    assert ended.code == code
    assert "Traceback" not in ended.err
    assert ended.err.count("\n") == (0 if code == 130 else 1)


def test_cells_are_aligned_by_what_a_terminal_shows(capsys):
    rows: list[output.Row] = [{"name": "日本", "count": 1}, {"name": "a\x1b[31m\nb", "count": None}]
    output.show_rows(rows, (output.Column("name", "NAME"), output.Column("count", "COUNT")), as_json=False)
    assert capsys.readouterr().out.splitlines() == ["NAME      COUNT", "日本          1", "a [31m b      -"]


def test_json_holds_nothing_that_a_terminal_obeys(capsys):
    output.show_json({"name": "日\x9b31m\x1b\u202e"})
    text = capsys.readouterr().out
    assert "日" in text
    assert text.isascii() is False
    assert not {"\x9b", "\x1b", "\u202e"} & set(text)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(None, "-"), (-1, "-"), (0, "1970-01-01T00:00:00.000Z"), (2**63 - 1, "9223372036854775807")],
)
def test_times_are_in_utc(milliseconds, text):
    assert output.time_text(milliseconds) == text


def test_sizes_and_durations_have_units():
    assert [output.size_text(size) for size in (None, 5, 2048, 2**40)] == ["-", "5 B", "2.0 KiB", "1.0 TiB"]
    lengths = (None, 5, 1500, 90_000, 7_200_000, 172_800_000)
    assert [output.duration_text(length) for length in lengths] == ["-", "5 ms", "1.5 s", "1.5 min", "2 h", "2 d"]


@pytest.mark.slow
def test_every_command_has_help_with_examples(txnstore):
    def commands(command, path):
        if not hasattr(command, "commands"):
            yield path
            return
        for name, below in command.commands.items():
            yield from commands(below, [*path, name])

    found = list(commands(typer.main.get_command(program_with(NAMES)), []))
    assert len(found) >= 24
    for path in found:
        ended = txnstore(*path, "--help")
        assert ended.code == 0
        assert f"txnstore {' '.join(path)}" in ended.out
        assert "Examples" in ended.out
        assert "$ txnstore" in ended.out
        # A copy has two, in their order.
        assert "--url" in ended.out or path == ["copy"]
