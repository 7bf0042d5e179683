"""Whoever helps dies while he does: what he began is done by the next one, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from sqlalchemy import Connection, delete, select

from tests.crash.afterlives import Remains, live_on, next_reaper_comes, start_producer
from tests.crash.everywhere import crash_everywhere
from tests.crash.scenarios import FIRST, SENT, Scenario, all_of, ends, sends
from tests.crash.worlds import OLD, OLD_OFFSET, PARTITIONS, TIMEOUT_MS, Place, Step, View, World, look, written
from tests.tools.lists import be_many
from txnstore.db.portions import Portions
from txnstore.db.schema import partition_storage, producer_states, record_batches, transaction_log
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping, TransactionAbortable
from txnstore.log import compaction, retention
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import batch_bytes, count_stored
from txnstore.log.topics import change_topic_configs, lock_topic_configs, names_of_partitions
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.leases import LEASE_MS
from txnstore.maintenance.turns import Turn, take_turn
from txnstore.model import ControlType, Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import resolve_outcome
from txnstore.transactions.protocol import TransactionMetadata, TransactionState
from txnstore.transactions.recovery import abort_timed_out, expire_producers, expire_transactional_ids, trim_journal
from txnstore.transactions.rows import read_row

pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

DAY_MS = 86_400_000


def passes(place: Place, milliseconds: int) -> Step:
    """Return the passing of time, for everybody."""
    return lambda world, store: place.clock.advance(milliseconds)


def test_a_reaper_that_died_is_followed_by_the_next_one(place: Place):
    scenario = Scenario(
        "the abort of a transaction that is open for too long",
        all_of(SENT, passes(place, TIMEOUT_MS + 1)),
        lambda world, store: abort_timed_out(store),
        [FIRST],
        has_offsets=True,
        ends_in=ControlType.ABORT,
    )

    def check(left: View, commits: int) -> None:
        assert left.state is (TransactionState.COMPLETE_ABORT if commits else TransactionState.ONGOING)
        assert left.epochs == commits

    def live(world: World, store: Store, left: View) -> None:
        live_on(next_reaper_comes, Remains(scenario, world, store, place.clock, left))

    progress = crash_everywhere(
        place, before=scenario.before, call=scenario.call, check=check, lives=[live], steps_min=12
    )
    assert progress.commits == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("goes_as_many", [False, True], ids=["few", "as many"])
def test_a_reaper_of_many_that_died_has_aborted_all_or_none(
    place: Place, monkeypatch: pytest.MonkeyPatch, goes_as_many: bool
):
    if goes_as_many:
        if place.is_sqlite:
            pytest.skip("there it is the same way")
        be_many(monkeypatch)

    def more(world: World) -> list[str]:
        return [f"{world.transactional_id}-more-{number}" for number in range(3)]

    def more_begin(world: World, store: Store) -> None:
        coordinator = TransactionCoordinator(store)
        for transactional_id in more(world):
            producer = coordinator.init_producer_id(transactional_id, TIMEOUT_MS).identity
            coordinator.append(transactional_id, producer, world.batches(FIRST, producer=producer))
            coordinator.send_offsets(transactional_id, producer, world.offsets())

    def rows_of_all(world: World, store: Store) -> list[TransactionMetadata]:
        found = [
            store.read(lambda connection, name=name: read_row(connection, name)).row
            for name in (world.transactional_id, *more(world))
        ]
        return [row for row in found if row is not None]

    def next_reaper_comes_for_all(world: World, store: Store, left: View) -> None:
        before = rows_of_all(world, store)
        assert {row.state for row in before} == {left.state}, "all or none"
        was_open = left.state is TransactionState.ONGOING
        assert len(abort_timed_out(store)) == (4 if was_open else 0)
        assert abort_timed_out(store) == ()
        after = rows_of_all(world, store)
        assert {row.state for row in after} == {TransactionState.COMPLETE_ABORT}
        assert [row.producer_epoch - old.producer_epoch for row, old in zip(after, before, strict=True)] == [
            was_open
        ] * 4
        view = look(store, world)
        assert (view.committed, view.offsets, view.is_pending) == (written(OLD), (OLD_OFFSET,) * PARTITIONS, False)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
        with pytest.raises(TransactionAbortable):
            ends(commit=True)(world, store)

    progress = crash_everywhere(
        place,
        before=all_of(SENT, more_begin, passes(place, TIMEOUT_MS + 1)),
        call=lambda world, store: abort_timed_out(store),
        check=lambda left, commits: None,
        lives=[next_reaper_comes_for_all],
        steps_min=12,
    )
    assert progress.commits == 1


def test_who_died_while_he_asked_for_an_outcome_may_ask_again(place: Place):
    def ask(world: World, store: Store) -> object:
        return resolve_outcome(store, world.transactional_id, world.producer)

    scenario = Scenario(
        "the question how an open transaction ended", SENT, ask, [FIRST], has_offsets=True, ends_in=ControlType.ABORT
    )

    def live(world: World, store: Store, left: View) -> None:
        def asks_again(remains: Remains) -> tuple[ControlType, None]:
            assert ask(world, store) is ask(world, store)
            return ControlType.ABORT, None

        live_on(asks_again, Remains(scenario, world, store, place.clock, left))

    crash_everywhere(
        place,
        before=SENT,
        call=ask,
        check=lambda left, commits: None,
        lives=[live],
        steps_min=10,
    )


def test_a_transactional_id_expires_whole_or_not_at_all(place: Place):
    def check(left: View, commits: int) -> None:
        assert left.state is (None if commits else TransactionState.COMPLETE_COMMIT)
        assert left.committed == written(OLD)

    def expiry_is_repeated(world: World, store: Store, left: View) -> None:
        expected = () if left.state is None else (world.transactional_id,)
        assert expire_transactional_ids(store) == expected
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
        with pytest.raises(InvalidProducerIdMapping):
            sends(FIRST)(world, store)
        assert start_producer(world, store).producer_id != world.producer.producer_id
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)
        place.clock.advance(8 * DAY_MS)
        assert expire_transactional_ids(store) == (world.transactional_id,)

    progress = crash_everywhere(
        place,
        before=passes(place, 8 * DAY_MS),
        call=lambda world, store: expire_transactional_ids(store),
        check=check,
        lives=[expiry_is_repeated],
        steps_min=8,
    )
    assert progress.commits == 1


def is_alone(world: World, store: Store) -> None:
    """Forget what earlier worlds have left: so many portions would come before the world's own."""

    def work(connection: Connection) -> None:
        connection.execute(
            delete(producer_states).where(
                producer_states.c.partition_id.not_in(world.partition_ids),
                producer_states.c.transaction_first_offset.is_(None),
            )
        )
        connection.execute(delete(transaction_log).where(transaction_log.c.transactional_id != world.transactional_id))

    store.write(work)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("forget", "portions"), [(expire_producers, 2), (trim_journal, 1)])
