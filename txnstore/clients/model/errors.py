"""The errors of the clients: Kafka's codes, `KafkaError` and `KafkaException`, and what each error from below becomes.

The codes are librdkafka's 2.16: number, name and text never change, because users' programs compare with them.  Codes
below zero are a client's own; their names begin with an underscore.  105 is Kafka's, but librdkafka lacks it.
"""

from __future__ import annotations

import builtins
import functools
import operator
from typing import Final, NamedTuple, SupportsIndex

from txnstore import errors
from txnstore.errors import ERRORS, TxnStoreError


class ErrorCode(NamedTuple):
    """One row of the table: what `KafkaError.name()` and, without a reason, `KafkaError.str()` return."""

    name: str
    text: str


_TEXTS: Final[dict[int, str]] = {}


def _row(number: int, text: str) -> int:
    """Enter the text of a code into the table and return the number, a plain int."""
    if number in _TEXTS:
        raise ValueError(f"error code {number} has two rows")
    _TEXTS[number] = text
    return number


class ErrorCodes:
    """Every code as an attribute; the base of `KafkaError`, whose users write `KafkaError._STATE`."""

    __slots__ = ()

    _BAD_MSG: Final = _row(-199, "Local: Bad message format")
    _BAD_COMPRESSION: Final = _row(-198, "Local: Invalid compressed data")
    _DESTROY: Final = _row(-197, "Local: Broker handle destroyed for termination")
    _FAIL: Final = _row(-196, "Local: Communication failure with broker")
    _TRANSPORT: Final = _row(-195, "Local: Broker transport failure")
    _CRIT_SYS_RESOURCE: Final = _row(-194, "Local: Critical system resource failure")
    _RESOLVE: Final = _row(-193, "Local: Host resolution failure")
    _MSG_TIMED_OUT: Final = _row(-192, "Local: Message timed out")
    _PARTITION_EOF: Final = _row(-191, "Broker: No more messages")
    _UNKNOWN_PARTITION: Final = _row(-190, "Local: Unknown partition")
    _FS: Final = _row(-189, "Local: File or filesystem error")
    _UNKNOWN_TOPIC: Final = _row(-188, "Local: Unknown topic")
    _ALL_BROKERS_DOWN: Final = _row(-187, "Local: All broker connections are down")
    _INVALID_ARG: Final = _row(-186, "Local: Invalid argument or configuration")
    _TIMED_OUT: Final = _row(-185, "Local: Timed out")
    _QUEUE_FULL: Final = _row(-184, "Local: Queue full")
    _ISR_INSUFF: Final = _row(-183, "Local: ISR count insufficient")
    _NODE_UPDATE: Final = _row(-182, "Local: Broker node update")
    _SSL: Final = _row(-181, "Local: SSL error")
    _WAIT_COORD: Final = _row(-180, "Local: Waiting for coordinator")
    _UNKNOWN_GROUP: Final = _row(-179, "Local: Unknown group")
    _IN_PROGRESS: Final = _row(-178, "Local: Operation in progress")
    _PREV_IN_PROGRESS: Final = _row(-177, "Local: Previous operation in progress")
    _EXISTING_SUBSCRIPTION: Final = _row(-176, "Local: Existing subscription")
    _ASSIGN_PARTITIONS: Final = _row(-175, "Local: Assign partitions")
    _REVOKE_PARTITIONS: Final = _row(-174, "Local: Revoke partitions")
    _CONFLICT: Final = _row(-173, "Local: Conflicting use")
    _STATE: Final = _row(-172, "Local: Erroneous state")
    _UNKNOWN_PROTOCOL: Final = _row(-171, "Local: Unknown protocol")
    _NOT_IMPLEMENTED: Final = _row(-170, "Local: Not implemented")
    _AUTHENTICATION: Final = _row(-169, "Local: Authentication failure")
    _NO_OFFSET: Final = _row(-168, "Local: No offset stored")
    _OUTDATED: Final = _row(-167, "Local: Outdated")
    _TIMED_OUT_QUEUE: Final = _row(-166, "Local: Timed out in queue")
    _UNSUPPORTED_FEATURE: Final = _row(-165, "Local: Required feature not supported by broker")
    _WAIT_CACHE: Final = _row(-164, "Local: Awaiting cache update")
    _INTR: Final = _row(-163, "Local: Operation interrupted")
    _KEY_SERIALIZATION: Final = _row(-162, "Local: Key serialization error")
    _VALUE_SERIALIZATION: Final = _row(-161, "Local: Value serialization error")
    _KEY_DESERIALIZATION: Final = _row(-160, "Local: Key deserialization error")
    _VALUE_DESERIALIZATION: Final = _row(-159, "Local: Value deserialization error")
    _PARTIAL: Final = _row(-158, "Local: Partial response")
    _READ_ONLY: Final = _row(-157, "Local: Read-only object")
    _NOENT: Final = _row(-156, "Local: No such entry")
    _UNDERFLOW: Final = _row(-155, "Local: Read underflow")
    _INVALID_TYPE: Final = _row(-154, "Local: Invalid type")
    _RETRY: Final = _row(-153, "Local: Retry operation")
    _PURGE_QUEUE: Final = _row(-152, "Local: Purged in queue")
    _PURGE_INFLIGHT: Final = _row(-151, "Local: Purged in flight")
    _FATAL: Final = _row(-150, "Local: Fatal error")
    _INCONSISTENT: Final = _row(-149, "Local: Inconsistent state")
    _GAPLESS_GUARANTEE: Final = _row(-148, "Local: Gap-less ordering would not be guaranteed if proceeding")
    _MAX_POLL_EXCEEDED: Final = _row(-147, "Local: Maximum application poll interval (max.poll.interval.ms) exceeded")
    _UNKNOWN_BROKER: Final = _row(-146, "Local: Unknown broker")
    _NOT_CONFIGURED: Final = _row(-145, "Local: Functionality not configured")
    _FENCED: Final = _row(-144, "Local: This instance has been fenced by a newer instance")
    _APPLICATION: Final = _row(-143, "Local: Application generated error")
    _ASSIGNMENT_LOST: Final = _row(-142, "Local: Group partition assignment lost")
    _NOOP: Final = _row(-141, "Local: No operation performed")
    _AUTO_OFFSET_RESET: Final = _row(-140, "Local: No offset to automatically reset to")
    _LOG_TRUNCATION: Final = _row(-139, "Local: Partition log truncation detected")
    _INVALID_DIFFERENT_RECORD: Final = _row(
        -138, "Local: an invalid record in the same batch caused the failure of this message too"
    )
    _DESTROY_BROKER: Final = _row(-137, "Local: Broker handle destroyed without termination")
    UNKNOWN: Final = _row(-1, "Unknown broker error")
    NO_ERROR: Final = _row(0, "Success")
    OFFSET_OUT_OF_RANGE: Final = _row(1, "Broker: Offset out of range")
    INVALID_MSG: Final = _row(2, "Broker: Invalid message")
    UNKNOWN_TOPIC_OR_PART: Final = _row(3, "Broker: Unknown topic or partition")
    INVALID_MSG_SIZE: Final = _row(4, "Broker: Invalid message size")
    LEADER_NOT_AVAILABLE: Final = _row(5, "Broker: Leader not available")
    NOT_LEADER_FOR_PARTITION: Final = _row(6, "Broker: Not leader for partition")
    REQUEST_TIMED_OUT: Final = _row(7, "Broker: Request timed out")
    BROKER_NOT_AVAILABLE: Final = _row(8, "Broker: Broker not available")
    REPLICA_NOT_AVAILABLE: Final = _row(9, "Broker: Replica not available")
    MSG_SIZE_TOO_LARGE: Final = _row(10, "Broker: Message size too large")
    STALE_CTRL_EPOCH: Final = _row(11, "Broker: StaleControllerEpochCode")
    OFFSET_METADATA_TOO_LARGE: Final = _row(12, "Broker: Offset metadata string too large")
    NETWORK_EXCEPTION: Final = _row(13, "Broker: Broker disconnected before response received")
    COORDINATOR_LOAD_IN_PROGRESS: Final = _row(14, "Broker: Coordinator load in progress")
    COORDINATOR_NOT_AVAILABLE: Final = _row(15, "Broker: Coordinator not available")
    NOT_COORDINATOR: Final = _row(16, "Broker: Not coordinator")
    TOPIC_EXCEPTION: Final = _row(17, "Broker: Invalid topic")
    RECORD_LIST_TOO_LARGE: Final = _row(18, "Broker: Message batch larger than configured server segment size")
    NOT_ENOUGH_REPLICAS: Final = _row(19, "Broker: Not enough in-sync replicas")
    NOT_ENOUGH_REPLICAS_AFTER_APPEND: Final = _row(
        20, "Broker: Message(s) written to insufficient number of in-sync replicas"
    )
    INVALID_REQUIRED_ACKS: Final = _row(21, "Broker: Invalid required acks value")
    ILLEGAL_GENERATION: Final = _row(22, "Broker: Specified group generation id is not valid")
    INCONSISTENT_GROUP_PROTOCOL: Final = _row(23, "Broker: Inconsistent group protocol")
    INVALID_GROUP_ID: Final = _row(24, "Broker: Invalid group.id")
    UNKNOWN_MEMBER_ID: Final = _row(25, "Broker: Unknown member")
    INVALID_SESSION_TIMEOUT: Final = _row(26, "Broker: Invalid session timeout")
    REBALANCE_IN_PROGRESS: Final = _row(27, "Broker: Group rebalance in progress")
    INVALID_COMMIT_OFFSET_SIZE: Final = _row(28, "Broker: Commit offset data size is not valid")
    TOPIC_AUTHORIZATION_FAILED: Final = _row(29, "Broker: Topic authorization failed")
    GROUP_AUTHORIZATION_FAILED: Final = _row(30, "Broker: Group authorization failed")
    CLUSTER_AUTHORIZATION_FAILED: Final = _row(31, "Broker: Cluster authorization failed")
    INVALID_TIMESTAMP: Final = _row(32, "Broker: Invalid timestamp")
    UNSUPPORTED_SASL_MECHANISM: Final = _row(33, "Broker: Unsupported SASL mechanism")
    ILLEGAL_SASL_STATE: Final = _row(34, "Broker: Request not valid in current SASL state")
    UNSUPPORTED_VERSION: Final = _row(35, "Broker: API version not supported")
    TOPIC_ALREADY_EXISTS: Final = _row(36, "Broker: Topic already exists")
    INVALID_PARTITIONS: Final = _row(37, "Broker: Invalid number of partitions")
    INVALID_REPLICATION_FACTOR: Final = _row(38, "Broker: Invalid replication factor")
    INVALID_REPLICA_ASSIGNMENT: Final = _row(39, "Broker: Invalid replica assignment")
    INVALID_CONFIG: Final = _row(40, "Broker: Configuration is invalid")
    NOT_CONTROLLER: Final = _row(41, "Broker: Not controller for cluster")
    INVALID_REQUEST: Final = _row(42, "Broker: Invalid request")
    UNSUPPORTED_FOR_MESSAGE_FORMAT: Final = _row(43, "Broker: Message format on broker does not support request")
    POLICY_VIOLATION: Final = _row(44, "Broker: Policy violation")
    OUT_OF_ORDER_SEQUENCE_NUMBER: Final = _row(45, "Broker: Broker received an out of order sequence number")
    DUPLICATE_SEQUENCE_NUMBER: Final = _row(46, "Broker: Broker received a duplicate sequence number")
    INVALID_PRODUCER_EPOCH: Final = _row(47, "Broker: Producer attempted an operation with an old epoch")
    INVALID_TXN_STATE: Final = _row(48, "Broker: Producer attempted a transactional operation in an invalid state")
    INVALID_PRODUCER_ID_MAPPING: Final = _row(
        49, "Broker: Producer attempted to use a producer id which is not currently assigned to its transactional id"
    )
    INVALID_TRANSACTION_TIMEOUT: Final = _row(
        50,
        "Broker: Transaction timeout is larger than the maximum value allowed by the broker's "
        "max.transaction.timeout.ms",
    )
    CONCURRENT_TRANSACTIONS: Final = _row(
        51,
        "Broker: Producer attempted to update a transaction while another concurrent operation on the same "
        "transaction was ongoing",
    )
    TRANSACTION_COORDINATOR_FENCED: Final = _row(
        52,
        "Broker: Indicates that the transaction coordinator sending a WriteTxnMarker is no longer the "
        "current coordinator for a given producer",
    )
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = _row(53, "Broker: Transactional Id authorization failed")
    SECURITY_DISABLED: Final = _row(54, "Broker: Security features are disabled")
    OPERATION_NOT_ATTEMPTED: Final = _row(55, "Broker: Operation not attempted")
    KAFKA_STORAGE_ERROR: Final = _row(56, "Broker: Disk error when trying to access log file on disk")
    LOG_DIR_NOT_FOUND: Final = _row(57, "Broker: The user-specified log directory is not found in the broker config")
    SASL_AUTHENTICATION_FAILED: Final = _row(58, "Broker: SASL Authentication failed")
    UNKNOWN_PRODUCER_ID: Final = _row(59, "Broker: Unknown Producer Id")
    REASSIGNMENT_IN_PROGRESS: Final = _row(60, "Broker: Partition reassignment is in progress")
    DELEGATION_TOKEN_AUTH_DISABLED: Final = _row(61, "Broker: Delegation Token feature is not enabled")
    DELEGATION_TOKEN_NOT_FOUND: Final = _row(62, "Broker: Delegation Token is not found on server")
    DELEGATION_TOKEN_OWNER_MISMATCH: Final = _row(63, "Broker: Specified Principal is not valid Owner/Renewer")
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED: Final = _row(
        64, "Broker: Delegation Token requests are not allowed on this connection"
    )
    DELEGATION_TOKEN_AUTHORIZATION_FAILED: Final = _row(65, "Broker: Delegation Token authorization failed")
    DELEGATION_TOKEN_EXPIRED: Final = _row(66, "Broker: Delegation Token is expired")
    INVALID_PRINCIPAL_TYPE: Final = _row(67, "Broker: Supplied principalType is not supported")
    NON_EMPTY_GROUP: Final = _row(68, "Broker: The group is not empty")
    GROUP_ID_NOT_FOUND: Final = _row(69, "Broker: The group id does not exist")
    FETCH_SESSION_ID_NOT_FOUND: Final = _row(70, "Broker: The fetch session ID was not found")
    INVALID_FETCH_SESSION_EPOCH: Final = _row(71, "Broker: The fetch session epoch is invalid")
    LISTENER_NOT_FOUND: Final = _row(72, "Broker: No matching listener")
    TOPIC_DELETION_DISABLED: Final = _row(73, "Broker: Topic deletion is disabled")
    FENCED_LEADER_EPOCH: Final = _row(74, "Broker: Leader epoch is older than broker epoch")
    UNKNOWN_LEADER_EPOCH: Final = _row(75, "Broker: Leader epoch is newer than broker epoch")
    UNSUPPORTED_COMPRESSION_TYPE: Final = _row(76, "Broker: Unsupported compression type")
    STALE_BROKER_EPOCH: Final = _row(77, "Broker: Broker epoch has changed")
    OFFSET_NOT_AVAILABLE: Final = _row(78, "Broker: Leader high watermark is not caught up")
    MEMBER_ID_REQUIRED: Final = _row(79, "Broker: Group member needs a valid member ID")
    PREFERRED_LEADER_NOT_AVAILABLE: Final = _row(80, "Broker: Preferred leader was not available")
    GROUP_MAX_SIZE_REACHED: Final = _row(81, "Broker: Consumer group has reached maximum size")
    FENCED_INSTANCE_ID: Final = _row(82, "Broker: Static consumer fenced by other consumer with same group.instance.id")
    ELIGIBLE_LEADERS_NOT_AVAILABLE: Final = _row(83, "Broker: Eligible partition leaders are not available")
    ELECTION_NOT_NEEDED: Final = _row(84, "Broker: Leader election not needed for topic partition")
    NO_REASSIGNMENT_IN_PROGRESS: Final = _row(85, "Broker: No partition reassignment is in progress")
    GROUP_SUBSCRIBED_TO_TOPIC: Final = _row(
        86, "Broker: Deleting offsets of a topic while the consumer group is subscribed to it"
    )
    INVALID_RECORD: Final = _row(87, "Broker: Broker failed to validate record")
    UNSTABLE_OFFSET_COMMIT: Final = _row(88, "Broker: There are unstable offsets that need to be cleared")
    THROTTLING_QUOTA_EXCEEDED: Final = _row(89, "Broker: Throttling quota has been exceeded")
    PRODUCER_FENCED: Final = _row(
        90, "Broker: There is a newer producer with the same transactionalId which fences the current one"
    )
    RESOURCE_NOT_FOUND: Final = _row(91, "Broker: Request illegally referred to resource that does not exist")
    DUPLICATE_RESOURCE: Final = _row(92, "Broker: Request illegally referred to the same resource twice")
    UNACCEPTABLE_CREDENTIAL: Final = _row(93, "Broker: Requested credential would not meet criteria for acceptability")
    INCONSISTENT_VOTER_SET: Final = _row(
        94,
        "Broker: Indicates that the either the sender or recipient of a voter-only request is not one of the "
        "expected voters",
    )
    INVALID_UPDATE_VERSION: Final = _row(95, "Broker: Invalid update version")
    FEATURE_UPDATE_FAILED: Final = _row(96, "Broker: Unable to update finalized features due to server error")
    PRINCIPAL_DESERIALIZATION_FAILURE: Final = _row(
        97, "Broker: Request principal deserialization failed during forwarding"
    )
    UNKNOWN_TOPIC_ID: Final = _row(100, "Broker: Unknown topic id")
    INCONSISTENT_TOPIC_ID: Final = _row(103, "Broker: The log's topic ID did not match the topic ID in the request")
    TRANSACTIONAL_ID_NOT_FOUND: Final = _row(105, "Broker: The transactional id could not be found")
    FENCED_MEMBER_EPOCH: Final = _row(110, "Broker: The member epoch is fenced by the group coordinator")
    UNRELEASED_INSTANCE_ID: Final = _row(
        111, "Broker: The instance ID is still used by another member in the consumer group"
    )
    UNSUPPORTED_ASSIGNOR: Final = _row(
        112, "Broker: The assignor or its version range is not supported by the consumer group"
    )
    STALE_MEMBER_EPOCH: Final = _row(113, "Broker: The member epoch is stale")
    MISMATCHED_ENDPOINT_TYPE: Final = _row(114, "Broker: The request was sent to an endpoint of the wrong type")
    UNSUPPORTED_ENDPOINT_TYPE: Final = _row(115, "Broker: This endpoint type is not supported yet")
    UNKNOWN_CONTROLLER_ID: Final = _row(116, "Broker: This controller ID is not known")
    UNKNOWN_SUBSCRIPTION_ID: Final = _row(
        117, "Broker: Client sent a push telemetry request with an invalid or outdated subscription ID"
    )
    TELEMETRY_TOO_LARGE: Final = _row(
        118, "Broker: Client sent a push telemetry request larger than the maximum size the broker will accept"
    )
    INVALID_REGISTRATION: Final = _row(
        119, "Broker: The controller has considered the broker registration to be invalid"
    )
    TRANSACTION_ABORTABLE: Final = _row(120, "Broker: The server encountered an error with the transaction")
    INVALID_RECORD_STATE: Final = _row(121, "Broker: The record state is invalid")
    SHARE_SESSION_NOT_FOUND: Final = _row(122, "Broker: The share session was not found")
    INVALID_SHARE_SESSION_EPOCH: Final = _row(123, "Broker: The share session epoch is invalid")
    FENCED_STATE_EPOCH: Final = _row(124, "Broker: The share-group state epoch did not match")
    INVALID_VOTER_KEY: Final = _row(125, "Broker: The voter key doesn't match the receiving replica's key")
    DUPLICATE_VOTER: Final = _row(126, "Broker: The voter is already part of the set of voters")
    VOTER_NOT_FOUND: Final = _row(127, "Broker: The voter is not part of the set of voters")
    INVALID_REGULAR_EXPRESSION: Final = _row(128, "Broker: The regular expression is not valid")
    REBOOTSTRAP_REQUIRED: Final = _row(
        129, "Broker: Client metadata is stale, client should rebootstrap to obtain new metadata"
    )
    STREAMS_INVALID_TOPOLOGY: Final = _row(130, "Broker: The supplied topology is invalid")
    STREAMS_INVALID_TOPOLOGY_EPOCH: Final = _row(131, "Broker: The supplied topology epoch is invalid")
    STREAMS_TOPOLOGY_FENCED: Final = _row(132, "Broker: The supplied topology epoch is outdated")
    SHARE_SESSION_LIMIT_REACHED: Final = _row(133, "Broker: The limit of share sessions has been reached")


