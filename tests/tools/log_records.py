"""What was logged, without what threads of other tests say meanwhile."""

from __future__ import annotations

import logging
import threading

import pytest


def records_of_this_thread(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what the calling thread has logged during its test."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]
