"""`txnstore produce` and `txnstore consume`: what goes in comes out, in one transaction if wanted."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from txnstore.cli import produce as produce_command
from txnstore.cli.options import parse_time
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.producer.producer import CLOSE_TIMEOUT_SECONDS, Producer
from txnstore.clients.producer.progress import TransactionProgress
from txnstore.clients.producer.state import TransactionCall
from txnstore.db.opening import open_store
from txnstore.db.store import server_now_ms
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator


@pytest.fixture
def lines(done):
    """What `consume` prints, as lines; sorted, for partitions come in any order."""
    return lambda *arguments: sorted(done("consume", "orders", *arguments).splitlines())


@pytest.mark.slow
def test_lines_become_records(run, done, lines):
    done("topics", "create", "orders")
    ended = run("produce", "orders", stdin=b"one\n\n two \nlast")
    assert (ended.code, ended.out, ended.err) == (0, "", "4 records were written to orders\n")
    assert done("consume", "orders") == "one\n\n two \nlast\n"
    assert done("consume", "orders", "-f", r"%t-%p %o %S\x7c%K%%\n").splitlines() == [
        "orders-0 0 3|-1%",
        "orders-0 1 0|-1%",
        "orders-0 2 5|-1%",
        "orders-0 3 4|-1%",
    ]
    assert lines("--count", "2") == ["", "one"]
    assert lines("--offset", "2") == [" two ", "last"]
    assert lines("--offset", "-1") == ["last"]
    assert lines("--offset", "end") == []
    assert lines("--offset", "beginning", "--count", "1") == ["one"]
    assert lines("--since", "1h") == lines("--since", "2020-01-01") == lines()
    assert lines("--since", "2100-01-01T00:00:00+01:00") == []


def test_a_topic_that_is_made_by_its_first_record_is_told_of(run):
    assert run("produce", "ordesr", stdin=b"a\n").err.startswith("there is no topic ordesr yet; ")
    assert run("produce", "ordesr", stdin=b"a\n").err == "1 record was written to ordesr\n"


def test_keys_and_headers_of_lines(done):
    done("produce", "orders", "-K", r"\t", "-H", "source=test", "-H", "empty=", stdin=b"k\tv\tw\nno key\n\tx\n")
    assert done("consume", "orders", "-f", r"[%k|%K]=%s %h\n") == (
        "[k|1]=v\tw source=test,empty=\n[|-1]=no key source=test,empty=\n[|0]=x source=test,empty=\n"
    )


def test_json_lines_go_in_and_come_out_the_same(done):
    done("topics", "create", "orders", "-p", "3")
    records: list[dict[str, object]] = [
        {
            "key": "k",
            "value": "v",
            "headers": [["h", "1"], ["h", None]],
            "partition": 2,
            "timestamp": 1_600_000_000_000,
        },
        {"key": None, "value": None, "headers": [], "partition": 1, "timestamp": 5},
        {"key": {"base64": "/w=="}, "value": "\u00e9\x00\x1b", "headers": [["h", {"base64": "gA=="}]], "partition": 0},
        {"value": "in headers as an object", "headers": {"a": "b"}, "partition": 0},
    ]
    done("produce", "orders", "--json-lines", stdin="\n".join(map(json.dumps, records)).encode())
    out = done("consume", "orders", "--json")
    found = {(line["partition"], line["offset"]): line for line in map(json.loads, out.splitlines())}
    assert {key: found[2, 0][key] for key in records[0]} == records[0]
    assert {key: found[1, 0][key] for key in records[1]} == records[1]
    assert {key: found[0, 0][key] for key in records[2]} == records[2]
    assert found[0, 1]["headers"] == [["a", "b"]]
    assert found[0, 1]["timestamp"] > 1_600_000_000_000
    done(
        "produce",
        "copies",
        "--json-lines",
        stdin=out.replace('"partition": ', '"partition": null, "offset": ').encode(),
    )
    assert done("consume", "copies", "-f", r"%s\n").splitlines() == [
        json.loads(o)["value"] or "" for o in out.splitlines()
    ]


BAD_LINES = [
    ("nonsense", "not JSON"),
    ("[1]", "not a JSON object"),
    ("[" * 100_000, "not JSON"),
    ('{"valeu": "v"}', "'valeu'"),
    ('{"value": 1}', "its value is neither"),
    ('{"value": {"a": 1}}', "its value is neither"),
    ('{"value": {"base64": "?"}}', "not base64"),
    ('{"key": "\\ud800"}', "half of a surrogate pair"),
    ('{"headers": [["a"]]}', "its headers are neither"),
    ('{"headers": {"a": 1}}', "its header is neither"),
    ('{"partition": -1}', "its partition"),
    ('{"partition": true}', "its partition"),
    ('{"partition": 7}', "topic orders has 1 partition, numbered from 0: there is no partition 7"),
    ('{"timestamp": 1.5}', "its timestamp"),
    ('{"timestamp": 9223372036854775808}', "its timestamp"),
    ('{"timestamp": NaN}', "its timestamp"),
]


@pytest.mark.slow
def test_a_bad_line_ends_the_run_and_aborts_the_transaction(run, done):
    done("topics", "create", "orders")
    for line, what in BAD_LINES:
        ended = run("produce", "orders", "-j", "-t", "load", stdin=f'{{"value": "secret"}}\n{line}\n'.encode())
        assert ended.code == 1
        assert ended.err.startswith("txnstore: standard input, line 2: "), ended
        assert ended.err.count("\n") == 1
        assert what in ended.err
        assert "secret" not in ended.err
        assert ended.err.endswith("; nothing was committed\n")
    assert done("consume", "orders") == ""
    without = run("produce", "orders", "-j", stdin=b'{"value": "before"}\nnonsense')
    assert without.err.endswith("; 1 record was written before\n")
    assert done("consume", "orders") == "before\n"


def test_a_partition_that_is_not_there_is_told_with_those_that_are_and_what_was_written(run, done):
    done("topics", "create", "orders", "-p", "2")
    lines = [{"value": str(number), "partition": int(2 <= number <= 5)} for number in range(1, 8)]
    done("produce", "orders", "-j", stdin="\n".join(map(json.dumps, lines)).encode())
    # The topic is looked up when all of them wait for it.
    slowly = ["-X", "linger.ms=30000"]
    ended = run("produce", "new", "-j", *slowly, stdin="\n".join(map(json.dumps, lines)).encode())
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == (
        "txnstore: standard input, line 2: topic new has 1 partition, numbered from 0: there is no partition 1;"
        " 3 records were written, and 4 were not (standard input, lines 2, 3, 4, 5);"
        " standard input, line 7 was the last to be read"
    )
    assert done("consume", "new") == "1\n6\n7\n"
    assert "topic orders has 2 partitions, numbered from 0: there is no partition 9; 0 records were" in (
        run("produce", "orders", "-p", "9", stdin=b"v\n").err
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("error", "failing", "code", "told"),
    [
        (KafkaError._TRANSPORT, {1, 2, 3}, 75, "0 records were written, and 3 were not"),
        (KafkaError._TRANSPORT, {3}, 1, "2 records were written, and 1 was not"),
        (KafkaError._MSG_TIMED_OUT, {1, 2, 3}, 1, "0 records were written, and of 3 that is not known"),
        (KafkaError._PURGE_INFLIGHT, {2}, 1, "2 records were written, and of 1 that is not known"),
    ],
)
def test_a_call_that_would_write_records_again_is_not_one_that_may_be_made_again(
    done, run, monkeypatch, error, failing, code, told
):
    add = produce_command._Reports.add

    def fail(reports, place, given, message):
        add(reports, place, KafkaError(error) if place.line in failing else given, message)

    done("topics", "create", "orders")
    monkeypatch.setattr(produce_command._Reports, "add", fail)
    ended = run("produce", "orders", stdin=b"a\nb\nc\n")
    assert (ended.code, told in ended.err) == (code, True), ended


def test_the_first_places_of_what_was_not_written_are_named_and_the_last_that_was_read(done, run, tmp_path):
    done("topics", "create", "orders", "-p", "2")
    for name, partitions in (("a", [0, 1]), ("b", [1] * 21 + [0])):
        lines = [json.dumps({"value": "v", "partition": partition}) for partition in partitions]
        (tmp_path / name).write_text("\n".join(lines))
    ended = run("produce", "new", "-j", "-X", "linger.ms=30000", tmp_path / "a", tmp_path / "b")
    assert ended.err.endswith(
        f"; 2 records were written, and 22 were not ({tmp_path}/a, line 2; {tmp_path}/b, lines"
        f" {', '.join(map(str, range(1, 20)))}, and 2 more); {tmp_path}/b, line 22 was the last to be read\n"
    )


@pytest.mark.parametrize("setting", ["delivery.report.only.error=true", "transactional.id=zz"])
def test_a_setting_that_is_the_commands_own_is_refused_with_what_to_do_instead(done, run, setting):
    ended = run("produce", "orders", "-X", setting, stdin=b"a\n")
    assert ended.code == 2
    assert setting.split("=")[0] in ended.err
    assert run("consume", "orders").code == 1, "there is no such topic"


def test_the_name_of_a_header_that_is_not_text_is_refused(done, run):
    ended = run("produce", "orders", "-H", "\udcff=1", stdin=b"a\n")
    assert (ended.code, "is not UTF-8" in ended.err, "Traceback" in ended.err) == (2, True, False)


def test_blank_lines_between_json_are_none(done, run):
    ended = run("produce", "orders", "-j", stdin=b'{"value": "a"}\n\n{"value": "b"}\n  \r\n\n')
    assert ended.err.endswith("2 records were written to orders\n")
    assert done("consume", "orders") == "a\nb\n"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_commit_that_may_have_been_made_is_not_asked_for_again(done, run, monkeypatch, is_lost):
    def fail(*_):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))

    done("topics", "create", "orders")
    monkeypatch.setattr(Producer, "commit_transaction", fail)
    if is_lost:
        monkeypatch.setattr(Producer, "abort_transaction", fail)
    ended = run("produce", "orders", "-t", "load", stdin=b"a\n")
    what_became = "it is not known whether it was committed" if is_lost else "nothing was committed"
    assert ended.err.splitlines()[-1] == f"txnstore: no answer; {what_became}"
    assert ended.code == (1 if is_lost else 75)


def test_a_transaction_is_seen_as_a_whole(run, done):
    done("produce", "orders", "-t", "load", stdin=b"a\nb\n")
    done("produce", "orders", "-t", "load", stdin=b"c\n")
    assert done("consume", "orders") == "a\nb\nc\n"
    # The offsets behind the records are their markers'.
    assert done("consume", "orders", "-f", "%o ") == "0 1 3 "
    assert done("consume", "orders", "-o", "-2") == "b\nc\n"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("timeout_seconds", [30, 60, 90])
def test_a_transaction_may_be_told_to_take_less_or_more_time(done, timeout_seconds):
    done("produce", "orders", "-t", "load", "--transaction-timeout", str(timeout_seconds), stdin=b"a\n")
    assert done("consume", "orders") == "a\n"


def test_giving_up_a_transaction_takes_no_longer_than_closing_the_producer(run, done, monkeypatch):
    """As where one of several databases does not answer: the abort was waited for twice."""
    waited_seconds = []
    wait = TransactionProgress.wait

    def wait_in_vain(progress, work, wait_seconds, *, resumable):
        if progress.current is not TransactionCall.ABORT:
            return wait(progress, work, wait_seconds, resumable=resumable)
        waited_seconds.append(wait_seconds)
        return wait(progress, Future(), 0, resumable=resumable)

    with monkeypatch.context() as patched:
        patched.setattr(TransactionProgress, "wait", wait_in_vain)
        ended = run("produce", "orders", "-t", "load", "--json-lines", stdin=b'{"value": "a"}\nnonsense\n')
    assert ended.code == 1
    assert "standard input, line 2: it is not JSON; nothing was committed" in ended.err
    assert len(waited_seconds) == 1
    assert waited_seconds[0] <= CLOSE_TIMEOUT_SECONDS
    done("produce", "orders", "-t", "load", stdin=b"b\n")
    assert done("consume", "orders") == "b\n"


@pytest.mark.slow
def test_what_is_open_is_not_shown_and_told_of(url, run, done):
    done("produce", "orders", stdin=b"before\n")
    with Producer({"bootstrap.servers": url, "transactional.id": "open"}) as producer:
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("orders", b"open")
        assert producer.flush(30) == 0
        ended = run("consume", "orders")
        assert ended.out == "before\n"
        assert "orders-0: the offsets 1 to 1 wait for an open transaction" in ended.err
        assert done("consume", "orders", "--isolation", "read_uncommitted") == "before\nopen\n"
        producer.abort_transaction(30)
    assert run("consume", "orders") == (0, "before\n", "")
    assert done("consume", "orders", "--isolation", "read_uncommitted") == "before\nopen\n"
    assert done("consume", "orders", "-o", "-1") == "before\n"


def test_files_are_read_one_after_the_other(run, done, tmp_path):
    (tmp_path / "a").write_text("1\n2")
    (tmp_path / "b").write_text("4\n")
    done("produce", "orders", tmp_path / "a", "-", tmp_path / "b", stdin=b"3\n")
    assert done("consume", "orders") == "1\n2\n3\n4\n"
    for name, why in (("missing", "No such file"), (".", "Is a directory"), ("a\0b", "not a path")):
        ended = run("produce", "orders", tmp_path / "a", str(tmp_path / name))
        assert ended.code == 1
        assert why in ended.err
    assert done("consume", "orders") == "1\n2\n3\n4\n"


def test_a_bar_shows_how_far_a_file_was_read(done, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    (tmp_path / "a").write_text("record\n" * 1000)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    done("produce", "orders", tmp_path / "a")
    assert "writing" in terminal.getvalue()
    assert "7.0/7.0 kB" in terminal.getvalue()
    assert len(done("consume", "orders").splitlines()) == 1000


@pytest.mark.slow
def test_a_group_goes_on_where_it_was(run, done, lines):
    done("produce", "orders", stdin=b"a\nb\nc\n")
    assert lines("-g", "billing", "-c", "2") == ["a", "b"]
    assert lines("-g", "billing") == ["c"]
    assert lines("-g", "billing") == []
    assert lines("-g", "billing", "--from-beginning", "-c", "1") == ["a"]
    assert lines("-g", "billing") == ["b", "c"]
    assert lines() == ["a", "b", "c"]


@pytest.mark.slow
def test_a_member_begins_where_it_was_told_to_once_in_each_partition(url, start, done):
    """And goes on where the group is after each of the assignments that follow."""

    def write(value, *partitions):
        for partition in partitions:
            done("produce", "orders", "-p", partition, stdin=f"{value}{partition}\n".encode())

    done("topics", "create", "orders", "-p", "3")
    write("old", 0)
    process = start("consume", "orders", "-g", "billing", "--from-beginning", "--follow")
    assert process.stdout.readline() == "old0\n"
    settings = {"bootstrap.servers": url, "group.id": "billing", "auto.offset.reset": "error"}
    with Consumer(settings | {"enable.auto.commit": False}) as other:
        other.subscribe(["orders"])
        while not (assigned := [partition.partition for partition in other.assignment()]):
            assert other.poll(0.1) is None
        # One at least had no records before.
        assert assigned != [0]
        write("elsewhere", *assigned)
        seen: set[bytes | None] = set()
        while len(seen) < len(assigned):
            if (message := other.poll(1.0)) is not None:
                assert message.error() is None
                seen.add(message.value())
                other.commit(message, asynchronous=False)
        assert seen == {f"elsewhere{partition}".encode() for partition in assigned}
    write("new", 0, 1, 2)
    assert {process.stdout.readline() for _ in range(3)} == {"new0\n", "new1\n", "new2\n"}


def test_the_order_of_commits_is_refused_for_a_group_before_anything_is_printed(run, done):
    done("produce", "orders", "-t", "load", stdin=b"a\n")
    ended = run("consume", "orders", "-g", "billing", "-X", "txnstore.delivery.order=commit")
    assert (ended.code, ended.out) == (2, "")
    assert "txnstore.delivery.order" in ended.err
    assert done("consume", "orders", "-X", "txnstore.delivery.order=commit") == "a\n"
    assert done("consume", "orders", "-g", "billing", "-X", "txnstore.delivery.order=offset") == "a\n"


@pytest.mark.slow
def test_following_ends_with_ctrl_c(start, done):
    done("produce", "orders", stdin=b"old\n")
    process = start("consume", "orders", "--follow", "-o", "-1")
    assert process.stdout.readline() == "old\n"
    done("produce", "orders", stdin=b"new\n")
    assert process.stdout.readline() == "new\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["consume", "produce", "produce -t"])
def test_sigterm_ends_a_command_in_good_order(start, done, answer, command, tmp_path):
    """The group has no member left that others wait for, and no transaction stays open."""
    done("produce", "orders", stdin=b"old\n")
    if command == "consume":
        process = start("consume", "orders", "--follow", "--group", "billing")
        assert process.stdout.readline() == "old\n"
        told = ""
    else:
        fifo = tmp_path / "lines"
        os.mkfifo(fifo)
        process = start("produce", "orders", fifo, *(["-t", "load"] if command == "produce -t" else []))
        with fifo.open("w") as lines:
            lines.write("new\n" * 1000)
            lines.flush()
            enough = 1001 if command == "produce" else 2
            while answer("topics", "list")[0]["offsets"] < enough:
                pass
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        told = "nothing was committed" if command == "produce -t" else "1000 records were written before"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert (err.splitlines() or [""])[-1] == told
    assert "Traceback" not in err
    if command == "consume":
        assert answer("groups", "list")[0]["members"] == []
    assert answer("info")["counts"]["open_transactions"] == 0


def test_ctrl_c_aborts_the_transaction(done, run, monkeypatch):
    class Interrupted(io.RawIOBase):
        def __iter__(self):
            yield b"a\n"
            raise KeyboardInterrupt

    done("topics", "create", "orders")
    monkeypatch.setattr(produce_command, "_sources", lambda *_: [("standard input", Interrupted(), None)])
    for option, told in (["-t", "load"], "nothing was committed\n"), ([], "1 record was written before\n"):
        ended = run("produce", "orders", *option)
        assert (ended.code, ended.out, ended.err) == (130, "", told)
    assert done("consume", "orders") == "a\n"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ([], "0 records were written, and of 1 that is not known\n"),
        (["-t", "load"], "it is not known whether it was committed\n"),
    ],
)
def test_who_does_not_wait_for_what_is_given_up_is_told_that_it_is_not_known(done, run, monkeypatch, option, told):
    def interrupt(*_):
        raise KeyboardInterrupt

    done("topics", "create", "orders")
    # Its database takes nothing for now.
    for call in ("flush", "commit_transaction", "abort_transaction"):
        if not option or call != "flush":
            monkeypatch.setattr(Producer, call, interrupt)
    ended = run("produce", "orders", "-X", "linger.ms=30000", *option, stdin=b"a\n")
    assert (ended.code, ended.out, ended.err) == (130, "", told)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(start, txnstore, txnstore_sqlite_url, monkeypatch):
    monkeypatch.setenv("TXNSTORE_URL", txnstore_sqlite_url)
    assert txnstore("produce", "orders", stdin=b"record\n" * 50_000).code == 0
    process = start("consume", "orders")
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err


def test_a_call_that_cannot_be_meant_is_refused_with_2(run, done):
    done("topics", "create", "orders")
    for arguments in (
        ["consume"],
        ["consume", "orders", "--from-beginning", "--offset", "1"],
        ["consume", "orders", "--offset", "1", "--since", "1h"],
        ["consume", "orders", "--offset", "1.5"],
        ["consume", "orders", "--offset", "9" * 20],
        ["consume", "orders", "--since", "yesterday"],
        ["consume", "orders", "--since", "-5"],
        ["consume", "orders", "--since", "9" * 19],
        ["consume", "orders", "--partition", "-1"],
        ["consume", "orders", "--group", "g", "--partition", "0"],
        ["consume", "orders", "--count", "0"],
        ["consume", "orders", "--isolation", "READ_COMMITTED"],
        ["consume", "orders", "-f", "%z"],
        ["consume", "orders", "-f", "50%"],
        ["consume", "orders", "-X", "nonsense"],
        ["produce"],
        ["produce", "orders", "-K", ""],
        ["produce", "orders", "-K", r"\n"],
        ["produce", "orders", "-H", "nonsense"],
        ["produce", "orders", "--json-lines", "-K", ":"],
        ["produce", "orders", "-p", "-1"],
        ["produce", "orders", "-p", str(2**31)],
        ["produce", "orders", "--transaction-timeout", "0"],
    ):
        ended = run(*arguments, stdin=b"x\n")
        assert ended.code == 2, (arguments, ended)
        assert "Traceback" not in ended.err
    assert done("consume", "orders") == ""


@pytest.mark.parametrize("text", ["1", "20261128", "1795296260", "99999999999"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["consume", "orders", "--since"],
        ["export", "orders", "--parquet", "none.parquet", "--since"],
        ["export", "orders", "--parquet", "none.parquet", "--before"],
        ["groups", "reset-offsets", "billing", "--to-datetime"],
    ],
    ids=" ".join,
)
def test_a_bare_number_that_is_rather_seconds_or_a_date_is_no_time(txnstore, monkeypatch, arguments, text):
    monkeypatch.setenv("TXNSTORE_URL", "sqlite:///none.db")
    ended = txnstore(*arguments, text)
    told = " ".join(ended.err.replace("\u2502", " ").split())
    assert ended.code == 2
    assert f"{text} is 197" in told
    # Only what would be taken.
    assert (f"write {text}000" in told) == (len(text) > 8)
    assert "with its hyphens" in told


def test_a_number_that_is_a_time_is_milliseconds():
    assert parse_time("100000000000") == 10**11
    assert parse_time("0") == 0


@pytest.mark.slow
def test_what_the_store_refuses_is_one_line(run, done, answer):
    done("topics", "create", "orders")
    for arguments, what in (
        (["consume", "nothing"], "there is no topic 'nothing'"),
        (["consume", "orders", "-p", "1"], "partitions 0 to 0"),
        (["consume", "orders", "-o", "1"], "the offsets 0 to 0"),
        (["consume", "orders", "-o", str(2**63 - 1)], "the offsets 0 to 0"),
        (["consume", "orders", "-g", "g", "-X", "no.such=1"], "no.such"),
        (["consume", "orders", "-g", ""], "group"),
        (["consume", "orders", "-g", "\ud800"], "group"),
        (["produce", "a b"], "characters"),
        (["produce", ""], "empty"),
        (["produce", "orders", "-p", "1"], "has 1 partition, numbered from 0: there is no partition 1; 0 records were"),
        (["produce", "orders", "-X", "compression.type=soon"], "compression.codec"),
        (["produce", "orders", "-t", "\ud800"], "transactional"),
        (["produce", "orders", "-t", "x", "--transaction-timeout", "901"], "transaction"),
        (["produce", "orders", "-X", "message.max.bytes=1000"], "too large"),
    ):
        ended = run(*arguments, stdin=b"x" * 2000)
        assert (ended.code, ended.err.count("\n")) == (1, 1), (arguments, ended)
        assert what in ended.err, (arguments, ended)
    assert done("consume", "orders") == ""
    assert [row["topic"] for row in answer("topics", "list")] == ["orders"]
    assert answer("info")["counts"]["open_transactions"] == 0


def test_a_record_that_waited_in_vain_is_told_with_the_last_trouble_unless_that_has_passed():
    """That all brokers are down says nothing; and what its partition took since shows that it is over."""

    def of_partition(number):
        return SimpleNamespace(partition=lambda: number)

    def failure_of(number, *happened):
        reports, place = produce_command._Reports(), produce_command._InputPlace("standard input", 1)
        for what in (*happened, KafkaError(KafkaError._MSG_TIMED_OUT)):
            if isinstance(what, int):
                reports.add(place, None, of_partition(what))
            elif what == KafkaError._MSG_TIMED_OUT:
                reports.add(place, what, of_partition(number))
            else:
                reports.note_trouble(what)
        with pytest.raises(produce_command._NotWritten) as caught:
            reports.raise_failure()
        return caught.value.error.str()

    away = KafkaError(KafkaError._TRANSPORT, "no connection to PostgreSQL")
    all_down = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down: no connection to PostgreSQL")
    bare = "Local: Message timed out"
    told = f"{bare}; the last trouble was: no connection to PostgreSQL"
    assert failure_of(0) == bare
    assert failure_of(0, all_down) == bare
    assert failure_of(0, away, all_down) == told
    assert failure_of(0, away, 0) == bare
    assert failure_of(0, away, 1) == told, "that may be in another database"
    assert failure_of(0, 0, away) == told
    assert failure_of(0, away, 0, away) == told


def test_no_thread_is_left(run, done):
    # Stores that tests share have threads of their own.
    before = set(threading.enumerate())
    done("produce", "orders", "-t", "load", stdin=b"a\n")
    done("consume", "orders", "-g", "g")
    for thread in set(threading.enumerate()) - before:
        # A last look at the maintenance may end a moment later.
        thread.join(30)
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("txnstore")] == []


def test_consume_ends_what_holds_it_back_once_its_time_is_up(url, done, run):
    done("topics", "create", "orders")
    with open_store(url) as store:
        coordinator = TransactionCoordinator(store)
        partition_id = store.read(lambda connection: get_topic(connection, "orders")).partition_id(0)
        for name, timeout_ms in (("abandoned", 1), ("alive", 900_000)):
            producer = coordinator.init_producer_id(name, timeout_ms).identity
            batch = encode([Record(name.encode())], producer=producer, base_sequence=0, is_transactional=True)
            coordinator.append(name, producer, [Append(partition_id, batch)])
            if timeout_ms == 1:
                plain = Append(partition_id, encode([Record(b"behind")]))
                store.write(lambda connection, plain=plain: append(connection, [plain]))
        now = select(server_now_ms())
        begun_ms = store.read(lambda connection: connection.execute(now).scalar_one())
        while store.read(lambda connection: connection.execute(now).scalar_one()) < begun_ms + 2:
            pass
    ended = run("consume", "orders")
    assert ended.out == "behind\n"
    assert "the offsets 2 to 3 wait for an open transaction" in ended.err
