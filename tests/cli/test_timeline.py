"""`txnstore timeline`: a partition as a drawing, in the terminal and as SVG."""

from __future__ import annotations

import io
import sys
from xml.etree import ElementTree as ET

import pytest

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.producer import Producer


@pytest.fixture
def drawn(url, done):
    """A log with records of every kind, and a group in the middle of it."""
    done("produce", "orders", stdin=b"a\nb\nc\n")
    done("produce", "orders", "-t", "load", stdin=b"d\ne\n")
    done("consume", "orders", "-g", "bill<ing", "-c", "4")
    configuration = {"bootstrap.servers": url}
    with (
        Producer(configuration | {"transactional.id": "fails"}) as fails,
        Producer(configuration | {"transactional.id": "import"}) as opened,
    ):
        for producer in (fails, opened):
            producer.init_transactions(30)
            producer.begin_transaction()
            producer.produce("orders", b"x")
            assert producer.flush(30) == 0
        fails.abort_transaction(30)
        done("produce", "orders", stdin=b"f\n")
        yield


def test_a_partition_is_drawn(drawn, done):
    assert [line.rstrip() for line in done("timeline", "orders").splitlines()] == [
        "orders-0",
        "                     0         10",
        "                     |         |",
        "no transaction       ■■■      ■",
        "load 1:0  committed     ■■C",
        "fails 2:0   aborted        ▒ A",
        "import 3:0     open         □",
        "log start            ▲ 0",
        "last stable offset          ▲ 7",
        "high watermark                 ▲ 10",
        "group bill<ing           ▲ 4",
        "                     ■ record  ▒ aborted  □ open  C COMMIT marker  A ABORT marker",
    ]


@pytest.mark.slow
def test_a_group_in_commit_order_is_at_a_place_and_within_a_transaction(url, drawn, done, answer):
    """Its place is the marker's, from where it reads the second record of the transaction on."""
    done("produce", "other", "-t", "load", stdin=b"a\nb\nc\n")
    settings = {"group.id": "placed", "auto.offset.reset": "earliest", "txnstore.delivery.order": "commit"}
    with Consumer({"bootstrap.servers": url, **settings}) as consumer:
        consumer.assign([TopicPartition("other", 0)])
        assert consumer.poll(30) is not None
    pointers = {pointer["name"]: pointer["offset"] for pointer in answer("timeline", "other")["pointers"]}
    assert pointers["group placed from 1 on"] == 3


@pytest.mark.slow
def test_a_part_is_drawn(drawn, done, answer):
    part = answer("timeline", "orders", "--from", "5", "--count", "2")
    assert (part["first_offset"], part["end_offset"]) == (5, 7)
    assert [(lane["name"], lane["marks"]) for lane in part["lanes"]] == [
        ("load 1:0", [{"offset": 5, "mark": "COMMIT marker"}]),
        ("fails 2:0", [{"offset": 6, "mark": "aborted"}]),
    ]
    assert {pointer["name"]: pointer["offset"] for pointer in part["pointers"]} == {
        "log start": 0,
        "last stable offset": 7,
        "high watermark": 10,
        "group bill<ing": 4,
    }
    lines = done("timeline", "orders", "--from", "5", "--count", "2").splitlines()
    assert any(line.endswith("  ◀ 4") for line in lines)
    assert any(line.endswith("  ▶ 10") for line in lines)
    assert answer("timeline", "orders", "-c", "1")["first_offset"] == 9


def test_a_terminal_without_unicode_gets_letters(drawn, run, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert run("timeline", "orders").code == 0
    output.flush()
    text = output.buffer.getvalue().decode("ascii")
    assert "x A\n" in text
    assert "^ 4\n" in text


@pytest.mark.slow
def test_the_drawing_is_written_as_svg(drawn, run, done, tmp_path):
    file = tmp_path / "orders.svg"
    assert "shows the offsets 0 to 9 of orders-0" in done("timeline", "orders", "--svg", file)
    drawing = ET.fromstring(file.read_text())
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"orders-0", "load 1:0 committed", "fails 2:0 aborted", "import 3:0 open", "group bill<ing"} <= set(texts)
    titles = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert "offset 8: ABORT marker" in titles
    assert len(titles) == 10
    ended = run("timeline", "orders", "--svg", tmp_path / "no" / "folder.svg")
    assert (ended.code, ended.err.count("\n")) == (1, 1)


def test_an_empty_log_is_drawn(done, tmp_path):
    done("topics", "create", "orders")
    assert "high watermark" in done("timeline", "orders")
    assert "shows no offsets of orders-0" in done("timeline", "orders", "--svg", tmp_path / "empty.svg")
    ET.fromstring((tmp_path / "empty.svg").read_text())


@pytest.mark.slow
def test_that_there_are_other_partitions_is_said_where_none_was_named(run, done):
    done("topics", "create", "orders", "-p", "3")
    done("topics", "create", "single")
    told = "this is partition 0 of the 3 that orders has; --partition shows another\n"
    for command in (["timeline"], ["dump", "log"], ["dump", "index"], ["dump", "producers"]):
        for options in ([], ["--json"]):
            ended = run(*command, "orders", *options)
            assert (ended.code, ended.err) == (0, told), (command, ended)
        assert run(*command, "orders", "-p", "0").err == ""
        assert run(*command, "single").err == ""


def test_bad_calls(run, done):
    done("topics", "create", "orders")
    for arguments, code in (
        ([], 2),
        (["orders", "--count", "0"], 2),
        (["orders", "--count", "2001"], 2),
        (["orders", "--from", "-1"], 2),
        (["orders", "-p", "1"], 1),
        (["nothing"], 1),
        (["\ud800"], 1),
    ):
        ended = run("timeline", *arguments)
        assert ended.code == code, (arguments, ended)
        assert "Traceback" not in ended.err
