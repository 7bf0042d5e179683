"""Configurations compared with confluent-kafka's, where that is installed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from txnstore.clients.configuration.configuration import consumer_configuration, producer_configuration
from txnstore.clients.configuration.keys import KEYS_BY_ALIAS

URL = "sqlite:///log.db"
TRANSACTIONAL = {"transactional.id": "x"}

VALUES: dict[str, list] = {
    "linger.ms": ["abc", "5000", " 5", "", None, True, -5, "-5", b"5", [5], "00", "+5", "1e3", 5.7, "none"],
    "batch.size": ["abc", "1", "", None, True, 0, "0x10", 1.0, "999"],
    "enable.idempotence": ["true", "t", "1", "yes", "TRUE", "no", True, 0, 2, "", None, "maybe", " true"],
    "compression.type": ["none", "GZIP", "bad", "", None, 1, "snappy,lz4", "inherit"],
    "acks": ["all", "-1", 0, 2, 1001, "ALL", "one", "", -2],
    "partitioner": ["random", "murmur2_random", "bad", "", None, "Consistent"],
    "isolation.level": ["READ_COMMITTED", "read_uncommitted", "0", "bad", ""],
    "auto.offset.reset": ["earliest", "LATEST", "none", "smallest", "error", "", "bad"],
    "partition.assignment.strategy": ["range", "cooperative-sticky", "range, roundrobin", "range,range"],
    "transaction.timeout.ms": [999, 1000, 2**31 - 1],
    "message.timeout.ms": [-1, 0],
    "session.timeout.ms": [0, 1, 3_600_001],
    "max.poll.interval.ms": [1000, 45_000, 86_400_001],
    "fetch.max.bytes": [100, 1_000_000, 2_147_483_136],
    "debug": ["nonsense"],
    "security.protocol": ["bad", "PLAINTEXT"],
    "log_level": [9, "3"],
    "statistics.interval.ms": [-1, 1, 86_400_001],
    "foo": [1],
    "on_delivery": [5, print, None],
    "on_commit": [5, print, None],
    "error_cb": [5, None, print],
    "stats_cb": [5, None, print],
    "throttle_cb": [5, None, print],
    "oauth_cb": [5],
    "client.id": ["", None, 5, ["a"]],
    "transactional.id": ["", None, "x"],
    "max.in.flight": [0, 5, 1_000_001],
}
#: Configurations that both judge alike; where they differ on purpose, the tests above say so.
COMPARED: list[tuple[dict, str]] = [
    ({name: value}, client)
    for client in "PC"
    for name, values in VALUES.items()
    for value in values
] + [
    (settings, "P")
    for settings in (
        *(
            TRANSACTIONAL | more
            for more in (
                {"acks": 1}, {"enable.idempotence": False}, {"max.in.flight": 6}, {"retries": 0},
                {"message.timeout.ms": 70_000}, {"message.timeout.ms": 60_000}, {"message.timeout.ms": 0},
                {"transaction.timeout.ms": 500}, {"queuing.strategy": "lifo"}, {"linger.ms": 70_000},
                {"transaction.timeout.ms": 5000, "linger.ms": 6000}, {"message.timeout.ms": 10, "linger.ms": 20},
                {"acks": 1, "retries": 0}, {"acks": 1, "max.in.flight": 9, "enable.idempotence": False},
            )
        ),
        {"enable.idempotence": True, "acks": 0},
        {"enable.idempotence": True, "retries": 0},
        {"enable.idempotence": True, "max.in.flight": 6},
        {"message.timeout.ms": 10, "linger.ms": 20},
        {"message.timeout.ms": 5, "linger.ms": 5},
        {"message.timeout.ms": 3},
        {"bootstrap_servers": "x"},
    )
] + [
    (settings, "C")
    for settings in (
        {"group.protocol": "consumer"},
        {"group.protocol": "consumer", "session.timeout.ms": 5000},
        {"group.protocol": "consumer", "heartbeat.interval.ms": 5},
        {"group.protocol": "consumer", "partition.assignment.strategy": "range"},
        {"partition.assignment.strategy": "sticky"},
        {"partition.assignment.strategy": "range,cooperative-sticky"},
        {"fetch.message.max.bytes": 0},
        {"fetch.max.wait.ms": 5},
        {"max.poll.records": 5},
    )
]  # fmt: skip


def test_every_key_of_librdkafka_is_known():
    """Its key names, with their type, as the file of the shared reference lists them."""
    confluent_kafka = pytest.importorskip("confluent_kafka", reason="compares with confluent-kafka where it is there")
    names = _names_in(Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs"))
    assert len(names) > 180
    assert names - KEYS_BY_ALIAS.keys() == set()


def _names_in(folder: Path) -> set[str]:
    """Return the names that librdkafka prints of its own properties."""
    import ctypes
    import tempfile

    (library,) = folder.glob("librdkafka-*.so*")
    functions, c = ctypes.CDLL(str(library)), ctypes.CDLL(None)
    c.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(c.fdopen(file.fileno(), b"w"))
        functions.rd_kafka_conf_properties_show(stream)
        c.fflush(stream)
        file.seek(0)
        rows = [line.split("|") for line in file.read().decode().splitlines()]
    return {row[0].strip() for row in rows if len(row) > 4 and row[1].strip() in {"P", "C", "*"}}


def test_configurations_are_judged_as_confluent_kafka_does():
    confluent_kafka = pytest.importorskip("confluent_kafka", reason="compares with confluent-kafka where it is there")
    differences = {}
    for settings, client in COMPARED:
        their_client = confluent_kafka.Producer if client == "P" else confluent_kafka.Consumer
        configure = producer_configuration if client == "P" else consumer_configuration
        theirs = _judgement(their_client, "localhost:1", settings)
        ours = _judgement(lambda given, configure=configure: configure((given,), {}), URL, settings)
        if ours != theirs:
            differences[ascii(settings), client] = (ours, theirs)
    assert differences == {}


def _judgement(make, url: str, settings: dict) -> tuple:
    quiet = {"bootstrap.servers": url, "group.id": "g", "logger": logging.getLogger("quiet")}
    try:
        client = make(quiet | settings)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        text = error.args[0].str() if hasattr(error.args[0], "str") else str(error.args[0])
        # A hint is ours; librdkafka has a line break too many and a space too few.
        text = text.partition(" (did you mean")[0].strip().replace("`must", "` must")
        return type(error).__name__, text
    if hasattr(client, "close"):
        client.close()
    return ("accepted",)
