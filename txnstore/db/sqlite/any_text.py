"""Text that others have written: SQLite keeps any bytes as text, where PostgreSQL refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection


@contextmanager
def any_text(connection: Connection) -> Iterator[None]:
    """Read bytes that are not UTF-8 as halves of surrogate pairs meanwhile, instead of failing."""
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    before = driver.text_factory
    driver.text_factory = _decoded
    try:
        yield
    finally:
        driver.text_factory = before


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
