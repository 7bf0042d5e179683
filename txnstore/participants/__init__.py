"""The participants: other PostgreSQL databases that vote on a transaction and end their share of it as it ends."""

from __future__ import annotations
