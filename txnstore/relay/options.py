"""This file is what the operator of a relay chooses, in either direction."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Start(enum.Enum):
    """Where a relay begins in a partition in which it has no position yet."""

    EARLIEST = "earliest"
    LATEST = "latest"


class OnGap(enum.Enum):
    """What a relay does when records that it has not copied are gone: deleted, or the topic was made anew."""

    ERROR = "error"
    EARLIEST = "earliest"
    """Goes on with the first record there is."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The operator's choices."""

    name: str | None = None
    """Relays of one name share positions; by default the identity of what is read: the store's or the cluster's."""

    topics: Sequence[str] = ()
    """Which topics; all that there are, also later ones, by default."""

    start: Start = Start.EARLIEST
    on_gap: OnGap = OnGap.ERROR
    once: bool = False
    """Whether it ends where the partitions ended when it began."""

    patience_seconds: float = 60.0
    """How long a relay that ends by itself puts up with trouble; another one does for ever."""


#: Whether somebody wants the relay to end.
IsStopped = Callable[[], bool]
