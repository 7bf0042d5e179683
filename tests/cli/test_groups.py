"""`txnstore groups`: how far groups really are, and where they go on."""

from __future__ import annotations

import signal
import sys

import pytest
import typer

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.producer.producer import Producer


@pytest.fixture
def lag(answer):
    """The lag of a group in orders-0, and how many records wait for open transactions."""

    def lag(group="billing"):
        (described,) = answer("groups", "describe", group)
        (row,) = described["offsets"]
        return row["lag"], row["open_records"]

    return lag


@pytest.mark.slow
def test_groups_are_listed_and_described(done, answer):
    done("produce", "orders", stdin=b"a\nb\nc\n")
    done("consume", "orders", "-g", "billing", "-c", "2")
    (row,) = answer("groups", "list")
    assert (row["group"], row["state"], row["members"]) == ("billing", "Empty", [])
    (described,) = answer("groups", "describe", "billing")
    (offset,) = described["offsets"]
    assert (offset["topic"], offset["partition"], offset["committed_offset"]) == ("orders", 0, 2)
    assert (offset["lag"], offset["open_records"], offset["pending"]) == (1, 0, False)
    assert done("groups", "list").splitlines()[0].split() == ["GROUP", "STATE", "GENERATION", "ASSIGNOR", "MEMBERS"]
    assert ["orders", "0", "2", "3", "3", "1", "0", "no", "-"] in [
        line.split() for line in done("groups", "describe", "billing").splitlines()
    ]


@pytest.mark.slow
def test_lag_counts_neither_markers_nor_what_is_aborted_or_open(url, done, lag):
    done("produce", "orders", "-t", "a", stdin=b"a\nb\n")
    done("consume", "orders", "-g", "billing", "-c", "1")
    assert lag() == (1, 0)
    done("consume", "orders", "-g", "billing")
    assert lag() == (0, 0)  # what is left is a marker
    with Producer({"bootstrap.servers": url, "transactional.id": "b"}) as producer:
        producer.init_transactions(30)
        for _ in range(2):
            producer.begin_transaction()
            producer.produce("orders", b"open")
            producer.produce("orders", b"open")
            assert producer.flush(30) == 0
            assert lag() == (0, 2)
            producer.abort_transaction(30)
            assert lag() == (0, 0)
    done("produce", "orders", "-t", "a", stdin=b"c\n")
    assert lag() == (1, 0)


@pytest.mark.slow
def test_resetting_shows_first_and_does_it_when_told(run, done, answer, lag):
    done("produce", "orders", stdin=b"a\nb\nc\nd\n")
    done("consume", "orders", "-g", "billing", "-c", "3")
    reset = ["groups", "reset-offsets", "billing"]
    shown = run(*reset, "--to-earliest")
    assert [line.split() for line in shown.out.splitlines()][1] == ["billing", "orders", "0", "3", "0"]
    assert "nothing was changed" in shown.err
    assert lag() == (1, 0)
    for option, new_offset in (
        (["--to-earliest"], 0),
        (["--to-latest"], 4),
        (["--shift-by", "-3"], 1),
        (["--shift-by", "2"], 3),
        (["--shift-by", str(2**63 - 1)], 4),
        (["--shift-by", str(-(2**63))], 0),
        (["--to-offset", "2"], 2),
        (["--to-offset", str(2**63 - 1)], 4),
        (["--to-datetime", "2020-01-01"], 0),
        (["--to-datetime", "2100-01-01T00:00:00Z"], 4),
        (["--to-datetime", "1h"], 0),
    ):
        (row,) = answer(*reset, *option, "--execute")
        assert row["new_offset"] == new_offset, option
    assert lag() == (4, 0)
    done(*reset, "--to-offset", "3", "--execute")
    assert done("consume", "orders", "-g", "billing") == "d\n"


@pytest.mark.slow
def test_that_an_offset_outside_the_log_was_not_taken_is_said(run, done):
    done("topics", "create", "orders", "-p", "2")
    done("produce", "orders", "-p", "1", stdin=b"a\nb\nc\n")
    reset = ["groups", "reset-offsets", "billing", "--topic", "orders:1"]
    past_the_end = "warning: orders-1: offset 99 is past the end; 3 takes its place\n"
    assert run(*reset, "--to-offset", "99").err.startswith(past_the_end + "nothing was changed")
    assert run(*reset, "--to-offset", "99", "--execute").err == past_the_end
    assert run(*reset, "--to-offset", "99", "--execute", "--json").err == past_the_end
    before_the_start = "warning: orders-1: offset -4 is before the log start; 0 takes its place\n"
    assert run(*reset, "--shift-by", "-7", "--execute").err == before_the_start
    for inside in (["--to-offset", "3"], ["--to-offset", "0"], ["--to-latest"], ["--to-datetime", "2100-01-01"]):
        assert run(*reset, *inside, "--execute").err == ""


