"""Log, coordinator and groups against a model in memory: any history of calls, retries, misuse and deaths."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import Connection, event, update

from tests.models.model import LAST_EPOCH, Batch, Late, Model, Refused
from tests.tools.campaigns import times
from tests.tools.crashes import is_commit
from tests.tools.elsewhere import Elsewhere
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import transactions
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import Page, fetch
from txnstore.log.topics import create_topic
from txnstore.model import (
    GroupMembership,
    IsolationLevel,
    OffsetAndMetadata,
    ProducerIdentity,
    Record,
)
from txnstore.testing.invariants import assert_sound
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome
from txnstore.transactions.recovery import (
    abort_by_administrator,
    abort_timed_out,
    complete_all_decided,
    expire_producers,
    expire_transactional_ids,
)
from txnstore.transactions.transaction import SentOffsets

#: Enough to find every fault that was put into the code on purpose, and about 20 seconds a database.
STEPS = 25
#: PostgreSQL has the first ones of the same histories, which take it three times as long.
EXAMPLES = {"sqlite": times(40), "postgresql": times(20)}

TIMEOUT_MS = 1_000
EXPIRATION_MS = 2_000
NAMES = st.sampled_from(["anna", "bert", "carl"])
GROUPS = st.sampled_from(["readers", "writers"])
#: Whose identity a call has: mostly that of a process that was started anew if there is none that could do it; or that
#: of the one that was started last, whatever has happened since, or a wrong one.
WHO = st.sampled_from(
    ["a new one"] * 12 + ["the last one"] * 4 + ["the one before", "the first", "the next epoch", "somebody else"]
)
OFFSETS = st.dictionaries(st.integers(0, 1), st.integers(0, 9), min_size=1)
#: Batches of a call: for each partition how many records, and how they are numbered.
BATCHES = st.dictionaries(
    st.integers(0, 1),
    st.tuples(st.integers(1, 2), st.sampled_from(["next"] * 6 + ["repeated", "with a gap"])),
    min_size=1,
)
DIES_AFTER = st.sampled_from([None] * 6 + [0, 1, 2, 3, 4])
NOBODY = ProducerIdentity(10**15, 0)


class Died(Exception):
    """The process is gone."""


@contextmanager
def dying_after(store: Store, commits: int | None) -> Iterator[None]:
    """Let the process die before its next commit once it has done so many."""
    left = commits
    commits_whole = store.commits_whole

    def die(connection: Connection, cursor: Any, statement: str, *_: object) -> None:
        nonlocal left
        if left is not None and is_commit(statement):
            if left == 0:
                raise Died
            left -= 1

    if commits is not None:
        # PostgreSQL's function is one statement that commits or, where a transaction is not a usual one, changes
        # nothing: whether it is a step cannot be told before.
        store.commits_whole = False
    event.listen(store.engine, "before_cursor_execute", die)
    try:
        yield
    finally:
        store.commits_whole = commits_whole
        event.remove(store.engine, "before_cursor_execute", die)


@dataclass
class End:
    """An EndTxn with all that it brought along, to be called once more."""

    producer: ProducerIdentity
    commit: bool
    batches: list[Batch]
    offsets: dict[str, dict[int, int]]


class LogAndCoordinator(RuleBasedStateMachine):
    """Each rule is one public call, made of the model and of the real thing."""

    store: ClassVar[Store]
    clock: ClassVar[ManualClock]

    @initialize(delivers_elsewhere=st.booleans(), near_the_last_epoch=st.booleans())
    def begin(self, delivers_elsewhere: bool, near_the_last_epoch: bool) -> None:
        self.prefix = uuid.uuid4().hex
        self.delivers_elsewhere = delivers_elsewhere
        cluster = Elsewhere(self.store, sends_here=True) if delivers_elsewhere else None
        self.coordinator = TransactionCoordinator(self.store, cluster)
        #: The partitions to which the last decision of a name sends its markers, one after the other.
        self.queued: dict[str, list[int]] = {}
        topic = self.store.write(lambda connection: create_topic(connection, self.prefix, partition_count=2))
        self.partition_ids = topic.partition_ids
        self.model = Model(self.partition_ids, delivers_elsewhere=delivers_elsewhere)
        #: Every identity that a process of the name was told, in order.
        self.told: dict[str, list[ProducerIdentity]] = {}
        self.ends: dict[str, End] = {}
        #: Of each producer in a partition, the batches that stand there: first sequence, how many, offset.
        self.placed: dict[tuple[ProducerIdentity, int], list[tuple[int, int, int]]] = {}
        self.records = 0
        self.idempotent = self.coordinator.init_producer_id(None).identity
        for name in ("anna", "bert"):
            self._init(name, None, two_phase=False, keep_prepared=False)
        if near_the_last_epoch:
            self._age("anna", LAST_EPOCH - 2)
            self._init("anna", None, two_phase=False, keep_prepared=False)
            del self.told["anna"][:-1]

    def _age(self, name: str, epoch: int) -> None:
        """Let the producer have had all the epochs below."""
        statement = update(transactions).where(transactions.c.transactional_id == self.prefix + name)
        self.store.write(lambda connection: connection.execute(statement.values(producer_epoch=epoch)))
        identity = ProducerIdentity(self.told[name][-1].producer_id, epoch)
        self.model.ids[name].identity = identity

    # The calls of clients.

    @rule(
        name=NAMES,
        who=st.sampled_from([None, None, "the last one", "the one before"]),
        two_phase=st.booleans(),
        keep=st.booleans(),
    )
    def init(self, name: str, who: str | None, two_phase: bool, keep: bool) -> None:
        expected = None if who is None or name not in self.told else self._identity(name, who)
        self._init(name, expected, two_phase=two_phase, keep_prepared=two_phase and keep)

    @rule(name=NAMES, times=st.integers(1, 4))
    def take_over(self, name: str, times: int) -> None:
        """Let processes come that keep what is open, one after the other."""
        if name not in self.model.ids or self.model.ids[name].state != "Ongoing":
            self._init(name, None, two_phase=True, keep_prepared=False)
            self.append(name, "the last one", {0: (1, "next")})
        for _ in range(times):
            self._init(name, None, two_phase=True, keep_prepared=True)

    def _init(self, name: str, expected: ProducerIdentity | None, *, two_phase: bool, keep_prepared: bool) -> None:
        self._tick()
        timeout_ms = None if two_phase else TIMEOUT_MS
        answer = self._both(
            lambda: self.model.init(name, expected, timeout_ms, keep_prepared=keep_prepared),
            lambda: self.coordinator.init_producer_id(
                self.prefix + name,
                TIMEOUT_MS,
                expected=expected,
                enable_two_phase_commit=two_phase,
                keep_prepared=keep_prepared,
            ),
        )
        if answer is not None:
            kept, initialized = answer
            assert initialized.ongoing == kept
            self._tell(name, initialized.identity)

    @rule(name=NAMES, who=WHO, batches=BATCHES)
    def append(self, name: str, who: str, batches: dict[int, tuple[int, str]]) -> None:
        producer = self._identity(name, who)
        sent = self._batches(producer, batches)
        appends = [self._encoded(batch, is_transactional=True) for batch in sent]
        answer = self._both(
            lambda: self.model.append(name, producer, sent),
            lambda: self.coordinator.append(self.prefix + name, producer, appends),
            name,
        )
        if answer is not None:
            expected, appended = answer
            assert [(place.base_offset, place.is_duplicate) for place in appended] == expected
            self._remember(sent, expected)

    @rule(
        number=st.integers(0, 1),
        batch=st.tuples(st.integers(1, 2), st.sampled_from(["", "next", "repeated", "with a gap"])),
    )
    def append_plain(self, number: int, batch: tuple[int, str]) -> None:
        count, how = batch
        values = self._values(count)
        item = Append(self.partition_ids[number], encode([Record(value) for value in values]))
        sent = None
        if how:
            (sent,) = self._batches(self.idempotent, {number: batch})
            item = self._encoded(sent, is_transactional=False)
        answer = self._both(
            lambda: self.model.append_plain(sent, self.partition_ids[number], values),
            lambda: self.store.write(lambda connection: append(connection, [item]))[0],
        )
        if answer is not None:
            expected, place = answer
            assert (place.base_offset, place.is_duplicate) == expected
            if sent is not None:
                self._remember([sent], [expected])

    @rule(name=NAMES, who=WHO, group=GROUPS, offsets=OFFSETS)
    def send_offsets(self, name: str, who: str, group: str, offsets: dict[int, int]) -> None:
        producer = self._identity(name, who)
        by_id = self._by_id(offsets)
        self._both(
            lambda: self.model.send_offsets(name, producer, group, by_id),
            lambda: self.coordinator.send_offsets(self.prefix + name, producer, self._sent(group, by_id)),
            name,
        )

    @rule(group=GROUPS, offsets=OFFSETS)
    def commit_offsets(self, group: str, offsets: dict[int, int]) -> None:
        by_id = self._by_id(offsets)
        sent = self._sent(group, by_id)
        self._both(
            lambda: self.model.commit_offsets(group, by_id),
            lambda: self.store.write(lambda connection: commit_offsets(connection, sent.committer, sent.offsets)),
        )

    @rule(name=NAMES, who=WHO, commit=st.booleans(), dies_after=DIES_AFTER)
    def end(self, name: str, who: str, commit: bool, dies_after: int | None) -> None:
        self._end(name, End(self._identity(name, who), commit, [], {}), dies_after)

    @rule(name=NAMES, who=WHO, batches=BATCHES, offsets=st.dictionaries(GROUPS, OFFSETS), dies_after=DIES_AFTER)
    def commit_at_once(
        self,
        name: str,
        who: str,
        batches: dict[int, tuple[int, str]],
        offsets: dict[str, dict[int, int]],
        dies_after: int | None,
    ) -> None:
        producer = self._identity(name, who)
        by_id = {group: self._by_id(of_group) for group, of_group in offsets.items()}
        self._end(name, End(producer, True, self._batches(producer, batches), by_id), dies_after)

    @rule(name=NAMES, dies_after=DIES_AFTER)
    def commit_late(self, name: str, dies_after: int | None) -> None:
        """Ask for the commit after the deadline, before anybody else has come."""
        self.append(name, "a new one", {0: (1, "next"), 1: (1, "next")})
        self.clock.advance(TIMEOUT_MS + 1)
        self._end(name, End(self._identity(name, "the last one"), True, [], {}), dies_after)

    @rule(name=NAMES)
    def end_once_more(self, name: str) -> None:
        """The answer was lost, or the process died and the next one knows what it was about to do."""
        if name in self.ends:
            self._end(name, self.ends[name], None)

    def _end(self, name: str, end: End, dies_after: int | None) -> None:
        self._tick()
        self.ends[name] = end
        model = copy.deepcopy(self.model) if dies_after == 0 else self.model
        appends = [self._encoded(batch, is_transactional=True) for batch in end.batches]
        offsets = [self._sent(group, by_id) for group, by_id in end.offsets.items()]

        def call() -> Any:
            with dying_after(self.store, dies_after):
                return self.coordinator.end_transaction(
                    self.prefix + name, end.producer, commit=end.commit, appends=appends, offsets=offsets
                )

        try:
            expected, commits, late = self._end_in(model, name, end, dies_after)
        except Refused as refused:
            # Nothing is changed, also where a commit of nothing is a step on the way.
            with pytest.raises(refused.errors if dies_after is None else (*refused.errors, Died)):
                call()
            return
        if dies_after is not None and dies_after < commits:
            with pytest.raises(Died):
                call()
            if dies_after > 0:
                self._remember(end.batches, expected)
            return
        if late is not None:
            with self._refusal(late):
                call()
            return
        ended = call()
        self._tell(name, ended.identity)
        assert [(place.base_offset, place.is_duplicate) for place in ended.appended] == expected
        self._remember(end.batches, expected)

    def _end_in(
        self, model: Model, name: str, end: End, dies_after: int | None
    ) -> tuple[list[tuple[int, bool]], int, Late | None]:
        """Return where the batches stand, how many commits it takes to the end, and why all that was an abort.

        The model dies on the way.
        """
        id_ = model.ids.get(name)
        is_repetition = id_ is not None and end.producer == id_.ended
        expected: list[tuple[int, bool]] = []
        late = None
        if id_ is not None and id_.state == "Ongoing" and id_.transaction is not None:
            queue = sorted(id_.transaction.unmarked)
        else:
            queue = self.queued.get(name, []) if id_ is not None and id_.is_decided else []
        try:
            if is_repetition:
                expected = [(offset, True) for batch in end.batches if (offset := self._offset_of(batch)) is not None]
            else:
                if end.batches:
                    expected = model.append(name, end.producer, end.batches)
                for group, offsets in end.offsets.items():
                    model.send_offsets(name, end.producer, group, offsets)
            model.end(name, end.producer, commit=end.commit)
        except Late as refused:
            late = refused
        if not self.delivers_elsewhere or not queue:
            model.deliver(name)
            return expected, 1, late
        self.queued[name] = queue
        # The decision, each marker that was not written with it, the completion; who is late looks for what is left.
        before = 1 if late is None else 2
        commits = before + len(queue) + 1
        if dies_after is not None and 0 < dies_after < commits:
            with_decision = () if is_repetition or late else (batch.partition_id for batch in end.batches)
            model.deliver(name, [*with_decision, *queue[: max(0, dies_after - before)]])
        else:
            model.deliver(name)
        return expected, commits, late

    # From outside.

    @rule(milliseconds=st.sampled_from([1, TIMEOUT_MS // 2, TIMEOUT_MS, EXPIRATION_MS]))
    def wait(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    @rule()
    def complete_decided(self) -> None:
        self._tick()
        complete_all_decided(self.store)
        self.model.complete_all()

    @rule()
    def reap(self) -> None:
        self._tick()
        assert self._own(abort_timed_out(self.store)) == self.model.abort_timed_out()

    @rule(name=NAMES)
    def abort_by_administrator(self, name: str) -> None:
        assert abort_by_administrator(self.store, self.prefix + name) is self.model.abort_from_outside(name)

    @rule()
    def expire(self) -> None:
        self._tick()
        assert self._own(expire_transactional_ids(self.store)) == self.model.expire_ids(EXPIRATION_MS)
        expire_producers(self.store)
        self.model.expire_producers(EXPIRATION_MS)

    @rule(name=NAMES, which=st.integers(0, 9))
    def resolve_outcome(self, name: str, which: int) -> None:
        if name not in self.told:
            return
        producer = self.told[name][which % len(self.told[name])]
        self._tick()
        outcome = resolve_outcome(self.store, self.prefix + name, producer)
        assert outcome is (Outcome.COMMITTED if self.model.resolve(name, producer) else Outcome.ABORTED)

    # What must hold after each of them.

    @invariant()
    def readers_see_what_the_model_has(self) -> None:
        def look(connection: Connection) -> tuple[dict[int, Page], dict[int, Page], dict[str, Any]]:
            positions = dict.fromkeys(self.partition_ids, 0)
            return (
                fetch(connection, positions, isolation=IsolationLevel.READ_COMMITTED),
                fetch(connection, positions, isolation=IsolationLevel.READ_UNCOMMITTED),
                {
                    group: read_offsets(connection, self.prefix + group, self.partition_ids)
                    for group in ("readers", "writers")
                },
            )

        committed, uncommitted, groups = self.store.read(look)
        for partition_id in self.partition_ids:
            bounds = committed[partition_id].bounds
            assert bounds.high_watermark == len(self.model.partitions[partition_id])
            assert bounds.last_stable_offset == self.model.last_stable_offset(partition_id)
            assert records(committed[partition_id]) == self.model.committed(partition_id)
            assert records(uncommitted[partition_id]) == self.model.uncommitted(partition_id)
            assert committed[partition_id].next_offset == bounds.last_stable_offset
            assert uncommitted[partition_id].next_offset == bounds.high_watermark
        for group, found in groups.items():
            assert {number: offset.offset for number, offset in found.offsets.items()} == self.model.offsets(group)
            assert found.unstable == self.model.unstable(group)

    @rule(
        number=st.integers(0, 1),
        isolation=st.sampled_from(IsolationLevel),
        position=st.integers(0, 9),
        size=st.integers(1, 3),
    )
    def read_in_pages(self, number: int, isolation: IsolationLevel, position: int, size: int) -> None:
        partition_id = self.partition_ids[number]
        visible = self.model.committed if isolation is IsolationLevel.READ_COMMITTED else self.model.uncommitted
        position = min(position, len(self.model.partitions[partition_id]))
        expected = [record for record in visible(partition_id) if record[0] >= position]
        found: list[tuple[int, bytes | None]] = []
        while True:
            at = {partition_id: position}
            page = self.store.read(
                lambda connection, at=at: fetch(connection, at, isolation=isolation, records_max=size)
            )[partition_id]
            found += records(page, position)
            if page.next_offset == position:
                assert found == expected
                return
            position = page.next_offset

    # Helpers.

    def _tick(self) -> None:
        self.model.now_ms = self.clock.now_ms()

    def _both(
        self, model: Callable[[], Any], real: Callable[[], Any], name: str | None = None
    ) -> tuple[Any, Any] | None:
        """Call both; if the model refuses, the real one must refuse with one of its errors."""
        self._tick()
        try:
            expected = model()
        except Refused as refused:
            if isinstance(refused, Late):
                assert name is not None
                self.model.deliver(name)
            with self._refusal(refused):
                real()
            return None
        return expected, real()

    def _refusal(self, refused: Refused) -> pytest.RaisesExc[TxnStoreError]:
        note(f"the model refuses with {', '.join(error.__name__ for error in refused.errors)}")
        return pytest.raises(refused.errors)

    def _tell(self, name: str, identity: ProducerIdentity) -> None:
        self.model.learn(name, identity)
        told = self.told.setdefault(name, [])
        if identity not in told:
            told.append(identity)

    def _identity(self, name: str, who: str) -> ProducerIdentity:
        if who == "a new one" and (name not in self.model.ids or self.told[name][-1] != self.model.ids[name].identity):
            self._init(name, None, two_phase=False, keep_prepared=False)
        told = self.told.get(name, [NOBODY])
        if who == "somebody else":
            return self.told["bert" if name == "anna" else "anna"][-1]
        if who == "the next epoch":
            return ProducerIdentity(told[-1].producer_id, told[-1].epoch + 1)
        return told[{"the one before": max(-2, -len(told)), "the first": 0}.get(who, -1)]

    def _batches(self, producer: ProducerIdentity, batches: dict[int, tuple[int, str]]) -> list[Batch]:
        sent = []
        for number, (count, how) in sorted(batches.items()):
            partition_id = self.partition_ids[number]
            placed = self.placed.get((producer, partition_id), [])
            first = placed[-1][0] + placed[-1][1] if placed else 0
            if how == "with a gap":
                first += 1
            size = count
            if how == "repeated" and placed:
                first, size, _ = placed[-min(len(placed), 1 + self.records % 7)]
            sent.append(Batch(partition_id, producer, first, self._values(size)))
        return sent

    def _remember(self, sent: list[Batch], expected: list[tuple[int, bool]]) -> None:
        # A repetition may come with other batches than the first call; it appends none, and answers for those it finds.
        for batch, (offset, is_duplicate) in zip(sent, expected, strict=False):
            if not is_duplicate:
                placed = self.placed.setdefault((batch.producer, batch.partition_id), [])
                placed.append((batch.first_sequence, len(batch.values), offset))

    def _offset_of(self, batch: Batch) -> int | None:
        """Return where a batch with this sequence number stands."""
        placed = self.placed.get((batch.producer, batch.partition_id), [])
        return next((offset for first, _, offset in placed if first == batch.first_sequence), None)

    def _values(self, count: int) -> list[bytes]:
        self.records += count
        return [b"%d" % (self.records - number) for number in range(count, 0, -1)]

    def _encoded(self, batch: Batch, *, is_transactional: bool) -> Append:
        records = [Record(value) for value in batch.values]
        return Append(
            batch.partition_id,
            encode(
                records,
                producer=batch.producer,
                base_sequence=batch.first_sequence,
                is_transactional=is_transactional,
            ),
        )

    def _by_id(self, offsets: dict[int, int]) -> dict[int, int]:
        return {self.partition_ids[number]: offset for number, offset in offsets.items()}

    def _sent(self, group: str, offsets: dict[int, int]) -> SentOffsets:
        return SentOffsets(
            GroupMembership(self.prefix + group),
            {partition_id: OffsetAndMetadata(offset) for partition_id, offset in offsets.items()},
        )

    def _own(self, transactional_ids: tuple[str, ...]) -> set[str]:
        """Return the names among the ids; earlier examples have left theirs behind."""
        return {name.removeprefix(self.prefix) for name in transactional_ids if name.startswith(self.prefix)}


def records(page: Page, position: int = 0) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.value) for batch in page.batches for record in batch.records(position)]


@pytest.mark.slow
@pytest.mark.campaign
def test_any_history_of_calls_leaves_what_the_model_has(store: Store, clock: ManualClock) -> None:
    store.write(
        lambda connection: change_store_settings(
            connection,
            {
                "transaction.two.phase.commit.enable": "true",
                "transactional.id.expiration.ms": str(EXPIRATION_MS),
                "producer.id.expiration.ms": str(EXPIRATION_MS),
            },
        )
    )

    class OnThisStore(LogAndCoordinator):
        pass

    # What a new connection is asked after a death ends with a COMMIT, too, which is none of the call's.
    store.check_new_connection = None
    OnThisStore.store, OnThisStore.clock = store, clock
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
    assert_sound(store)
