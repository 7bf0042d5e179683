"""The invariants of a store by name, and how a checker says that one does not hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Invariant(enum.Enum):
    """What holds in a store at every moment; the last three, once nothing is open or half done."""

    OFFSETS_FOLLOW = "the batches of a partition follow each other without gap or overlap, up to the high watermark"
    BATCHES_WHOLE = "a batch agrees with its checksum and has as many records as offsets"
    TIMES_RUN = "the running maximum of timestamps is that of the batches, up to the partition's head"
    SEQUENCES_FOLLOW = "the sequence numbers of a producer's epoch follow each other: nothing lost, nothing twice"
    EPOCHS_RISE = "a producer's epoch never falls in a partition, and a marker's is above that of its records"
    PRODUCERS_KNOWN = "what a partition knows of a producer is what its log says"
    INDEX_KNOWN = "the index of finished transactions is what the log says"
    COMMITTED_VISIBLE = "a reader of committed records gets these and no others, up to the last stable offset"

    MOVES_LEGAL = "each entry of the journal may follow the one before it"
    JOURNAL_CURRENT = "the last entry of the journal is what the coordinator's row says"
    IDENTITIES_UNIQUE = "no two transactions have the same producer id and epoch, and those of one producer id rise"
    PRODUCER_IDS_GIVEN = "a producer id was given out, and to one transactional id only"
    DECISION_STANDS = "markers and committed offsets of a transaction are those that the journal decided on"
    ALL_OR_NOTHING = "a transaction has the same outcome in all of its partitions"
    PARTICIPANTS_KNOWN = "the partitions and groups of a transaction are those that hold something of it"
    OUTBOX_RIGHT = "the outbox holds the markers that a decided transaction still needs, and no others"
    NOTHING_HANGS = "what is open in a partition or pending in a group belongs to an open or decided transaction"

    COPIES_CURRENT = "the databases of a cluster have the controller's topics, and the logs of what lives in them"

    NOTHING_OPEN = "at rest no transaction is open or decided"
    NOTHING_QUEUED = "at rest nothing is left in the outbox, of participants, or of pending offsets"
    ALL_STABLE = "at rest the last stable offset of each partition is its high watermark"


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold."""

    invariant: Invariant
    detail: str
    """Where, and what was found."""

    def __str__(self) -> str:
        """Return one line of a report."""
        return f"{self.invariant.name} ({self.invariant.value}): {self.detail}"
