"""What is imported late: the collector of garbage waits meanwhile, and goes on in every process."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext

import pytest

from txnstore.late_import import collecting_later

PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def _collecting():
    assert gc.isenabled()
    yield
    gc.enable()


def collects_in_child(*, inside: bool) -> tuple[bool, bool]:
    """Whether a child that is forked now collects garbage at once, and once its own thread's import is over."""
    ours, theirs = os.pipe()
    at_once = False
    child = -1
    try:
        with collecting_later() if inside else nullcontext():
            child = os.fork()
            at_once = gc.isenabled()
        if child == 0:
            os.write(theirs, bytes([at_once, gc.isenabled()]))
    finally:
        if child == 0:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    assert len(told) == 2
    return bool(told[0]), bool(told[1])


def test_nothing_is_collected_meanwhile_and_afterwards_as_before():
    with collecting_later():
        assert not gc.isenabled()
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with collecting_later():
        pass
    assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_collects_garbage_though_a_thread_that_it_does_not_have_was_importing():
    begun, over = threading.Event(), threading.Event()

    def import_for_long():
        with collecting_later():
            begun.set()
            over.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=import_for_long)
    thread.start()
    try:
        assert begun.wait(PATIENCE_SECONDS)
        assert collects_in_child(inside=False) == (True, True)
    finally:
        over.set()
        thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_child_of_the_thread_that_imports_goes_on_as_its_parent_does(is_wanted):
    if not is_wanted:
        gc.disable()
    assert collects_in_child(inside=True) == (False, is_wanted)
    assert collects_in_child(inside=False) == (is_wanted, is_wanted)
