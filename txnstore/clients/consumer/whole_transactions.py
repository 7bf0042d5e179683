"""One committed transaction at a time: `Consumer.consume_transaction`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from txnstore.clients.consumer.atomic_subscription import AtomicSubscription
from txnstore.clients.consumer.subscription import ToldCommit
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.deadline import WAIT_SECONDS_MAX, Deadline

if TYPE_CHECKING:
    from txnstore.clients.consumer.core import ConsumerCore

#: How many records a transaction may have that is handed out in one piece, unless the caller says otherwise.
MESSAGES_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class ConsumedTransaction:
    """All records of one committed transaction in the assigned partitions of one database, or one outside of any."""

    messages: list[Message]
    """One partition after the other, in each of them in their order."""

    producer_id: int | None = None
    """Who wrote them, of several writers the first one that came; None outside transactions."""

    producer_epoch: int | None = None
    """The epoch of the records, which no other transaction of the producer has; None outside transactions."""

    transactional_id: str | None = None
    """Whose transaction it is; None outside transactions, and where the journal does not tell: it has been trimmed
    since, another database coordinates, or the consumer's role may not read it."""

    offsets: dict[str, list[TopicPartition]] = field(default_factory=dict)
    """The consumed offsets that it has committed, by group, as they were sent.

    Partitions whose topic is deleted are left out, and of several databases the groups that another one coordinates
    than the transaction.  Empty if it has committed none, and where there is no transactional id."""


#: Adds up to so many messages, serves events, and waits: `Consumer._gather`.
Gather = Callable[[list[Message], int, Deadline], None]


def next_transaction(
    core: ConsumerCore, gather: Gather, deadline: Deadline, messages_max: int, *, begins: Deadline | None = None
) -> ConsumedTransaction | None:
    """Return what comes next, or None once the time is up; what was gathered until then comes again.

    With `begins` nothing is gathered unless something has come by then.

    Raises:
        KafkaException: `_INVALID_ARG`: transactions are not handed out whole; MSG_SIZE_TOO_LARGE: it has more records
            than `messages_max`; or an error came instead of a record.
    """
    subscription = core.subscription
    if not isinstance(subscription, AtomicSubscription):
        text = "consume_transaction() needs txnstore.delivery.order=commit and txnstore.delivery.atomic=true"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
    core.polled(withholds=True)
    try:
        core.look_for_database()
        while True:
            messages: list[Message] = []
            try:
                gather(messages, 1, begins or deadline)
            except BaseException:
                with core.arrived:
                    subscription.give_back(messages)
                raise
            if not messages:
                return None
            if _is_record(messages[0]):
                found = _Gathering(core, subscription, messages, messages_max).rest(deadline)
                if found is not None or deadline.left_seconds() <= 0:
                    return found
    finally:
        core.gathered()


def _is_record(message: Message) -> bool:
    """Return whether it is one; the end of a partition is nothing.

    Raises:
        KafkaException: it is an error.
    """
    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    return error is None


def _partitions_of(told: ToldCommit) -> dict[str, list[TopicPartition]]:
    return {
        group_id: [
            TopicPartition(
                name.topic, name.partition, offset.offset, offset_in_transaction=offset.offset_in_transaction
            )
            for name, offset in sorted(offsets.items(), key=itemgetter(0))
        ]
        for group_id, offsets in told.offsets.items()
    }


class _Gathering:
    """The records of the transaction that the first message belongs to."""

    def __init__(
        self, core: ConsumerCore, subscription: AtomicSubscription, messages: list[Message], messages_max: int
    ) -> None:
        self._core = core
        self._subscription = subscription
        self._messages = messages
        self._messages_max = messages_max

    def rest(self, deadline: Deadline) -> ConsumedTransaction | None:
        """Return all of it; None if the time is up, or something else is to be done first."""
        subscription = self._subscription
        with self._core.arrived:
            transaction = subscription.handed_out
            if transaction is None:
                return ConsumedTransaction(self._messages)
            is_complete = False
            try:
                while subscription.transaction is transaction:
                    if not self._take() and not self._wait(deadline):
                        return None
                is_complete = subscription.completed is transaction
            finally:
                if not is_complete:
                    subscription.give_back(self._messages)
            if not is_complete:
                return None
            producer, told = transaction.producer, transaction.told
            assert producer is not None, "it is a transaction"
            return ConsumedTransaction(
                self._messages,
                producer.producer_id,
                producer.epoch,
                None if told is None else told.transactional_id,
                {} if told is None else _partitions_of(told),
            )

    def _take(self) -> bool:
        """Add one record; return False if none is at hand."""
        core = self._core
        if core.inbox.events or not core.group.may_deliver:
            return False
        message = self._subscription.next_message()
        if message is None:
            return False
        if _is_record(message):
            self._messages.append(message)
        if len(self._messages) > self._messages_max:
            text = (
                f"the transaction has more than {self._messages_max} records: give consume_transaction() a larger"
                " messages_max, or read it with poll() or consume(), which hand it out piece by piece"
            )
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, text))
        return True

    def _wait(self, deadline: Deadline) -> bool:
        """Wait for more; return False if the time is up, or if events are to be served first."""
        core = self._core
        core.read_on()
        left_seconds = deadline.left_seconds()
        if core.inbox.events or left_seconds <= 0:
            return False
        core.group.waiting += 1
        try:
            core.arrived.wait(min(left_seconds, WAIT_SECONDS_MAX))
        finally:
            core.group.waiting -= 1
            core.group.polled()
        return True
