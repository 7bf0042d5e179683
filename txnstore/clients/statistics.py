"""This file is what a client tells its `stats_cb` every `statistics.interval.ms`: JSON with librdkafka's names.

Of librdkafka's many fields those are there that mean something without brokers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

_MICROSECONDS: Final = 1_000_000


class Statistics:
    """The statistics of one client; holds no client, so that one can be dropped."""

    def __init__(
        self,
        *,
        name: str,
        client_id: str,
        kind: str,
        interval_seconds: float,
        callback: Callable[[str], object] | None,
        add_event: Callable[[Callable[[], object]], None],
        collect: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Tell `callback`, served as an event, what `collect` returns, beside what every client has."""
        self._head = {"name": f"{client_id}#{name}", "client_id": client_id, "type": kind}
        self._interval_seconds = interval_seconds
        self._callback = callback
        self._add_event = add_event
        self._collect = collect
        self._began_seconds = time.monotonic()
        self._next_seconds = self._began_seconds + interval_seconds

    def due_seconds(self, now_seconds: float) -> float | None:
        """Return when they are due, by the monotonic clock; None: never."""
        return None if self._callback is None or self._interval_seconds <= 0 else self._next_seconds

    def run(self) -> None:
        """Let the callback be called; the next time is one interval from now."""
        callback = self._callback
        if callback is None:
            return
        now_seconds = time.monotonic()
        self._next_seconds = now_seconds + self._interval_seconds
        text = json.dumps(
            {
                **self._head,
                "ts": int(now_seconds * _MICROSECONDS),
                "time": int(time.time()),
                "age": int((now_seconds - self._began_seconds) * _MICROSECONDS),
                **self._collect(),
            }
        )
        self._add_event(lambda: callback(text))
