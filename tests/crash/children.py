"""What children do that are killed: functions of a module, so that another process finds them."""

from __future__ import annotations

from typing import Final

from tests.crash.afterlives import start_producer
from tests.crash.scenarios import ALL, FIRST, SENT, Scenario
from tests.crash.sinking import SINKING_BY_NAME
from tests.crash.worlds import Place, Victim, World
from tests.crash.writing_together import TOGETHER_BY_NAME
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.model import ControlType
from txnstore.testing.manual_clock import ManualClock

START: Final = Scenario(
    "a start over an open transaction",
    SENT,
    start_producer,
    [FIRST],
    has_offsets=True,
    ends_in=ControlType.ABORT,
    is_producers=False,
)
BY_NAME: Final = {scenario.name: scenario for scenario in (*ALL, START)}

#: The name of a scenario, and the world that it happens in.
Task = tuple[str, World]


def open_victim(task: Task) -> tuple[str, Victim]:
    name, world = task
    return name, Victim(world, Place(world.url, ManualClock(world.now_ms)).open())


def call(subject: tuple[str, Victim]) -> None:
    name, victim = subject
    BY_NAME[name].call(victim.world, victim.store)
    victim.store.close()


def call_together(subject: tuple[str, Victim]) -> None:
    name, victim = subject
    case = TOGETHER_BY_NAME[name] if name in TOGETHER_BY_NAME else SINKING_BY_NAME[name]
    case.call(victim.world, victim.store)
    victim.store.close()


def use_first(url: str) -> None:
    open_store(url).close()


def open_plainly(url: str) -> Store:
    return open_store(url)


def look_twice(store: Store) -> None:
    store.read(lambda connection: [connection.exec_driver_sql(f"SELECT {number}") for number in (1, 2)])


def fail(url: str) -> None:
    raise ZeroDivisionError("on purpose")
