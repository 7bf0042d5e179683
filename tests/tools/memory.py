"""What calls in C do with memory: they keep no object that they should let go, and garbage may be collected in them."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_ATTEMPTS_MAX: Final = 20


def assert_nothing_is_kept(
    turn: Callable[[], object], counted: Sequence[object], *, turns: int, references_max: int, bytes_max: int
) -> None:
    """Take turns, and show that neither references to what is `counted` nor Python's memory become more by them.

    Both are the whole process's, whose other threads may keep something just then: what turns keep is kept each time.
    """
    turn()
    for _ in range(_ATTEMPTS_MAX):
        references, grown_bytes = _kept(turn, counted, turns)
        if max(references) < references_max and grown_bytes < bytes_max:
            break
    assert max(references) < references_max, references
    assert grown_bytes < bytes_max


def _kept(turn: Callable[[], object], counted: Sequence[object], turns: int) -> tuple[list[int], int]:
    """Return by how much the references to each and the bytes of memory differ behind the turns."""

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(each) for each in counted]

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
    return [abs(now - then) for now, then in zip(counts(), before, strict=True)], grown_bytes


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
