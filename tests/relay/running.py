"""Relays that run in threads while a test goes on: what one of them raises, the test raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

SECONDS = 60.0


@contextmanager
def beside(*runs: Callable[[threading.Event], int]) -> Iterator[list[Future[int]]]:
    """Call each in a thread of its own while the body runs, then tell them to end.

    Raises:
        Exception: what one of them raised, with what the body raised after it, if it did, as its context.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run, stop) for run in runs]
        try:
            yield futures
        finally:
            stop.set()
            for future in futures:
                future.result(SECONDS)


def wait_until(condition: Callable[[], object], timeout_seconds: float = SECONDS) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(0.02)