#: The rows by number.
ERROR_CODES: Final[dict[int, ErrorCode]] = {
    number: ErrorCode(name, _TEXTS[number]) for name, number in vars(ErrorCodes).items() if isinstance(number, int)
}


def error_code(number: int) -> ErrorCode:
    """Return the row of a code; a number that is in no table gets librdkafka's placeholders."""
    return ERROR_CODES.get(number) or ErrorCode(f"ERR_{number}?", f"Err-{number}?")


_CODE_MAX = 2**31 - 1
#: What the calls that all clients have say once their client is closed, as in confluent-kafka.
HANDLE_CLOSED_TEXT: Final = "Handle has been closed"


@functools.total_ordering
class KafkaError(ErrorCodes):
    """An error code with its text and with what it means for the client; it compares like its code.

    `error == KafkaError._STATE` and `error == -172` are the same question.  Every code of the table is a class
    attribute.  An error is always true, `NO_ERROR` included: test `error is None` or its code.

    Args:
        error: the code, Kafka's number; an unknown one is kept.
        reason: the text; default: the code's own.
        fatal: whether the client is finished: close it and make a new one.
        retriable: whether the same call may be made again.
        txn_requires_abort: whether the transaction has to be aborted before anything else.

    Raises:
        TypeError: the code is not an integer, or the reason is neither text nor None.
        OverflowError: the code does not fit into 32 bits.
    """

    __slots__ = ("_code", "_fatal", "_reason", "_retriable", "_txn_requires_abort")

    def __init__(
        self,
        error: SupportsIndex,
        reason: builtins.str | None = None,
        fatal: bool = False,
        retriable: bool = False,
        txn_requires_abort: bool = False,
    ) -> None:
        number = operator.index(error)
        if not -_CODE_MAX - 1 <= number <= _CODE_MAX:
            raise OverflowError(f"error code {number} does not fit into 32 bits")
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"argument 2 must be str or None, not {type(reason).__name__}")
        self._code = number
        self._reason = reason
        self._fatal = bool(fatal)
        self._retriable = bool(retriable)
        self._txn_requires_abort = bool(txn_requires_abort)

    def code(self) -> int:
        """Return the number."""
        return self._code

    def name(self) -> builtins.str:
        """Return the code's name, for example `_STATE`."""
        return error_code(self._code).name

    def str(self) -> builtins.str:
        """Return the reason, or the code's own text if none was given."""
        return error_code(self._code).text if self._reason is None else self._reason

    def fatal(self) -> bool:
        """Return whether the client is finished."""
        return self._fatal

    def retriable(self) -> bool:
        """Return whether the same call may be made again."""
        return self._retriable

    def txn_requires_abort(self) -> bool:
        """Return whether the transaction has to be aborted before anything else."""
        return self._txn_requires_abort

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> builtins.str:
        fatal = "FATAL," if self._fatal else ""
        return f'KafkaError{{{fatal}code={self.name()},val={self._code},str="{self.str()}"}}'

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self._code)

    def __eq__(self, other: object) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code == code

    def __lt__(self, other: KafkaError | int) -> bool:
        code = _code_of(other)
        return NotImplemented if code is None else self._code < code

    def __reduce__(self) -> tuple[type[KafkaError], tuple[int, builtins.str | None, bool, bool, bool]]:
        return type(self), (self._code, self._reason, self._fatal, self._retriable, self._txn_requires_abort)


