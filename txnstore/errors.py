"""The table of txnstore's errors: each class is a row, with its code and the one way out.

An error of its own exists only where a caller could react to it in a way of its own.  The first line of the
docstring is the default text.  Codes below 1000 are Kafka's; those from 1000 on are ours and are never reused.
Nothing here carries a password or a payload: each message says what happened, to what, and what to do.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final


class Recovery(enum.Enum):
    """What the caller does about an error; every error has exactly one."""

    RETRY = "retry"
    """Call again: nothing was changed."""

    ABORT = "abort"
    """Abort the transaction, then start over."""

    CLOSE = "close"
    """This client is finished: close it and make a new one."""

    FIX = "fix"
    """The call, the configuration or the database is wrong: change it."""

    RESOLVE = "resolve"
    """It is not known whether the change was made: repeat the very same call, or ask for the outcome."""


#: Every error by its code; filled as the classes below are defined.
ERRORS: Final[dict[int, type[TxnStoreError]]] = {}


class TxnStoreError(Exception):
    """The base of every error that txnstore raises."""

    code: ClassVar[int]
    kafka_name: ClassVar[str | None] = None
    recovery: ClassVar[Recovery]

    def __init_subclass__(cls, *, code: int, recovery: Recovery, kafka_name: str | None = None) -> None:
        """Enter the class into the table; a code used twice is refused."""
        super().__init_subclass__()
        if code in ERRORS:
            message = f"error code {code} belongs to {ERRORS[code].__name__} already"
            raise TypeError(message)
        cls.code = code
        cls.recovery = recovery
        cls.kafka_name = kafka_name
        ERRORS[code] = cls

    def __init__(self, message: str | None = None) -> None:
        """Use `message`, or the first line of the class's docstring."""
        super().__init__(message or (type(self).__doc__ or type(self).__name__).splitlines()[0])

    @property
    def retriable(self) -> bool:
        """Whether the same call may be made again because nothing was changed."""
        return self.recovery is Recovery.RETRY

    @property
    def outcome_unknown(self) -> bool:
        """Whether the change may or may not have been made."""
        return self.recovery is Recovery.RESOLVE


class OffsetOutOfRange(TxnStoreError, code=1, recovery=Recovery.FIX, kafka_name="OFFSET_OUT_OF_RANGE"):
    """The offset lies before the start of the partition's log or past its end."""


class CorruptBatch(TxnStoreError, code=2, recovery=Recovery.FIX, kafka_name="CORRUPT_MESSAGE"):
    """A stored record batch does not match its checksum."""


class UnknownTopicOrPartition(TxnStoreError, code=3, recovery=Recovery.FIX, kafka_name="UNKNOWN_TOPIC_OR_PART"):
    """There is no such topic, or no such partition in it."""


class RecordTooLarge(TxnStoreError, code=10, recovery=Recovery.FIX, kafka_name="MSG_SIZE_TOO_LARGE"):
    """The record batch is larger than the topic's max.message.bytes."""


class OffsetMetadataTooLarge(TxnStoreError, code=12, recovery=Recovery.FIX, kafka_name="OFFSET_METADATA_TOO_LARGE"):
    """The metadata of a committed offset is larger than offset.metadata.max.bytes."""


class NotCoordinator(TxnStoreError, code=16, recovery=Recovery.RETRY, kafka_name="NOT_COORDINATOR"):
    """The transactional id or group lives in another database of the cluster."""


class InvalidTopic(TxnStoreError, code=17, recovery=Recovery.FIX, kafka_name="TOPIC_EXCEPTION"):
    """The topic's name is not one that Kafka allows."""


class IllegalGeneration(TxnStoreError, code=22, recovery=Recovery.ABORT, kafka_name="ILLEGAL_GENERATION"):
    """The group's generation is not the one that the member belongs to."""


class InconsistentGroupProtocol(
    TxnStoreError, code=23, recovery=Recovery.FIX, kafka_name="INCONSISTENT_GROUP_PROTOCOL"
):
    """The member supports none of the assignors that all other members of the group support."""


class InvalidGroupId(TxnStoreError, code=24, recovery=Recovery.FIX, kafka_name="INVALID_GROUP_ID"):
    """The group id is empty or not text."""


class UnknownMember(TxnStoreError, code=25, recovery=Recovery.ABORT, kafka_name="UNKNOWN_MEMBER_ID"):
    """The group does not know this member."""


