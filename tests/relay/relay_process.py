"""A relay as a process of its own, to be killed: forked from one that has imported everything."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.tools.fork_server import fork_server
from txnstore import cli

SECONDS = 60.0

#: Kill itself at the second call of this name of the producer's, on this side.
Point = tuple[str, str]


def start(arguments, point: Point | None = None):
    """Start `txnstore relay` with these arguments."""
    context = fork_server(__name__, "txnstore.cli.program", "confluent_kafka.admin")
    process = context.Process(target=_run, args=[[str(argument) for argument in arguments], point], daemon=True)
    process.start()
    return process


def kill(process) -> None:
    process.kill()
    join(process)


def join(process):
    process.join(SECONDS)
    assert process.exitcode is not None, "the relay does not end"
    return process.exitcode


def _run(arguments, point):
    if point is not None:
        _die_at(*point)
    cli.main(["relay", *arguments])


def _die_at(call, side):
    import confluent_kafka

    original: Any = confluent_kafka.Producer

    class Producer(original):
        count = 0

        def die(self, at):
            # The second time: the first is the transaction with the position that a relay begins with.
            Producer.count += at == "before"
            if Producer.count == 2 and at == side:
                self.flush(10)
                os.kill(os.getpid(), signal.SIGKILL)

    def called(self, *arguments):
        self.die("before")
        result = getattr(original, call)(self, *arguments)
        self.die("after")
        return result

    setattr(Producer, call, called)
    confluent_kafka.Producer = Producer
