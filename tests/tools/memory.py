"""What calls in C do with memory: they keep no object that they should let go, and garbage may be collected in them."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def assert_nothing_is_kept(
    turn: Callable[[], object], counted: Sequence[object], *, turns: int, references_max: int, bytes_max: int
) -> None:
    """Take turns, and show that neither references to what is `counted` nor Python's memory become more by them."""

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(each) for each in counted]

    turn()
    before = counts()
    tracemalloc.start()
    try:
        turn()
        gc.collect()
        held_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(turns):
            turn()
        gc.collect()
        grown_bytes = tracemalloc.get_traced_memory()[0] - held_bytes
    finally:
        tracemalloc.stop()
    assert all(abs(now - then) < references_max for now, then in zip(counts(), before, strict=True))
    assert grown_bytes < bytes_max


@contextmanager
def called_as_garbage_is_collected(call: Callable[[], object]) -> Iterator[None]:
    """Let Python collect garbage at nearly each container that is made in the body, and make the call then."""
    is_inside = False

    def once(phase: str, _: dict[str, int]) -> None:
        nonlocal is_inside
        if phase == "stop" and not is_inside:
            is_inside = True
            try:
                call()
            finally:
                is_inside = False

    thresholds = gc.get_threshold()
    gc.callbacks.append(once)
    gc.set_threshold(1, 1_000_000, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(once)
