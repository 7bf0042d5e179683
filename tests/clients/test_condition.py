"""Interrupts of the main thread while it enters, leaves and waits for a condition: its lock is free afterwards."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTS = 300
#: Threads and a main thread that share a condition; a timer's signals come at any instruction of the latter.
PROGRAM = """
import random, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from txnstore.deadline import Condition, new_future

interrupts, what = int(sys.argv[1]), sys.argv[2]
numbers = random.Random(1)
signal.signal(signal.SIGALRM, signal.default_int_handler)


def is_free(lock):
    got = lock.acquire(timeout=float(sys.argv[3]))
    if got:
        lock.release()
    return got


def wait(condition):
    with condition:
        with condition:
            condition.wait(0)
            condition.wait(0.00001)


with ThreadPoolExecutor(1) as other:
    for number in range(interrupts):
        condition = {"ours": Condition, "standard": lambda: threading.Condition(threading.RLock())}[what]()
        future = new_future()
        if what == "standard":
            future._condition = condition
        try:
            signal.setitimer(signal.ITIMER_REAL, numbers.uniform(0.0001, 0.0005))
            while True:
                wait(condition)
                future.done()
        except KeyboardInterrupt:
            pass
        locks = [condition, future._condition]
        if not other.submit(lambda: all(map(is_free, locks))).result():
            sys.exit(f"interrupt {number} left the lock taken")
        assert not condition._waiters
"""


def interrupted(what, seconds):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(INTERRUPTS), what, str(seconds)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_interrupt_leaves_a_condition_free():
    ended = interrupted("ours", 60)
    assert (ended.returncode, ended.stderr) == (0, "")