def test_a_group_is_given_a_beginning_in_chosen_partitions(run, answer, done):
    done("topics", "create", "orders", "-p", "3")
    (row,) = answer("groups", "reset-offsets", "new", "--topic", "orders:2", "--to-latest", "--execute")
    assert (row["partition"], row["committed_offset"], row["new_offset"]) == (2, None, 0)
    rows = answer("groups", "reset-offsets", "new", "--topic", "orders", "--to-earliest")
    assert [row["partition"] for row in rows] == [0, 1, 2]
    for execute in [], ["--execute"]:
        ended = run("groups", "reset-offsets", "new", "--topic", "orders:0", "--shift-by", "1", *execute)
        assert (ended.code, ended.out) == (1, "")
        assert "group new has committed nothing there" in ended.err
    (described,) = answer("groups", "describe", "new")
    assert len(described["offsets"]) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (["orders:0", "orders:2"], [0, 2]),
        (["orders:2,0", "orders:1,2"], [2, 0, 1]),
        (["orders:1", "orders"], [0, 1, 2]),
        (["orders", "orders:1"], [0, 1, 2]),
    ],
)
def test_a_topic_may_be_given_several_times(answer, done, given, numbers):
    done("topics", "create", "orders", "-p", "3")
    named = [word for text in given for word in ("--topic", text)]
    rows = answer("groups", "reset-offsets", "new", *named, "--to-earliest")
    assert [row["partition"] for row in rows] == numbers


def test_a_group_with_members_is_left_alone(url, run, done, answer):
    done("produce", "orders", stdin=b"a\n")
    configuration = {"bootstrap.servers": url, "group.id": "billing", "auto.offset.reset": "earliest"}
    with Consumer(configuration) as consumer:
        consumer.subscribe(["orders"])
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None
        consumer.commit(message, asynchronous=False)
        (described,) = answer("groups", "describe", "billing")
        (member,) = described["members"]
        assert member["partitions"] == ["orders-0"]
        assert described["offsets"][0]["member_id"] == member["member_id"]
        assert "orders-0" in done("groups", "describe", "billing")
        reset = ["reset-offsets", "billing", "--to-earliest"]
        for arguments in (reset, [*reset, "--execute"], ["delete", "billing", "--yes"]):
            ended = run("groups", *arguments)
            assert "stop them first" in ended.err
            assert (ended.code, ended.err.count("\n")) == (1, 1), ended
        assert answer("groups", "describe", "billing")[0]["offsets"][0]["committed_offset"] == 1
    assert answer("groups", "list")[0]["state"] == "Empty"


@pytest.mark.slow
def test_groups_are_deleted_after_a_question(run, done, answer):
    done("topics", "create", "orders")
    for group in ("a", "b"):
        done("groups", "reset-offsets", group, "--topic", "orders", "--to-latest", "--execute")
    assert run("groups", "delete", "a", stdin=b"n\n").code == 1
    assert run("groups", "delete", "a", "nobody", "--yes").code == 1
    assert len(answer("groups", "list")) == 2
    assert done("groups", "delete", "a", "b", "--yes") == "group a was deleted\ngroup b was deleted\n"
    assert answer("groups", "list") == []


def test_sigterm_at_the_question_whether_to_delete_ends_as_it_does_elsewhere(run, done, monkeypatch):
    done("produce", "orders", stdin=b"a\n")
    done("consume", "orders", "-g", "billing")
    asking = sys.modules[typer.confirm.__module__]
    monkeypatch.setattr(asking, "visible_prompt_func", lambda _: signal.raise_signal(signal.SIGTERM))
    assert run("groups", "delete", "billing").code == 143
    assert "billing" in done("groups", "list")


def test_bad_calls_change_nothing(run, done, answer):
    done("topics", "create", "orders")
    for arguments, code in (
        (["describe"], 2),
        (["describe", "nobody"], 1),
        (["describe", ""], 1),
        (["describe", "\ud800"], 1),
        (["describe", "a\0b"], 1),
        (["describe", "x" * 10_000], 1),
        (["reset-offsets", "g"], 2),
        (["reset-offsets", "g", "--to-earliest", "--to-latest"], 2),
        (["reset-offsets", "g", "--to-offset", "-1"], 2),
        (["reset-offsets", "g", "--to-offset", str(2**63)], 2),
        (["reset-offsets", "g", "--shift-by", "1.5"], 2),
        (["reset-offsets", "g", "--to-datetime", "never"], 2),
        (["reset-offsets", "g", "--to-earliest", "--topic", "orders:x", "--execute"], 2),
        (["reset-offsets", "g", "--to-earliest", "--topic", "orders:" + "9" * 5000, "--execute"], 2),
        (["reset-offsets", "g", "--to-earliest", "--topic", "orders:1", "--execute"], 1),
        (["reset-offsets", "g", "--to-earliest", "--topic", "nothing", "--execute"], 1),
        (["reset-offsets", "g", "--to-earliest", "--topic", "", "--execute"], 1),
        (["reset-offsets", "", "--to-earliest", "--topic", "orders", "--execute"], 1),
        (["reset-offsets", "\ud800", "--to-earliest", "--topic", "orders", "--execute"], 1),
        (["reset-offsets", "g", "--to-earliest", "--execute"], 1),
        (["delete", "nobody", "--yes"], 1),
    ):
        ended = run("groups", *arguments)
        assert ended.code == code, (arguments, ended)
        assert "Traceback" not in ended.err
    assert answer("groups", "list") == []
