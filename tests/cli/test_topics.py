"""`txnstore topics`: makes, lists, describes, changes and deletes topics, all that was asked for or nothing."""

from __future__ import annotations

import itertools

import pytest

STRANGE_NAMES = [
    "",
    " ",
    ".",
    "..",
    "a/b",
    "a b",
    "\x1b[31m",
    "a\nb",
    "a\0b",
    "'; DROP TABLE topics; --",
    "ß",
    "\ud800",
    "x" * 250,
    "%s",
    "{}",
    "$1",
]


def test_topics_are_created_and_listed(done, answer):
    assert done("topics", "create", "orders", "-p", "3", "-c", "retention.ms=5") == (
        "topic orders was created with 3 partitions\n"
    )
    done("topics", "create", "audit", "payments")
    assert answer("topics", "list") == [
        {"topic": "audit", "partitions": 1, "offsets": 0, "open_transactions": 0, "config": {}},
        {"topic": "orders", "partitions": 3, "offsets": 0, "open_transactions": 0, "config": {"retention.ms": "5"}},
        {"topic": "payments", "partitions": 1, "offsets": 0, "open_transactions": 0, "config": {}},
    ]
    assert done("topics", "list").splitlines() == [
        "TOPIC     PARTITIONS  OFFSETS  OPEN TRANSACTIONS  CONFIG",
        "audit              1        0                  0  -",
        "orders             3        0                  0  retention.ms=5",
        "payments           1        0                  0  -",
    ]


def test_of_several_topics_all_are_created_or_none(run, done, answer):
    done("topics", "create", "orders")
    ended = run("topics", "create", "audit", "orders")
    assert (ended.code, ended.out, ended.err) == (1, "", "txnstore: there is a topic orders already\n")
    assert [row["topic"] for row in answer("topics", "list")] == ["orders"]
    assert done("topics", "create", "audit", "orders", "--if-not-exists").splitlines() == [
        "topic audit was created with 1 partition",
        "topic orders already exists",
    ]


def test_a_topic_that_is_named_twice_is_created_and_deleted_once(done):
    assert done("topics", "create", "orders", "audit", "orders").splitlines() == [
        "topic orders was created with 1 partition",
        "topic audit was created with 1 partition",
    ]
    assert done("topics", "delete", "orders", "orders", "--yes") == "topic orders was deleted\n"


def test_a_setting_without_a_meaning_here_is_told_of_and_kept(run, answer):
    ended = run("topics", "create", "orders", "--config", "min.insync.replicas=2")
    assert ended.code == 0
    assert "min.insync.replicas has no meaning" in ended.err
    assert answer("topics", "describe", "orders")[0]["config"] == {"min.insync.replicas": "2"}


def test_a_topic_is_described(answer, done):
    done("topics", "create", "orders", "-p", "2")
    (described,) = answer("topics", "describe", "orders")
    assert described["config"] == {}
    assert described["partitions"][1] == {
        "partition": 1,
        "log_start_offset": 0,
        "last_stable_offset": 0,
        "high_watermark": 0,
        "open_transactions": 0,
        "batches": 0,
        "size_bytes": 0,
        "last_timestamp_ms": None,
    }
    lines = done("topics", "describe", "orders", "orders").splitlines()
    assert lines[0] == "topic:   orders"
    assert lines.count("topic:   orders") == 2
    assert lines[lines.index("topic:   orders", 1) - 1] == ""
    assert lines.count("") == 1


def test_a_topic_gets_partitions_and_settings(done, answer):
    done("topics", "create", "orders", "-c", "retention.ms=5")
    assert done(
        "topics", "alter", "orders", "-p", "4", "-c", "max.message.bytes=99", "--reset", "retention.ms"
    ).splitlines() == [
        "topic orders has 4 partitions now",
        "topic orders: max.message.bytes is 99 now",
        "topic orders: retention.ms has its default again",
    ]
    (row,) = answer("topics", "list")
    assert (row["partitions"], row["config"]) == (4, {"max.message.bytes": "99"})


def test_an_alteration_is_made_as_a_whole_or_not_at_all(run, done, answer):
    done("topics", "create", "orders", "-p", "2")
    before = answer("topics", "list")
    for arguments, what in (
        (["-c", "retention.ms=7", "-p", "1"], "2 partitions already"),
        (["-p", "3", "-c", "retention.ms=soon"], "whole number"),
        (["-p", "3", "-c", "retention.mss=7"], "did you mean 'retention.ms'?"),
        (["-p", "3", "--reset", "retention.mss"], "did you mean 'retention.ms'?"),
    ):
        ended = run("topics", "alter", "orders", *arguments)
        assert ended.code == 1
        assert what in ended.err
    assert answer("topics", "list") == before


def test_topics_are_deleted_after_a_question(run, done, answer):
    done("topics", "create", "orders", "audit")
    refused = run("topics", "delete", "orders", stdin=b"n\n")
    assert refused.code == 1
    assert "orders: 1 partition, 0 offsets" in refused.out
    assert run("topics", "delete", "orders").code == 1  # nobody is there to answer
    assert run("topics", "delete", "orders", "--yes", "nothing").code == 1
    assert len(answer("topics", "list")) == 2
    assert "topic orders was deleted" in done("topics", "delete", "orders", stdin=b"y\n")
    assert done("topics", "delete", "audit", "--yes") == "topic audit was deleted\n"
    assert answer("topics", "list") == []


def test_a_call_that_cannot_be_meant_is_refused_with_2(run, answer):
    for arguments in (
        ["create"],
        ["create", "orders", "-p", "0"],
        ["create", "orders", "-p", "many"],
        ["create", "orders", "-c", "retention.ms"],
        ["create", "orders", "-c", "=1"],
        ["create", "orders", "-c", "retention.ms=1", "-c", "retention.ms=2"],
        ["alter", "orders"],
        ["alter", "orders", "-c", "retention.ms=1", "--reset", "retention.ms"],
    ):
        ended = run("topics", *arguments)
        assert ended.code == 2
        assert "Traceback" not in ended.err
    assert answer("topics", "list") == []


def test_more_partitions_than_there_can_be_are_refused(run):
    ended = run("topics", "create", "orders", "-p", "100001")
    assert (ended.code, ended.err.count("\n")) == (1, 1)


@pytest.mark.slow
def test_strange_names_are_refused_in_one_line(run, answer):
    commands = itertools.cycle((["describe"], ["alter", "-p", "2"], ["delete", "--yes"]))
    for name in STRANGE_NAMES:
        for command in (["create"], next(commands)):
            ended = run("topics", *command, "--", name)
            assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1), (command, name, ended)
            assert "\x1b" not in ended.err
    assert answer("topics", "list") == []


def test_names_are_completed(url, run, done, monkeypatch):
    done("topics", "create", "orders", "audit", "outbox")
    monkeypatch.setenv("_TXNSTORE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "txnstore topics describe o")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert run().out.split() == ["orders", "outbox"]
    monkeypatch.setenv("TXNSTORE_URL", "nonsense")
    ended = run()
    assert (ended.out.split(), ended.err) == ([], "")


def test_a_script_for_the_shell_is_shown(txnstore):
    ended = txnstore("--show-completion", "bash")
    assert ended.code in {0, 1, 2}
    assert "Traceback" not in ended.err
