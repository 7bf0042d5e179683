"""Crashes that no code of ours can soften: a child process is killed (SIGKILL) at one step after another.

    for killed in every_kill(lambda: url, produce_two_records):
        with open_store(url) as store:
            assert len(offsets(store)) % 2 == 0, killed

What the database finds then is what a real crash of a client leaves: locks, an unfinished write-ahead log, a
connection that ends in the middle. Needs POSIX.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Connection

from tests.tools.crashes import CrashPoint, When, at_each_step, every_side
from tests.tools.fork_server import fork_server

Argument = TypeVar("Argument")
Subject = TypeVar("Subject")

#: How long a child may live that is not killed.
CHILD_TIMEOUT_SECONDS: Final = 180.0


def itself(argument: Any) -> Any:
    """Return the argument: it is what the action works on."""
    return argument


class ChildFailedError(Exception):
    """The action failed in a child, or did not come to an end: the text has the child's traceback."""


@dataclass(frozen=True, slots=True)
class Killed(Generic[Argument]):
    """What a killed process has left."""

    argument: Argument
    point: CrashPoint

    def __str__(self) -> str:
        """Return where it happened, for messages."""
        return f"killed {self.point}"


def every_kill(
    make: Callable[[], Argument],
    action: Callable[[Subject], object],
    *,
    prepare: Callable[[Argument], Subject] = itself,
    points: Sequence[CrashPoint] | None = None,
    statements_are_all: bool = False,
) -> Iterator[Killed[Argument]]:
    """Yield what is left by a process that is killed in `action`, at each side of each of its steps, in order.

    `make` returns an argument for each child, which stands for fresh state. In the child `prepare` turns it into what
    the action works on; what it does is not a step. Argument and functions go to another process, so they can be
    pickled: functions are those of a module. It ends once a child has come to its end untouched. With `points` it is
    killed there alone; with `statements_are_all` once where two sides are the same, see `every_crash`.

    Raises:
        ChildFailedError: the action raised an error.
    """

    def attempt(step: int, when: When) -> Killed[Argument] | None:
        argument = make()
        point = kill_at(step, when, action, argument, prepare=prepare)
        return None if point is None else Killed(argument, point)

    if points is None:
        yield from every_side(attempt, statements_are_all=statements_are_all)
        return
    for point in points:
        killed = attempt(point.step, point.when)
        assert killed is not None, f"the child was to be killed {point}"
        assert killed.point == point, f"its step was another one: {killed.point}, not {point}"
        yield killed


def kill_at(
    step: int,
    when: When,
    action: Callable[[Subject], object],
    argument: Argument,
    *,
    prepare: Callable[[Argument], Subject] = itself,
) -> CrashPoint | None:
    """Run the action in a child that is killed there, and return where that was; None if it came to its end before.

    Raises:
        ChildFailedError: the action raised an error.
    """
    context = fork_server(action.__module__)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(sender, step, when, action, argument, prepare), daemon=True)
    child.start()
    sender.close()
    child.join(CHILD_TIMEOUT_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise ChildFailedError(f"the child did not end within {CHILD_TIMEOUT_SECONDS} s")
    with receiver:
        told = _received(receiver)
    exit_code = child.exitcode
    child.close()
    if exit_code == -signal.SIGKILL and isinstance(told, CrashPoint):
        return told
    if exit_code == 0 and told is None:
        return None
    raise ChildFailedError(f"the child ended with exit code {exit_code}:\n{told}")


def _received(receiver: Pipe) -> object:
    try:
        return receiver.recv()
    except EOFError:
        return None


def _run_child(
    sender: Pipe,
    step: int,
    when: When,
    action: Callable[[Subject], object],
    argument: Argument,
    prepare: Callable[[Argument], Subject],
) -> None:
    def kill(connection: Connection, point: CrashPoint) -> None:
        if (point.step, point.when) == (step, when):
            sender.send(point)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        subject = prepare(argument)
        with at_each_step(kill):
            action(subject)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent says it
        sender.send(traceback.format_exc())
        os._exit(1)
