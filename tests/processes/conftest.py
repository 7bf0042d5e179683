"""What the tests with processes share: processes that end with the tests, killed, stopped and started again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from multiprocessing.connection import wait

import pytest

from tests.tools.fork_server import fork_server
from tests.tools.workload import run_job

#: How long a process may take to end once it is killed, or to say what it was asked.
PATIENCE_SECONDS = 60


class Processes:
    """Processes that run a job each, and end with this one at the latest."""

    def __init__(self):
        self._context = fork_server()
        self._started = []
        self._pipes = []

    def start(self, program, job, *arguments):
        process = self._context.Process(target=run_job, args=(program, job, *arguments), name=job.process, daemon=True)
        process.start()
        self._started.append(process)
        return process

    def start_with_pipe(self, program, job, *arguments):
        """Start a program that talks over a pipe, and return our end of it too."""
        ours, theirs = self._context.Pipe()
        process = self.start(program, job, theirs, *arguments)
        theirs.close()
        self._pipes.append(ours)
        return process, ours

    def kill(self, process):
        self._signal(process, signal.SIGKILL)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode is not None, f"{process.name} outlives SIGKILL"

    def stop(self, process):
        self._signal(process, signal.SIGSTOP)

    def go_on(self, process):
        self._signal(process, signal.SIGCONT)

    def ask_to_end(self, process):
        self._signal(process, signal.SIGTERM)

    def _signal(self, process, number):
        # The number of a process that has ended may be another one's by now.
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill_all(self):
        for process in self._started:
            self.kill(process)
        for pipe in self._pipes:
            pipe.close()


@pytest.fixture
def processes():
    started = Processes()
    yield started
    started.kill_all()


@pytest.fixture
def wait_for():
    """Wait until one of these processes ends or pipes has something, or the time is over; return which."""

    def wait_for(objects, timeout_seconds):
        return wait([getattr(each, "sentinel", each) for each in objects], timeout_seconds)

    return wait_for


@pytest.fixture
def lives():
    """Number the lives of each process."""
    counters: dict[str, itertools.count] = {}

    def next_life(name):
        return next(counters.setdefault(name, itertools.count(1)))

    return next_life