def _code_of(other: object) -> int | None:
    """Return the number that an error is compared by; None for what is neither an error nor a number."""
    if isinstance(other, KafkaError):
        return other.code()
    return other if isinstance(other, int) else None


class KafkaException(Exception):
    """What the clients raise; `args[0]` is the `KafkaError`, and the text of both is the same."""


class ErrorRow(NamedTuple):
    """What an error becomes."""

    code: int
    retriable: bool
    suffix: str = ""
    """Added to the error's text if that does not say it."""


_OUTCOME_UNKNOWN: Final = "the outcome is unknown"

#: The errors that Kafka does not have.
_OWN_ROWS: Final[dict[type[TxnStoreError], ErrorRow]] = {
    errors.StoreUnavailable: ErrorRow(KafkaError._TRANSPORT, retriable=True),
    errors.OutcomeUnknown: ErrorRow(KafkaError._TIMED_OUT, retriable=False, suffix=_OUTCOME_UNKNOWN),
    errors.OutcomeForgotten: ErrorRow(KafkaError._TIMED_OUT, retriable=False, suffix=_OUTCOME_UNKNOWN),
    errors.StoreBusy: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.StatementTimedOut: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.WriteConflict: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.TransactionPoisoned: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.StoreFull: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.StoreReadOnly: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.StoreDamaged: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.PermissionDenied: ErrorRow(KafkaError.CLUSTER_AUTHORIZATION_FAILED, retriable=False),
    errors.InvalidUrl: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.SchemaOutdated: ErrorRow(KafkaError.UNSUPPORTED_VERSION, retriable=False),
    errors.SchemaTooNew: ErrorRow(KafkaError.UNSUPPORTED_VERSION, retriable=False),
    errors.ForeignSchema: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.StoreCopied: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.StoreMoved: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.WrongCluster: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.MissingMember: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.StatementFailed: ErrorRow(KafkaError.UNKNOWN, retriable=False),
    errors.BranchUnfinished: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.BranchEndedOtherwise: ErrorRow(KafkaError._INCONSISTENT, retriable=False),
    errors.StoreClosed: ErrorRow(KafkaError._DESTROY, retriable=False),
}

