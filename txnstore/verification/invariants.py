"""The invariants of a store: what each one promises, what to do when it is broken, and where that was found."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

_RESTORE: Final = (
    "stop its writers, keep a copy of the database, and restore a backup; `txnstore dump log` shows what is readable"
)
_RESTORE_HERE: Final = (
    "if a coordinator was restored from a backup, it has lost its last changes: compare what each database holds of the"
    " transaction; else " + _RESTORE
)
_JOURNAL: Final = (
    "find out who wrote to the tables beside txnstore; `txnstore dump journal` and `txnstore transactions describe`"
    " show the history"
)
_FREE: Final = "`txnstore transactions list-open` and `find-hanging` show it, and the command that ends it"
_MAINTAIN: Final = "`txnstore maintain --once` does what is left over; if it stays, keep a copy for a bug report"
_REFUSED: Final = (
    "create the topic, or correct the rows (delete one whose key has a later record already), then set their refusal to"
    " NULL; `txnstore maintain` moves what waits"
)
_BEYOND: Final = (
    "what comes next there may be left out: stop it, and compare what it has written with what is there. Then a relay"
    " goes on with another `--name`, `--topic` and `--start`; a query with another group and checkpoint, and"
    " startingOffsets at the first offset whose record its output lacks"
)
_LAST_BATCH: Final = (
    "its last batch may be written twice, or left out: compare its output, then go on with another checkpoint and"
    " group, and startingOffsets at the first offset whose record its output lacks"
)


class Invariant(enum.Enum):
    """What holds in a store at every moment; the last three, once nothing is open or half done."""

    OFFSETS_FOLLOW = ("the batches of a partition follow each other without gap or overlap, up to its head", _RESTORE)
    BATCHES_WHOLE = ("a batch agrees with its checksum and has as many records as offsets", _RESTORE)
    TIMES_RUN = (
        "the running maximum of timestamps is that of all records that were appended, up to the partition's head",
        "reads by time may miss records of this partition: read it by offset",
    )
    SEQUENCES_FOLLOW = (
        "the sequence numbers of a producer's epoch follow each other: nothing lost, nothing twice",
        "compare the records around the offset with what the producer sent: `txnstore dump log`",
    )
    EPOCHS_RISE = (
        "a producer's epoch never falls in a partition, and a marker's is above that of its records",
        "compare the records around the offset with what the producer sent: `txnstore dump log`",
    )
    PRODUCERS_KNOWN = (
        "what a partition knows of a producer is what its log says",
        "restart the producer, so that it writes with a new producer id or epoch; keep a copy for a bug report",
    )
    INDEX_KNOWN = (
        "the index of finished transactions is what the log says: each marker has its transaction, and the reverse",
        "readers of committed records may get aborted ones or miss some: stop them, and restore a backup",
    )
    COMMITS_NUMBERED = (
        "the numbers of commits grow along a partition, and only one transaction has a number",
        "consumers of whole transactions may get them in a wrong order, or two as one: keep a copy for a bug report",
    )
    COMMITTED_VISIBLE = (
        "a reader of committed records gets these and no others, up to the last stable offset",
        "readers of committed records may get aborted ones or miss some: stop them, and keep a copy for a bug report",
    )
    STORAGE_KNOWN = (
        "the size counted for batches, and the one that each states, is right; none lies below where they begin",
        "retention by size and compaction of this partition come too early or too late; keep a copy for a bug report",
    )

    ONE_OF_EACH_KEY = (
        "below where a partition is compacted there is one committed record of each key, and none that should be gone",
        "tables built from this topic may keep old values: write the keys again, and keep a copy for a bug report",
    )

    INDEXES_WHOLE = (
        "each index has what its table has, as far as the database can compare them: SQLite, or PostgreSQL by amcheck",
        "what is read by it may miss rows, or see old ones: stop all writers, keep a copy of the database, and REINDEX",
    )

    TABLES_WHOLE = (
        "each table has the keys, checks and NOT NULL that it was made with, to which the database holds its rows",
        (
            "stop all writers, and put back on PostgreSQL, by ALTER TABLE, what `txnstore migrate --sql` prints of it;"
            " on SQLite move the store into a new file, whose tables have it all: `txnstore copy --even-if-damaged`"
        ),
    )

    MOVES_LEGAL = ("each entry of the journal may follow the one before it", _JOURNAL)
    JOURNAL_CURRENT = ("the last entry of the journal is what the coordinator's row says", _JOURNAL)
    IDENTITIES_UNIQUE = (
        "no two transactions have the same producer id and epoch, and those of one producer id rise",
        _JOURNAL,
    )
    PRODUCER_IDS_GIVEN = (
        "a producer id was given out, and to one transactional id only",
        "stop all writers: two producers may take each other's records for repetitions; restore a backup",
    )
    NUMBERS_AHEAD = (
        "the numbers that the database gives out to rows and commits are above all that it has given out",
        (
            "stop all writers, and set its counter above that number: PostgreSQL by setval(), SQLite in"
            " sqlite_sequence; of a cluster's topics and partitions it is the controller's databases.catalogue_version"
        ),
    )
    DECISION_STANDS = (
        "markers and committed offsets of a transaction are those that the journal decided on",
        _RESTORE_HERE,
    )
    OFFSETS_TOLD = (
        "only commits tell of consumed offsets in the journal, and a group has those that its last commit tells of",
        "the group may consume records again, or miss some: compare `txnstore dump journal` with what it has done",
    )
    ALL_OR_NOTHING = ("a transaction has the same outcome in all of its partitions", _RESTORE_HERE)
    PARTICIPANTS_KNOWN = ("the partitions and groups of a transaction are those that hold something of it", _FREE)
    OUTBOX_RIGHT = ("markers are queued that a decided transaction still needs, and no others", _MAINTAIN)
    NOTHING_HANGS = (
        "what is open in a partition or pending in a group belongs to an open or decided transaction",
        _FREE,
    )

    BRANCHES_KNOWN = (
        "a branch in another database belongs to a transaction that is open, or ends as that was decided",
        "`txnstore transactions branches` shows them, `txnstore transactions recover --participant URL` ends them",
    )
    GROUPS_SOUND = (
        "no partition belongs to two members of a group, and members and offsets are of the group that they name",
        "delete the group's members and let them join again: close its consumers; keep a copy for a bug report",
    )
    OUTBOX_MOVES = (
        "what applications put into the outbox becomes records soon, and nothing is refused",
        _REFUSED,
    )

    PROGRESS_IN_LOG = (
        "no query of Spark has read, and no relay to Kafka begun, beyond the end of a partition",
        _BEYOND,
    )
    SINKS_SOUND = (
        "what is noted of a query's last batch is of that one, and its runs write as producers that they were given",
        _LAST_BATCH,
    )

    TOPICS_COMPLETE = (
        "the partitions of a topic are numbered from 0 and not to be deleted, and each with a log belongs to a topic",
        "nobody reads what is there without a topic: put back the rows of topics and partitions, or restore a backup",
    )

    SETTINGS_UNDERSTOOD = (
        "each setting is one that txnstore knows, with a value that it takes, and for a topic that is there",
        "no client can use the topic, or the store: correct the row in topic_configs or store_configs, or delete it",
    )

    COPIES_CURRENT = (
        "the databases of a cluster have the controller's topics, and the logs of what lives in them",
        "`txnstore maintain --once` with the URLs of all databases copies them again",
    )

    OFFSETS_FENCED = (
        "offsets that a transaction of another database holds are of a producer that is noted, with no newer epoch",
        (
            "what comes late may be counted in with them, or their end be missed: `txnstore transactions list-open`"
            " shows the command that drops them; keep a copy for a bug report"
        ),
    )

    AT_COORDINATOR = (
        "a transactional id and a group are in the one database of a cluster that their name selects",
        "stop its clients, find out who wrote to the tables beside txnstore, and delete the rows that are elsewhere",
    )

    NOTHING_OPEN = ("at rest no transaction is open or decided", _FREE)
    NOTHING_QUEUED = ("at rest nothing is left in the outbox, of participants, or of pending offsets", _MAINTAIN)
    ALL_STABLE = ("at rest the last stable offset of each partition is its high watermark", _FREE)

    def __init__(self, holds: str, remedy: str) -> None:
        """Take one row of the table."""
        self.holds = holds
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was found; what does not apply is None."""

    partition_id: int | None = None
    offset: int | None = None
    topic: str | None = None
    """With `partition`, once it is known what the partition is called; alone, for all of the topic."""

    partition: int | None = None
    transactional_id: str | None = None
    group_id: str | None = None
    gid: str | None = None
    """Of a branch."""

    database: str | None = None
    """Of a cluster: the label of the database."""

    def __str__(self) -> str:
        """Return where that is, for people."""
        named = {
            "database": self.database,
            "transactional id": self.transactional_id,
            "group": self.group_id,
            "branch": self.gid,
        }
        parts = [f"{kind} {name!r}" for kind, name in named.items() if name is not None]
        if self.topic is not None:
            parts.append(self.topic if self.partition is None else f"{self.topic}-{self.partition}")
        elif self.partition_id is not None:
            parts.append(f"partition {self.partition_id}")
        if self.offset is not None:
            parts.append(f"offset {self.offset}")
        return ", ".join(parts) or "the store"


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold."""

    invariant: Invariant
    place: Place
    seen: str

    def __str__(self) -> str:
        """Return one line of a report."""
        return f"{self.invariant.name} ({self.invariant.holds}): {self.place}: {self.seen}"

    def in_database(self, label: str) -> Violation:
        """Return the same, found in this database of a cluster."""
        return replace(self, place=replace(self.place, database=label))
