"""The work of children that are killed: functions of a module, so that another process finds them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.participants.bank import Bank, Table
from tests.participants.dying import kill_at
from txnstore.db.opening import open_store
from txnstore.testing.manual_clock import ManualClock


@dataclass(frozen=True)
class Task:
    """A transfer, and the place where the process that makes it is killed."""

    log_url: str
    table_urls: tuple[str, ...]
    now_ms: int
    partition_id: int
    name: str
    place: int


def transfer_and_be_killed(task: Task) -> None:
    with open_store(task.log_url, clock=ManualClock(task.now_ms)) as store:
        bank = Bank(store, ManualClock(task.now_ms), [Table(url) for url in task.table_urls], task.partition_id)
        transfer = bank.written(name=task.name)
        kill_at(task.place, transfer.commit)
        bank.close()
