"""Producers and consumers against a model in memory: any history of public calls, misuse, takeovers and time-outs."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.models.client_model import Broker, Client, Refused, State
from tests.tools.campaigns import times
from txnstore import OFFSET_BEGINNING, OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.store import Store
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import abort_by_administrator, abort_timed_out
from txnstore.transactions.rows import read_row

#: About 10 seconds a database.
STEPS = 30
#: PostgreSQL has the first ones of the same histories, which take it three times as long.
EXAMPLES = {"sqlite": times(60), "postgresql": times(30)}

PARTITIONS = (0, 1)
TIMEOUT_MS = 10_000
PATIENCE_SECONDS = 60.0
#: So long that nothing is sent before a flush, a commit or the end: what is in the log is what the model says.
NEVER_MS = 9_000
LARGE = b"x" * 2_000
NAMES = st.sampled_from(["anna", "bert"])
#: Which of a name's producers makes the call: mostly the newest, sometimes one that was replaced.
NEWEST, REPLACED = -1, -2
WHO = st.sampled_from([NEWEST] * 5 + [REPLACED])
#: Whether the program does first what has to be done before.
LAWFUL = st.sampled_from([True] * 3 + [False])
ISOLATION_LEVELS = ("read_committed", "read_uncommitted")


class Clients(RuleBasedStateMachine):
    """Each rule is one public call, made of the model and of the real thing."""

    url: ClassVar[str]
    store: ClassVar[Store]
    clock: ClassVar[ManualClock]

    @initialize()
    def begin(self) -> None:
        self.prefix = uuid.uuid4().hex[:12]
        self.topic = f"topic-{self.prefix}"
        new = NewTopic(self.topic, len(PARTITIONS), 1, config={"max.message.bytes": "1000"})
        AdminClient(self._configuration()).create_topics([new])[self.topic].result(PATIENCE_SECONDS)
        self.broker = Broker(PARTITIONS)
        #: The producers of each name, in the order in which they were made.
        self.clients: dict[str, list[tuple[Client, Producer]]] = {"anna": [], "bert": []}
        self.plain = Producer(self._configuration())
        self.readers = {level: self._reader(level) for level in ISOLATION_LEVELS}
        self.received: dict[str, dict[int, list[bytes | None]]] = {
            level: {partition: [] for partition in PARTITIONS} for level in ISOLATION_LEVELS
        }
        self.values = 0
        for name in self.clients:
            self._start(name)

    def teardown(self) -> None:
        if not hasattr(self, "received"):
            return
        for clients in self.clients.values():
            for client, producer in clients:
                self._close(client, producer)
        self._read()
        for consumer in self.readers.values():
            consumer.close()
        self.readers = {level: self._reader(level) for level in ISOLATION_LEVELS}
        for of_level in self.received.values():
            for values in of_level.values():
                values.clear()
        self._read()
        for consumer in self.readers.values():
            consumer.close()
        self.plain.close()

    # The calls of a program.

    @rule(name=NAMES, inits=st.sampled_from([True] * 4 + [False]))
    def start(self, name: str, inits: bool) -> None:
        self._start(name)
        if inits:
            self._init(name, NEWEST)

    @rule(name=NAMES, who=WHO)
    def init(self, name: str, who: int) -> None:
        self._init(name, who)

    @rule(name=NAMES, who=WHO, lawful=LAWFUL)
    def begin_transaction(self, name: str, who: int, lawful: bool) -> None:
        if lawful:
            self._bring_to(name, State.READY)
        self._begin(name, who)

    @rule(
        name=NAMES,
        who=WHO,
        partition=st.sampled_from(PARTITIONS),
        is_large=st.sampled_from([False] * 15 + [True]),
        flushes=st.booleans(),
        lawful=LAWFUL,
    )
    def produce(self, name: str, who: int, partition: int, is_large: bool, flushes: bool, lawful: bool) -> None:
        if lawful:
            self._bring_to(name, State.IN_TRANSACTION)
        client, producer = self._of(name, who)
        if is_large:
            # How much of what is sent along is refused with it is a matter of batches.
            self.flush(name, who)
        value = LARGE if is_large else self._next_value()
        self._both(
            client,
            lambda: client.produce(partition, value, is_refused=is_large),
            lambda: producer.produce(self.topic, value, partition=partition),
        )
        if flushes or is_large:
            self.flush(name, who)

    @rule(
        name=NAMES,
        records=st.lists(st.tuples(st.sampled_from(PARTITIONS), st.booleans()), min_size=1, max_size=4),
        offsets=st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 9), max_size=2),
        end=st.sampled_from(["commit", "commit", "abort", "stays open"]),
    )
    def work(self, name: str, records: list[tuple[int, bool]], offsets: dict[int, int], end: str) -> None:
        """The usual thing, so that histories have enough of it."""
        for partition, flushes in records:
            self.produce(name, NEWEST, partition, is_large=False, flushes=flushes, lawful=True)
        self.send_offsets(name, NEWEST, offsets, lawful=False)
        if end == "commit":
            self.commit(name, NEWEST)
        elif end == "abort":
            self.abort(name, NEWEST)

    @rule(name=NAMES, partition=st.sampled_from(PARTITIONS), flushes=st.booleans(), commits=st.booleans())
    def give_up(self, name: str, partition: int, flushes: bool, commits: bool) -> None:
        """Take back what was queued, and maybe try to commit without it."""
        self.produce(name, NEWEST, partition, is_large=False, flushes=flushes, lawful=True)
        self.produce(name, NEWEST, partition, is_large=False, flushes=False, lawful=False)
        self.purge(name, NEWEST)
        if commits:
            self.commit(name, NEWEST)

    @rule(name=NAMES, partition=st.sampled_from(PARTITIONS), end=st.sampled_from(["flush", "commit", "abort"]))
    def take_over(self, name: str, partition: int, end: str) -> None:
        """Two processes take themselves for the one; the older one is in the middle of something."""
        self._bring_to(name, State.IN_TRANSACTION)
        self._start(name)
        self._init(name, NEWEST)
        self.produce(name, REPLACED, partition, is_large=False, flushes=False, lawful=False)
        if end == "flush":
            self.flush(name, REPLACED)
        elif end == "commit":
            self.commit(name, REPLACED)
        else:
            self.abort(name, REPLACED)

    @rule(name=NAMES, who=WHO)
    def flush(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)

        def flush() -> None:
            assert producer.flush(PATIENCE_SECONDS) == 0

        self._both(client, client.flush, flush)
        assert len(producer) == 0

    @rule(name=NAMES, who=WHO)
    def purge(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)
        self._both(client, client.purge, producer.purge)

    @rule(
        name=NAMES,
        who=WHO,
        offsets=st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 9), max_size=2),
        lawful=LAWFUL,
    )
    def send_offsets(self, name: str, who: int, offsets: dict[int, int], lawful: bool) -> None:
        if lawful:
            self._bring_to(name, State.IN_TRANSACTION)
        client, producer = self._of(name, who)
        positions = [TopicPartition(self.topic, partition, offset) for partition, offset in offsets.items()]
        metadata = self.readers["read_uncommitted"].consumer_group_metadata()
        self._both(
            client,
            lambda: client.send_offsets(offsets),
            lambda: producer.send_offsets_to_transaction(positions, metadata, PATIENCE_SECONDS),
        )

    @rule(name=NAMES, who=WHO)
    def commit(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)
        self._both(client, client.commit, lambda: producer.commit_transaction(PATIENCE_SECONDS))

    @rule(name=NAMES, who=WHO)
    def abort(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)
        self._both(client, client.abort, lambda: producer.abort_transaction(PATIENCE_SECONDS))

    @rule(name=NAMES, who=st.sampled_from([REPLACED, REPLACED, NEWEST]))
    def close(self, name: str, who: int) -> None:
        self._close(*self._of(name, who))

    @rule(partition=st.sampled_from(PARTITIONS))
    def produce_plainly(self, partition: int) -> None:
        value = self._next_value()
        self.broker.append_plain(partition, value)
        self.plain.produce(self.topic, value, partition=partition)
        assert self.plain.flush(PATIENCE_SECONDS) == 0

    @rule(offsets=st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 9), min_size=1, max_size=2))
    def commit_plainly(self, offsets: dict[int, int]) -> None:
        self.broker.commit_plain(offsets)
        self.readers["read_uncommitted"].commit(
            offsets=[TopicPartition(self.topic, partition, offset) for partition, offset in offsets.items()],
            asynchronous=False,
        )

    # From outside.

    @rule(name=NAMES)
    def abort_by_administrator(self, name: str) -> None:
        if name in self.broker.owners:
            assert abort_by_administrator(self.store, self.prefix + name) is self.broker.abort_from_outside(name)

    @rule()
    def time_out(self) -> None:
        self.clock.advance(TIMEOUT_MS + 1)
        aborted = {found.removeprefix(self.prefix) for found in abort_timed_out(self.store)}
        overdue = {name for name in self.clients if self.broker.abort_from_outside(name)}
        # The readers that wait abort what holds them back, too: either was first.
        assert aborted & set(self.clients) <= overdue
        assert {name: self._state_in_store(name) for name in overdue} == dict.fromkeys(
            overdue, TransactionState.COMPLETE_ABORT
        )

    # What must hold.

    @rule()
    def read(self) -> None:
        self._read()

    @rule()
    def ask_for_committed_offsets(self) -> None:
        partitions = [TopicPartition(self.topic, partition) for partition in PARTITIONS]
        found = self.readers["read_uncommitted"].committed(partitions, PATIENCE_SECONDS)
        assert {position.partition: position.offset for position in found} == {
            partition: self.broker.offsets.get(partition, OFFSET_INVALID) for partition in PARTITIONS
        }

    @rule()
    def ask_for_the_bounds(self) -> None:
        for level, consumer in self.readers.items():
            for partition in PARTITIONS:
                assert consumer.get_watermark_offsets(TopicPartition(self.topic, partition), PATIENCE_SECONDS) == (
                    0,
                    self.broker.end(partition, level),
                )

    @rule(level=st.sampled_from(ISOLATION_LEVELS), partition=st.sampled_from(PARTITIONS), offset=st.integers(0, 30))
    def read_again_from(self, level: str, partition: int, offset: int) -> None:
        """Go back, or to an offset that holds a marker or what is not to be seen."""
        self._read()
        offset = min(offset, self.broker.end(partition, level))
        consumer = self.readers[level]
        consumer.seek(TopicPartition(self.topic, partition, offset))
        expected = self.broker.visible(partition, level, offset)
        assert [self._next_of(consumer) for _ in expected] == [(partition, value) for value in expected]
        assert consumer.poll(0) is None

    @rule()
    def ask_for_stable_offsets(self) -> None:
        """A reader of committed records waits for offsets that an open transaction holds (KIP-447)."""
        consumer = self.readers["read_committed"]
        for partition in PARTITIONS:
            asked = [TopicPartition(self.topic, partition)]
            if self.broker.is_pending(partition):
                with pytest.raises(KafkaException) as caught:
                    consumer.committed(asked, 0.02)
                assert caught.value.args[0].code() in (KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT)
            else:
                (position,) = consumer.committed(asked, PATIENCE_SECONDS)
                assert position.offset == self.broker.offsets.get(partition, OFFSET_INVALID)

    def _next_of(self, consumer: Consumer) -> tuple[int, bytes | None]:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.error() is None, message.error()
        partition = message.partition()
        assert partition is not None
        return partition, message.value()

    def _read(self) -> None:
        """Read on with the readers that have read all the while: each gets what became visible since, and no more."""
        for level, consumer in self.readers.items():
            expected = {partition: self.broker.visible(partition, level) for partition in PARTITIONS}
            received = self.received[level]
            missing = sum(map(len, expected.values())) - sum(map(len, received.values()))
            for _ in range(missing):
                partition, value = self._next_of(consumer)
                received[partition].append(value)
            assert received == expected
            assert consumer.poll(0) is None

    # Helpers.

    def _configuration(self, **more: Any) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.url,
            "txnstore.clock": self.clock,
            **{key.replace("_", "."): value for key, value in more.items()},
        }

    def _reader(self, level: str) -> Consumer:
        group = f"group-{self.prefix}"
        consumer = Consumer(self._configuration(group_id=group, isolation_level=level, enable_auto_commit=False))
        consumer.assign([TopicPartition(self.topic, partition, OFFSET_BEGINNING) for partition in PARTITIONS])
        return consumer

    def _state_in_store(self, name: str) -> TransactionState | None:
        row = self.store.read(lambda connection: read_row(connection, self.prefix + name)).row
        return None if row is None else row.state

    def _start(self, name: str) -> None:
        configuration = self._configuration(
            transactional_id=self.prefix + name, transaction_timeout_ms=TIMEOUT_MS, linger_ms=NEVER_MS
        )
        self.clients[name].append((Client(self.broker, name), Producer(configuration)))

    def _init(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)
        self._both(client, client.init, lambda: producer.init_transactions(PATIENCE_SECONDS))

    def _begin(self, name: str, who: int) -> None:
        client, producer = self._of(name, who)
        self._both(client, client.begin, producer.begin_transaction)

    def _bring_to(self, name: str, wanted: State) -> None:
        """Let the newest producer of the name do what a right program does to get there."""
        while (state := self.clients[name][NEWEST][0].state) is not wanted:
            if state in (State.CLOSED, State.FATAL):
                self._start(name)
            elif state is State.INIT:
                self._init(name, NEWEST)
            elif state is State.READY:
                self._begin(name, NEWEST)
            elif state is State.ABORTABLE:
                self.abort(name, NEWEST)
            else:
                self.commit(name, NEWEST)

    def _of(self, name: str, who: int) -> tuple[Client, Producer]:
        clients = self.clients[name]
        return clients[max(who, -len(clients))]

    def _close(self, client: Client, producer: Producer) -> None:
        client.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert producer.close() is True
            assert producer.close() is True

    def _next_value(self) -> bytes:
        self.values += 1
        return b"%d" % self.values

    def _both(self, client: Client, model: Callable[[], None], real: Callable[[], object]) -> None:
        """Call both; what the model refuses the real one must refuse, with the same code and the same way out."""
        if client.state is State.CLOSED:
            with pytest.raises(RuntimeError, match="Producer has been closed"):
                real()
            return
        refused = _refusal_of(model)
        if refused is None:
            real()
            return
        with pytest.raises(KafkaException) as caught:
            real()
        error: KafkaError = caught.value.args[0]
        assert error.code() in refused.codes, (error, refused)
        assert (error.fatal(), error.txn_requires_abort()) == (refused.is_fatal, refused.requires_abort), error
        assert not error.retriable(), error


def _refusal_of(call: Callable[[], None]) -> Refused | None:
    try:
        call()
    except Refused as refused:
        return refused
    return None


@pytest.mark.slow
@pytest.mark.campaign
# Clients come and go in each history.
@pytest.mark.crashes
def test_any_history_of_public_calls_leaves_what_the_model_has(url: str, store: Store, clock: ManualClock) -> None:
    class OnThisStore(Clients):
        pass

    OnThisStore.url, OnThisStore.store, OnThisStore.clock = url, store, clock
    run_state_machine_as_test(
        OnThisStore,
        settings=settings(
            max_examples=EXAMPLES[store.backend.name],
            stateful_step_count=STEPS,
            # The same histories in every run: a failure is found again.
            derandomize=True,
            database=None,
            # No shrinking: a history is short as it is, and to shorten it takes minutes on a database.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
