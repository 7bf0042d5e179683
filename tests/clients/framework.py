"""What a framework's program is made of: a topic with records, a loop that polls, and a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from tests.clients.steps import PATIENCE_SECONDS
from txnstore import (
    Message,
    Producer,
)


def received(consumer, count):
    """Poll until that many records came, in short steps as frameworks do."""
    records: list[Message] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(records) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            records.append(message)
    assert len(records) == count
    return records


@pytest.fixture
def produced(url):
    """A topic with ten records."""
    with Producer({"bootstrap.servers": url}) as producer:
        for number in range(10):
            producer.produce("t", str(number), partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
    return "t"


def run(program, *arguments):
    """Run a program of its own, which has to end by itself and say nothing on stderr; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS * 2,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
