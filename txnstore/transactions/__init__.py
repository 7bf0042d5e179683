"""The transaction coordinator: states and rules as tables in pure modules, and database transactions around them."""

from __future__ import annotations
