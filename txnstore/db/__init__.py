"""The database layer: the tables, the seam between SQLite and PostgreSQL, and database transactions."""

from __future__ import annotations
