"""The statistics that a client tells its `stats_cb` every `statistics.interval.ms`: JSON with librdkafka's names.

Of librdkafka's many fields those are there that mean something without brokers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from txnstore.clients.brokers import broker_address, broker_nodes
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.metadata import Node

#: As of a thing that was never measured: there are no requests to brokers here.
_NOT_MEASURED: Final = dict.fromkeys(
    (
        *("min", "max", "avg", "sum", "stddev", "hdrsize", "cnt", "outofrange"),
        *("p50", "p75", "p90", "p95", "p99", "p99_99"),
    ),
    0,
)
_COUNTS: Final = dict.fromkeys(
    (
        *(
            "outbuf_cnt",
            "outbuf_msg_cnt",
            "waitresp_cnt",
            "waitresp_msg_cnt",
            "req_timeouts",
            "connects",
            "disconnects",
        ),
        *("tx", "txbytes", "txerrs", "txretries", "rx", "rxbytes", "rxerrs", "rxcorriderrs", "rxpartial"),
    ),
    0,
)
_MICROSECONDS: Final = 1_000_000
#: A database that could not be reached so long ago counts as away.
_RECENT_SECONDS: Final = 5.0


class Traffic:
    """What a client has written to the log, or read from it."""

    __slots__ = ("records", "requests", "size_bytes")

    def __init__(self) -> None:
        """Begin with nothing."""
        self.requests = self.records = self.size_bytes = 0


_NO_TRAFFIC: Final = Traffic()


def traffic_facts(*, written: Traffic = _NO_TRAFFIC, read: Traffic = _NO_TRAFFIC) -> dict[str, int]:
    """Return librdkafka's counters of requests, records (its messages) and bytes."""
    requests = written.requests + read.requests
    return {
        "tx": requests,
        "tx_bytes": written.size_bytes,
        "rx": requests,
        "rx_bytes": read.size_bytes,
        "txmsgs": written.records,
        "txmsg_bytes": written.size_bytes,
        "rxmsgs": read.records,
        "rxmsg_bytes": read.size_bytes,
    }


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
        connection: StoreConnection,
    ) -> None:
        """Tell `callback`, served as an event, what `collect` returns, beside what every client has."""
        self._connection = connection
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
                "simple_cnt": 0,
                "brokers": broker_facts(self._connection),
                **self._collect(),
            }
        )
        self._add_event(lambda: callback(text))


def broker_facts(connection: StoreConnection) -> dict[str, Any]:
    """Return the databases as librdkafka shows brokers; before the first was opened, the one of the configuration."""
    cluster = connection.opened
    if cluster is None:
        nodes, source = [Node(-1, *broker_address(connection.url))], "configured"
    else:
        nodes, source = broker_nodes(cluster), "learned"
    windows = {name: dict(_NOT_MEASURED) for name in ("int_latency", "outbuf_latency", "rtt", "throttle")}
    facts: dict[str, Any] = {}
    for node in nodes:
        address = f"{node.host}:{node.port}"
        name = f"{address}/{'bootstrap' if node.id < 0 else node.id}"
        facts[name] = {
            "name": name,
            "nodeid": node.id,
            "nodename": address,
            "source": source,
            "state": _state(connection),
            **_COUNTS,
            **windows,
            "req": {},
            "toppars": {},
        }
    return facts


def _state(connection: StoreConnection) -> str:
    if connection.trouble_since(time.monotonic() - _RECENT_SECONDS) is not None:
        return "DOWN"
    return "INIT" if connection.opened is None else "UP"
