"""The way of many rows, for tests that have a few: what is written for all of them goes to a server in lists."""

from __future__ import annotations

import pytest

from txnstore.db import statements
from txnstore.log import partition_rows


def be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take two rows for many from now on."""
    monkeypatch.setattr(statements, "_AT_ONCE_FROM", 2)
    monkeypatch.setattr(partition_rows, "_FEW_MAX", 0)
