"""The outbox: records written in the application's own database transaction, with its own rows or not at all.

outbox = Outbox("postgresql://localhost/shop")
with engine.begin() as connection:
    connection.execute(insert(orders), {"id": 7})
    outbox.produce(connection, "orders", b"created", key="7")
"""

from __future__ import annotations

from txnstore.outbox.changes import Change, ChangeKind, Watch
from txnstore.outbox.outbox import Outbox, OutboxConnection

__all__ = ["Change", "ChangeKind", "Outbox", "OutboxConnection", "Watch"]