#: Every error of txnstore with what it becomes.
ERROR_ROWS: Final[dict[type[TxnStoreError], ErrorRow]] = _OWN_ROWS | {
    error: ErrorRow(error.code, retriable=error.recovery is errors.Recovery.RETRY)
    for error in ERRORS.values()
    if error.kafka_name is not None
}


def kafka_error_of(
    error: TxnStoreError, *, fatal: bool = False, retriable: bool | None = None, txn_requires_abort: bool = False
) -> KafkaError:
    """Return the error as the clients' users see it; its text is kept.

    Args:
        error: what came from below.
        fatal: whether the client is finished by it.
        retriable: whether the user may repeat the call; default: what the table says.
        txn_requires_abort: whether the user's transaction has to be aborted.
    """
    row = _row_of(type(error))
    text = str(error)
    if row.suffix and row.suffix not in text:
        text = f"{text} ({row.suffix})"
    return KafkaError(row.code, text, fatal, row.retriable if retriable is None else retriable, txn_requires_abort)


def kafka_exception_of(
    error: TxnStoreError, *, fatal: bool = False, retriable: bool | None = None, txn_requires_abort: bool = False
) -> KafkaException:
    """Return the exception to raise, with `from error`, in a client's call; arguments as in `kafka_error_of`."""
    kafka_error = kafka_error_of(error, fatal=fatal, retriable=retriable, txn_requires_abort=txn_requires_abort)
    return KafkaException(kafka_error)


def joined_error_of(error: TxnStoreError) -> KafkaError:
    """Return the error of a statement within a database transaction of the caller's, who has to roll it back.

    It is never retriable: the whole database transaction is to be repeated, not the call.
    """
    if isinstance(error, errors.TransactionPoisoned):
        return KafkaError(KafkaError._STATE, str(error))
    return kafka_error_of(error, retriable=False)


def _row_of(error: type[TxnStoreError]) -> ErrorRow:
    """Return the row of the class, or of its nearest base with one: an error added later is not lost."""
    for base in error.__mro__:
        row = ERROR_ROWS.get(base)
        if row is not None:
            return row
    return ErrorRow(KafkaError._FAIL, retriable=error.recovery is errors.Recovery.RETRY)