def test_what_is_old_is_forgotten_in_portions_each_whole_or_not_at_all(
    place: Place, forget: Callable[[Store], int], portions: int
):
    def producer_goes_on(world: World, store: Store, left: View) -> None:
        forget(store)
        assert forget(store) == 0
        ends(FIRST, commit=True)(world, store)
        assert look(store, world).committed == written(OLD, FIRST)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place,
        before=all_of(is_alone, passes(place, 8 * DAY_MS)),
        call=lambda world, store: forget(store),
        check=lambda left, commits: None,
        lives=[producer_goes_on],
        steps_min=5,
    )
    # Producers: a portion for each partition.
    assert progress.commits == portions


@pytest.mark.slow
def test_a_turn_that_ends_anywhere_is_taken_up_once_its_time_is_over(place: Place):
    due = [duty for duty in DUTIES if duty.name in ("silent producers forgotten", "journal entries deleted")]

    def have_turn(store: Store) -> Turn:
        # For as long as it takes, but with the small portions of somebody who has little time.
        return take_turn(store, None, due, Portions(seconds=3_600))

    def next_client_comes(world: World, store: Store, left: View) -> None:
        place.clock.advance(LEASE_MS)
        have_turn(store)
        assert have_turn(store).done == {}
        assert expire_producers(store) == trim_journal(store) == 0
        ends(FIRST, commit=True)(world, store)
        assert look(store, world).committed == written(OLD, FIRST)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place,
        before=all_of(is_alone, passes(place, 8 * DAY_MS)),
        call=lambda world, store: have_turn(store),
        check=lambda left, commits: None,
        lives=[next_client_comes],
        steps_min=15,
    )
    # The leases are taken, a portion for each partition and one of the journal, and the leases are left.
    assert progress.commits == 5


def expire(world: World, store: Store) -> int:
    """Delete what is past its retention, in this world alone: other worlds wait for their crashes."""
    now_ms, limits, _ = store.read(retention._read_limits)
    candidates = [
        each for each in retention._candidates(store, limits, now_ms) if each.partition_id in world.partition_ids
    ]
    return sum(retention._expire(store, candidate, now_ms, {}, Portions())[0] for candidate in candidates)


def keeps(**texts: str) -> Step:
    """Return the change of the settings that say what the world's topic keeps."""

    def change(world: World, store: Store) -> None:
        changes = {name.replace("_", "."): text for name, text in texts.items()}

        def work(connection: Connection) -> None:
            (place,) = names_of_partitions(connection, world.partition_ids[:1]).values()
            change_topic_configs(connection, lock_topic_configs(connection, place.topic), changes)

        store.write(work)

    return change


