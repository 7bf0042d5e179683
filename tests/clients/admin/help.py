"""Helpers of the admin client's tests: a store behind its back, and how futures end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from txnstore import KafkaError, KafkaException

PATIENCE_SECONDS = 60

#: Text that is not a name of anything, with the form in which no database may see it.
HOSTILE_TEXTS = ("", "a\0b", "\ud800", "x" * 1001, "\U0001f600" * 301)
#: Text that is unusual, and a name nevertheless.
UNUSUAL_TEXTS = (
    "'; DROP TABLE groups;--",
    "%_",
    "a b ",
    "\u00e9",
    "e\u0301",
    "\u202e\U0001f600",
    "$1 :name ? {} %s",
    "a\n\x1b[31m",
)


def result(future: Future[Any]) -> Any:
    return future.result(PATIENCE_SECONDS)


def error_of(future: Future[Any]) -> KafkaError:
    """Return the error that the future fails with."""
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, KafkaException), error
    found: KafkaError = error.args[0]
    return found
