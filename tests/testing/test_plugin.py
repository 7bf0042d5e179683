"""The plugin in a suite of somebody else's: what it does where there is no PostgreSQL, and at the end of a test."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sqlalchemy import update

from txnstore import Producer
from txnstore.db.opening import open_store
from txnstore.db.schema import partition_heads
from txnstore.testing.invariants import assert_sound

SUITE = """
from txnstore.testing import servers

servers.why_no_container = lambda _: "no container engine answers"

def test_on_postgresql(txnstore_postgresql_url):
    pass
"""
SOURCES = ("TXNSTORE_TEST_POSTGRES", "TXNSTORE_TEST_POSTGRES_URL", "TXNSTORE_TEST_POSTGRES_PROGRAMS")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"TXNSTORE_TEST_POSTGRES": "docker"}, "'docker' is not one of"),
        ({"TXNSTORE_TEST_POSTGRES": "url"}, "needs TXNSTORE_TEST_POSTGRES_URL"),
        ({"TXNSTORE_TEST_POSTGRES": "testcontainers"}, "but no container engine answers"),
        ({"TXNSTORE_TEST_POSTGRES_PROGRAMS": "/nowhere"}, "/nowhere"),
        ({"TXNSTORE_TEST_POSTGRES": "none"}, None),
    ],
)
def test_a_source_that_was_named_and_is_not_there_fails_and_none_is_skipped(tmp_path, asked, told):
    (tmp_path / "test_it.py").write_text(SUITE)
    environment = {name: value for name, value in os.environ.items() if name not in SOURCES}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "txnstore.testing.plugin", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=environment | asked,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if told is None:
        assert (done.returncode, "1 skipped" in done.stdout) == (0, True), done.stdout + done.stderr
    else:
        assert (done.returncode, told in done.stdout) == (1, True), done.stdout + done.stderr


FROZEN = """
import freezegun
from txnstore import Consumer, Producer

@freezegun.freeze_time("2024-02-29")
def test_in_one_moment(tmp_path):
    url = f"sqlite:///{tmp_path}/log.db"
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("orders", "a book")
        assert producer.flush(20) == 0
    with Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["orders"])
        assert consumer.poll(20).value() == b"a book"
        assert consumer.poll(0.1) is None
"""
#: In the place of the real one.
STAND_IN = """
def configure(extend_ignore_list):
    global ignored
    ignored = extend_ignore_list
"""
CONFIGURED = """
import freezegun

ignored = freezegun.ignored

def test_before_the_tests_are_imported():
    assert ignored == ["txnstore."]
"""


@pytest.mark.slow
@pytest.mark.parametrize("files", [{"freezegun": STAND_IN, "test_it": CONFIGURED}, {"test_it": FROZEN}])
def test_frozen_time_stands_still_for_the_tests_alone(tmp_path, files):
    if "freezegun" not in files:
        pytest.importorskip("freezegun")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "txnstore.testing.plugin", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "TXNSTORE_TEST_POSTGRES": "none"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
def test_damage_is_found_under_any_optimisation(txnstore_sqlite_url):
    with Producer({"bootstrap.servers": txnstore_sqlite_url}) as producer:
        producer.produce("orders", "a book")
    assert_sound(txnstore_sqlite_url)
    with open_store(txnstore_sqlite_url) as store:
        more = update(partition_heads).values(next_offset=partition_heads.c.next_offset + 1)
        store.write(lambda connection: connection.execute(more))
    program = f"from txnstore.testing.invariants import assert_sound\nassert_sound({txnstore_sqlite_url!r})"
    for options in ([], ["-O"]):
        done = subprocess.run(
            [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, "the store breaks its invariants" in done.stderr) == (1, True), options
