"""This file is what can be wrong with a history: one check a kind of anomaly, each under its name.

    assert find_anomalies(History.of(events)) == []

A check looks at a whole history and says what breaks its rule.  The rules follow Jepsen's and Elle's definitions for
logs and transactions, worked out for one store: a poll is one snapshot, and a transaction flips at one instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tests.tools.histories import History
from tests.tools.isolation_anomalies import ISOLATION_CHECKS
from tests.tools.log_anomalies import LOG_CHECKS
from tests.tools.producer_anomalies import PRODUCER_CHECKS

#: Every check by the name of what it finds.
CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {**LOG_CHECKS, **ISOLATION_CHECKS, **PRODUCER_CHECKS}
)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One thing that is wrong."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def find_anomalies(history: History) -> list[Anomaly]:
    """Return everything that is wrong with the history, by the order of `CHECKS`."""
    return [Anomaly(name, detail) for name, check in CHECKS.items() for detail in check(history)]
