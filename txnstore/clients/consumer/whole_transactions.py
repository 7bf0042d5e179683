"""One committed transaction at a time: `Consumer.consume_transaction`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from txnstore.clients.consumer.opening import Committed
from txnstore.clients.consumer.orders import AtomicOrder
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


def next_transaction(
    core: ConsumerCore,
    check: Callable[[], None],
    serve: Callable[[], Message | None],
    deadline: Deadline,
    messages_max: int,
) -> ConsumedTransaction | None:
    """Return what comes next, or None once the time is up; what was gathered until then is kept for the next call.

    `check` raises an error if the consumer is closed, and `serve` serves one event: a callback that does something with
    the consumer gives back what is kept.

    Raises:
        KafkaException: `_INVALID_ARG`: transactions are not handed out whole; MSG_SIZE_TOO_LARGE: it has more records
            than `messages_max`; or an error came instead of a record.
    """
    order = core.order
    if not isinstance(order, AtomicOrder):
        text = "consume_transaction() needs txnstore.delivery.order=commit and txnstore.delivery.atomic=true"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
    gathering = _Gathering(core, order, check, messages_max)
    core.look_for_database()
    try:
        while True:
            core.polled(goes_on=True)
            if core.inbox.events:
                message = serve()
                if message is not None:
                    _check_record(message)
                continue
            found = gathering.go_on(deadline)
            if found is not None or deadline.left_seconds() <= 0:
                core.gathered()
                return found
    except BaseException:
        core.give_back(gathering.gathered)
        raise


def _check_record(message: Message) -> None:
    """Return if it is a record, and raise the error that it is otherwise; the end of a partition counts as a record."""
    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)


def _consumed(messages: list[Message], transaction: Committed | None) -> ConsumedTransaction:
    if transaction is None:
        return ConsumedTransaction(messages)
    producer, told = transaction.producer, transaction.told
    assert producer is not None, "it is a transaction"
    if told is None:
        return ConsumedTransaction(messages, producer.producer_id, producer.epoch)
    offsets = {
        group_id: [
            TopicPartition(name.topic, name.partition, one.offset, offset_in_transaction=one.offset_in_transaction)
            for name, one in sorted(sent.items(), key=itemgetter(0))
        ]
        for group_id, sent in told.offsets.items()
    }
    return ConsumedTransaction(messages, producer.producer_id, producer.epoch, told.transactional_id, offsets)


class _Gathering:
    """The records of what comes next, from the first one on that is kept."""

    def __init__(self, core: ConsumerCore, order: AtomicOrder, check: Callable[[], None], messages_max: int) -> None:
        self._core = core
        self._order = order
        self._subscription = core.subscription
        self._check = check
        self._messages_max = messages_max
        self.gathered: list[Message] = []
        """What is returned, once nobody else keeps it."""

    def go_on(self, deadline: Deadline) -> ConsumedTransaction | None:
        """Return all of it; None if the time is up, or something else is to be done first."""
        subscription = self._subscription
        with self._core.arrived:
            try:
                self._check()
                # While it waits, another thread may have given back what is kept, or have returned it.
                while not self._is_over():
                    if not self._take() and not self._wait(deadline):
                        return None
            except BaseException:
                subscription.return_kept()
                raise
            transaction = self._order.handed_out
            if transaction is not None and self._order.completed is not transaction:
                subscription.return_kept()
                return None
            self._core.read_on()
            self.gathered = subscription.kept
            subscription.let_go_kept()
            return _consumed(self.gathered, transaction)

    def _is_over(self) -> bool:
        """Return whether nothing more of it comes, and what there is may be handed out."""
        kept, transaction = self._subscription.kept, self._order.handed_out
        if len(kept) > self._messages_max:
            text = (
                f"the transaction has more than {self._messages_max} records: give consume_transaction() a larger"
                " messages_max, or read it with poll() or consume(), which hand it out piece by piece"
            )
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, text))
        if not kept or (transaction is not None and self._order.transaction is transaction):
            return False
        # The records are not the consumer's any more once the group may have given them to others, or has said so.
        return self._core.group.may_deliver and not self._core.inbox.events

    def _take(self) -> bool:
        """Keep one more record; return False if none is at hand."""
        core = self._core
        if core.inbox.events or not core.group.may_deliver:
            return False
        message = self._subscription.keep_next()
        if message is None:
            return False
        _check_record(message)
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
        self._check()
        return True