class InvalidTimestamp(TxnStoreError, code=32, recovery=Recovery.FIX, kafka_name="INVALID_TIMESTAMP"):
    """The record's timestamp is negative or too far from the time of the store."""


class TopicAlreadyExists(TxnStoreError, code=36, recovery=Recovery.FIX, kafka_name="TOPIC_ALREADY_EXISTS"):
    """There is a topic of this name already."""


class InvalidPartitions(TxnStoreError, code=37, recovery=Recovery.FIX, kafka_name="INVALID_PARTITIONS"):
    """The number of partitions is below one, or below what the topic has."""


class InvalidConfiguration(TxnStoreError, code=40, recovery=Recovery.FIX, kafka_name="INVALID_CONFIG"):
    """A setting is unknown or its value is out of range."""


class InvalidRequest(TxnStoreError, code=42, recovery=Recovery.FIX, kafka_name="INVALID_REQUEST"):
    """The call's arguments contradict each other or are not of the documented form."""


class PolicyViolation(TxnStoreError, code=44, recovery=Recovery.FIX, kafka_name="POLICY_VIOLATION"):
    """The topic's settings do not allow this."""


class OutOfOrderSequence(TxnStoreError, code=45, recovery=Recovery.ABORT, kafka_name="OUT_OF_ORDER_SEQUENCE_NUMBER"):
    """The batch's first sequence number does not follow the producer's last one."""


class InvalidProducerEpoch(TxnStoreError, code=47, recovery=Recovery.ABORT, kafka_name="INVALID_PRODUCER_EPOCH"):
    """The producer's epoch is older than the newest one of its producer id."""


class InvalidTransactionState(TxnStoreError, code=48, recovery=Recovery.ABORT, kafka_name="INVALID_TXN_STATE"):
    """The transaction is not in a state that allows this call."""


class InvalidProducerIdMapping(
    TxnStoreError, code=49, recovery=Recovery.CLOSE, kafka_name="INVALID_PRODUCER_ID_MAPPING"
):
    """The producer id does not belong to this transactional id, or the id has expired (KAFKA-18019)."""


class InvalidTransactionTimeout(
    TxnStoreError, code=50, recovery=Recovery.FIX, kafka_name="INVALID_TRANSACTION_TIMEOUT"
):
    """The transaction timeout is not positive or above the store's transaction.max.timeout.ms."""


class ConcurrentTransactions(TxnStoreError, code=51, recovery=Recovery.RETRY, kafka_name="CONCURRENT_TRANSACTIONS"):
    """The transaction of this transactional id is decided and still being completed."""


class TransactionCoordinatorFenced(
    TxnStoreError, code=52, recovery=Recovery.CLOSE, kafka_name="TRANSACTION_COORDINATOR_FENCED"
):
    """The marker comes from a coordinator that has been replaced."""


class TransactionalIdAuthorizationFailed(
    TxnStoreError, code=53, recovery=Recovery.FIX, kafka_name="TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
):
    """Two-phase commit is not enabled in this store (transaction.two.phase.commit.enable)."""


class GroupNotEmpty(TxnStoreError, code=68, recovery=Recovery.FIX, kafka_name="NON_EMPTY_GROUP"):
    """The group has members, or an open transaction holds offsets of it."""


class GroupIdNotFound(TxnStoreError, code=69, recovery=Recovery.FIX, kafka_name="GROUP_ID_NOT_FOUND"):
    """There is no such group."""


class UnsupportedCompression(TxnStoreError, code=76, recovery=Recovery.FIX, kafka_name="UNSUPPORTED_COMPRESSION_TYPE"):
    """The compression codec is unknown, or the package that implements it is not installed."""


class FencedInstance(TxnStoreError, code=82, recovery=Recovery.ABORT, kafka_name="FENCED_INSTANCE_ID"):
    """A newer member with the same group.instance.id has taken over."""


class GroupSubscribedToTopic(TxnStoreError, code=86, recovery=Recovery.FIX, kafka_name="GROUP_SUBSCRIBED_TO_TOPIC"):
    """Members of the group are subscribed to the topic."""


class InvalidRecord(TxnStoreError, code=87, recovery=Recovery.FIX, kafka_name="INVALID_RECORD"):
    """A record, or the batch around it, is not well formed."""


class UnstableOffsetCommit(TxnStoreError, code=88, recovery=Recovery.RETRY, kafka_name="UNSTABLE_OFFSET_COMMIT"):
    """An open transaction has offsets of this partition pending."""


