"""The tables by subject, which everybody takes from `schema.py`."""

from __future__ import annotations

# Tables are made, copied and described in this order, whichever of them is imported first.
# isort: off
from txnstore.db.tables import databases  # noqa: F401
from txnstore.db.tables import topics  # noqa: F401
from txnstore.db.tables import log  # noqa: F401
from txnstore.db.tables import transactions  # noqa: F401
from txnstore.db.tables import groups  # noqa: F401
from txnstore.db.tables import outbox  # noqa: F401
from txnstore.db.tables import sinks  # noqa: F401
from txnstore.db.tables import maintenance  # noqa: F401