def assert_sizes_are_true(world: World, store: Store) -> None:
    """Assert that what is kept of the sizes of partitions is what their batches take."""
    kept = select(partition_storage).where(partition_storage.c.partition_id.in_(world.partition_ids))
    for row in store.read(lambda connection: connection.execute(kept).all()):
        counted = select(record_batches.c.size_bytes).where(
            record_batches.c.partition_id == row.partition_id, record_batches.c.last_offset < row.counted_offset
        )
        sizes = store.read(lambda connection, counted=counted: connection.execute(counted).scalars().all())
        assert row.size_bytes == sum(map(batch_bytes, sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "commits_per_partition"),
    [
        # Its start is moved, its batches are deleted, and nothing is left to delete.
        (keeps(retention_ms="604800000", retention_bytes="-1"), 3),
        # Before that it is counted, and found to be counted.
        (keeps(retention_ms="-1", retention_bytes="0"), 5),
    ],
    ids=["by age", "by size"],
)
def test_what_is_past_its_retention_goes_step_by_step_each_whole_or_not_at_all(
    place: Place, kept: Step, commits_per_partition: int
):
    def producer_goes_on(world: World, store: Store, left: View) -> None:
        assert_sizes_are_true(world, store)
        # What was half done is neither in anybody's way, nor counted twice.
        expire(world, store)
        assert expire(world, store) == 0
        assert look(store, world).committed == written()
        ends(FIRST, commit=True)(world, store)
        assert look(store, world).committed == written(FIRST)
        assert_sizes_are_true(world, store)
        assert_sound(store, at_rest=True, partition_ids=world.partition_ids)

    progress = crash_everywhere(
        place,
        before=all_of(kept, passes(place, 8 * DAY_MS)),
        call=expire,
        check=lambda left, commits: None,
        lives=[producer_goes_on],
        steps_min=20,
    )
    assert progress.commits == PARTITIONS * commits_per_partition


def compact(world: World, store: Store) -> int:
    """Compact this world's partitions alone: other worlds wait for their crashes."""
    now_ms, settings_of, _ = store.read(compaction._read_settings)
    # All worlds have the same.
    settings = next(iter(settings_of.values()))
    changed = 0
    for partition_id in world.partition_ids:
        count_stored(store, partition_id)
        due = store.read(partial(compaction._due, partition_id, settings, now_ms))
        changed += 0 if due is None else sum(part.batches_changed for part in compaction._Pass(store, due).steps())
    return changed


def has_keys(world: World, store: Store) -> None:
    """Write each key twice to each partition, then remove one, and let the topic be compacted."""

    def work(connection: Connection) -> None:
        for partition_id in world.partition_ids:
            for rows in ([(b"a", b"1"), (b"b", b"1")], [(b"c", b"1")], [(b"a", b"2"), (b"c", None)]):
                append(connection, [Append(partition_id, encode([Record(value, key=key) for key, value in rows]))])

    store.write(work)
    keeps(cleanup_policy="compact", min_cleanable_dirty_ratio="0", delete_retention_ms="0")(world, store)


def tables(world: World, store: Store) -> list[dict[bytes | None, bytes]]:
    """Return of each partition the newest value of each key, as a reader of all records gets it."""
    found = []
    for partition_id in world.partition_ids:
        page = store.read(lambda connection, of=partition_id: fetch(connection, {of: 0}))[partition_id]
        records = [record for batch in page.batches for record in batch.records() if record.key is not None]
        newest = {record.key: record.value for record in records}
        found.append({key: value for key, value in newest.items() if value is not None})
    return found


@pytest.mark.slow
def test_a_compaction_may_end_anywhere_and_no_reader_sees_a_difference(place: Place):
    expected = [{b"a": b"2", b"b": b"1"}] * PARTITIONS

    def compaction_goes_on(world: World, store: Store, left: View) -> None:
        assert_sizes_are_true(world, store)
        assert tables(world, store) == expected
        # Every tombstone goes with the pass after the one that found it.
        for _ in range(2):
            compact(world, store)
            assert tables(world, store) == expected
            assert_sizes_are_true(world, store)
        assert compact(world, store) == 0
        for partition_id in world.partition_ids:
            page = store.read(lambda connection, of=partition_id: fetch(connection, {of: 0}))[partition_id]
            # What each world begins with has no key, and stays.
            assert [record.key for batch in page.batches for record in batch.records()] == [None, None, b"b", b"a"]

    crash_everywhere(
        place,
        before=has_keys,
        call=compact,
        check=lambda left, commits: None,
        lives=[compaction_goes_on],
        steps_min=20,
    )
