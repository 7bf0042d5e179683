"""Transactions of one process side by side: none waits in Python for what another one asks its database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

from tests.clients.steps import PATIENCE_SECONDS
from txnstore.transactions import rows
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.rows import NO_PARTICIPANTS
from txnstore.transactions.transaction import LockedTransaction


# No database: what it would answer does not matter, only who may ask at the same time.
def test_two_transactions_ask_for_their_participants_at_the_same_time(new_row, monkeypatch):
    both_ask = Barrier(2)

    def participants_of(connection, transactional_id):
        both_ask.wait(PATIENCE_SECONDS)
        return replace(NO_PARTICIPANTS)

    connection: Any = None
    monkeypatch.setattr(rows, "participants_of", participants_of)
    transactions = [LockedTransaction(connection, new_row(TransactionState.ONGOING), now_ms=0) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda transaction: transaction.participants, transactions))
    assert found[0] is not found[1]
    assert transactions[0].participants is found[0], "asked for once"