class ProducerFenced(TxnStoreError, code=90, recovery=Recovery.CLOSE, kafka_name="PRODUCER_FENCED"):
    """A newer producer with the same transactional id has taken over."""


class TransactionalIdNotFound(TxnStoreError, code=105, recovery=Recovery.FIX, kafka_name="TRANSACTIONAL_ID_NOT_FOUND"):
    """The coordinator does not know this transactional id."""


class TransactionAbortable(TxnStoreError, code=120, recovery=Recovery.ABORT, kafka_name="TRANSACTION_ABORTABLE"):
    """The transaction cannot go on: abort it, then start over (KIP-890)."""


class StoreUnavailable(TxnStoreError, code=1001, recovery=Recovery.RETRY):
    """The database cannot be reached; nothing was changed."""


class OutcomeUnknown(TxnStoreError, code=1002, recovery=Recovery.RESOLVE):
    """The database went away while it was committing: the change may or may not have been made."""


class StoreBusy(TxnStoreError, code=1003, recovery=Recovery.RETRY):
    """Other clients kept the database busy for longer than the time allowed; nothing was changed."""


class StatementTimedOut(TxnStoreError, code=1004, recovery=Recovery.RETRY):
    """A statement took longer than its time limit and was cancelled; nothing was changed."""


class WriteConflict(TxnStoreError, code=1005, recovery=Recovery.RETRY):
    """The database chose this database transaction as the victim of a conflict; nothing was changed."""


class StoreFull(TxnStoreError, code=1006, recovery=Recovery.FIX):
    """The disk or a quota of the database is full; nothing was changed."""


class StoreReadOnly(TxnStoreError, code=1007, recovery=Recovery.FIX):
    """The database accepts no writes; nothing was changed."""


class PermissionDenied(TxnStoreError, code=1008, recovery=Recovery.FIX):
    """The database role lacks a right on txnstore's tables; nothing was changed."""


class InvalidUrl(TxnStoreError, code=1009, recovery=Recovery.FIX):
    """The database URL cannot be understood, or it names a kind of database that txnstore does not support."""


class SchemaOutdated(TxnStoreError, code=1010, recovery=Recovery.FIX):
    """The tables are of an older version of txnstore; run `txnstore migrate` on the database."""


class SchemaTooNew(TxnStoreError, code=1011, recovery=Recovery.FIX):
    """The tables are of a newer version of txnstore; upgrade the package."""


class ForeignSchema(TxnStoreError, code=1012, recovery=Recovery.FIX):
    """The database holds tables of these names that txnstore did not make."""


class StoreDamaged(TxnStoreError, code=1013, recovery=Recovery.FIX):
    """The database's files are damaged or are not a database, or a row holds what this version does not know."""


class TransactionPoisoned(TxnStoreError, code=1014, recovery=Recovery.RETRY):
    """An earlier statement of this database transaction failed, so it can only be rolled back; nothing was changed."""


class StatementFailed(TxnStoreError, code=1015, recovery=Recovery.FIX):
    """The database refused a statement for a reason that txnstore does not know; nothing was changed."""


class StoreClosed(TxnStoreError, code=1016, recovery=Recovery.CLOSE):
    """The store has been closed."""


class BranchUnfinished(TxnStoreError, code=1017, recovery=Recovery.RETRY):
    """The transaction is decided, but its branch in another database has not ended yet; recovery will end it."""


class BranchEndedOtherwise(TxnStoreError, code=1022, recovery=Recovery.FIX):
    """The transaction is decided, but in another database somebody has ended its branch the other way."""


class OutcomeForgotten(TxnStoreError, code=1030, recovery=Recovery.CLOSE):
    """Whether the transaction was committed is not known, and nothing remembers it any more."""


class StoreCopied(TxnStoreError, code=1018, recovery=Recovery.FIX):
    """The tables are a copy of a store, or were moved; they act for it nowhere else until `txnstore adopt` is run."""


class StoreMoved(TxnStoreError, code=1019, recovery=Recovery.FIX):
    """The store is closed: `txnstore copy` is moving it to another database, or has done so; nothing was changed."""


class WrongCluster(TxnStoreError, code=1020, recovery=Recovery.FIX):
    """The databases of the list are not those of one cluster, or not in its order."""


class MissingMember(TxnStoreError, code=1021, recovery=Recovery.FIX):
    """What is asked for lives in a database of the cluster whose URL is not in the list; add it."""
