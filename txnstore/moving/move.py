"""The move: a store goes to another database with all that it holds, and leaves nothing that could be written to.

    move(source, target)

Steps, each durable before the next one begins; if one is killed in between, the next call goes on
where it was:

1. The target, which is fresh, is closed for everybody else.
2. The source is closed for writers: the database refuses every write.  Until step 6 `cancel` opens it again.
3. Tables are copied, page by page; the position is written together with each page.
4. What gives out numbers goes on where it was.
5. Both are compared, and the target is verified.
6. The source is marked as gone.  There is no way back from here.
7. The target is opened.

The move has a name that only these two know, so the source never goes to two targets.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, delete, exists, func, insert, select, update

from txnstore.db import closing
from txnstore.db.closing import (
    Move,
    MoveState,
    read_cancelled_moves,
    read_last_move,
    read_move,
    refuse,
    set_move,
    wait_for_writers,
)
from txnstore.db.cluster.membership import ALONE_LABEL, CONTROLLER_ID, read_databases
from txnstore.db.identity import check_original
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.row_security import check_sees_store
from txnstore.db.schema import stores
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, OutcomeUnknown, StoreDamaged, StoreMoved
from txnstore.log.outbox.rows import tell_callers_apart
from txnstore.moving.digests import Digest, by_table, differences, digest_of, next_key, part_of_next_key
from txnstore.moving.pages import Key, check_values, key_of, pages
from txnstore.moving.tables import (
    COPIED,
    COPIED_BY_NAME,
    LEFT_BY_ANYBODY,
    MADE_WITH_TABLES,
    STORE_COLUMNS,
    CopiedTable,
)
from txnstore.transactions.branch_rows import all_branches
from txnstore.verification.invariants import Violation
from txnstore.verification.verify import verify_store

#: How many things an error lists.
_LISTED_MAX: Final = 20

_PRODUCER_IDS: Final = select(stores.c.next_producer_id)
_OF_STORE: Final = select(*STORE_COLUMNS)
_TAKE_OVER: Final = update(stores).values({column: bindparam(f"new_{column.name}") for column in STORE_COLUMNS})
_CALL: Final = update(stores).values(store_uuid=bindparam("new_uuid"), database_identity=bindparam("new_identity"))

#: Hears of a step by its name, how much of it is done, and how much there is; 0 if that is not known.
Told = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class FillPosition:
    """How far a target is filled, as it stands in its row."""

    table: str = ""
    """The table that was copied last; empty: none yet."""

    after: Key = ()
    """The key of its last row that was copied."""

    row_count: int = 0
    """How many rows were copied, of all tables."""

    is_complete: bool = False
    """Whether all is copied."""

    is_verified: bool = False
    """Whether it was found to be the same as the source."""

    next_keys: tuple[tuple[str, int], ...] = ()
    """By table, the keys that it was told to give out next, once all is copied."""

    def to_json(self) -> str:
        """Return the text that the row holds."""
        return json.dumps([self.table, self.after, self.row_count, self.is_complete, self.is_verified, self.next_keys])

    @classmethod
    def from_json(cls, text: str | None) -> FillPosition:
        """Return the position that a row holds."""
        table, after, row_count, is_complete, is_verified, next_keys = json.loads(text or "")
        of_tables = tuple((name, key) for name, key in next_keys)
        return cls(table, tuple(after), row_count, is_complete, is_verified, of_tables)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move has done."""

    store_uuid: str
    tables: dict[str, Digest]
    """What both hold, by table; empty if it was compared by an earlier call."""

    was_there: bool = False
    """Whether it had been done before."""


def move(source: Store, target: Store, *, told: Told | None = None, even_if_damaged: bool = False) -> Moved:
    """Move the store to the target, or go on with it; both are opened with `moving`.

    With `even_if_damaged` also a store that the rules of the verification find something wrong with.

    Raises:
        InvalidRequest: the source is a part of a cluster, has branches in other databases or text that the target
            cannot hold; or the target is not empty, or filled by another call; or one of them is in memory.
        StoreCopied: one of them is a copy that was not adopted.
        StoreMoved: the source is being moved to another target, or has gone there.
        PermissionDenied: a role lacks a right, or row-level security shows it a part of its store.
        StoreDamaged: the source is not sound, or the two differ at the end.
        TxnStoreError: one of the databases refuses or cannot be reached.
    """
    _check_lasting(source, target)
    tell = told or _nobody
    found, arriving = source.read(read_move), target.read(read_move)
    if found is not None and found.state is MoveState.GONE and arriving is None:
        if target.read(read_last_move) == found.uuid:
            return Moved(_uuid(target), {}, was_there=True)
        raise refuse(source.url, found)
    if _place_of(source) == _place_of(target):
        raise InvalidRequest(f"{source.url} and {target.url} are the same store")
    _check_shown(source)
    _check_shown(target)
    _check_source(source, found)
    # As it is called since another call has filled it.
    target.store_uuid = _uuid(target)
    _check_target(target, arriving)
    if found is None:
        # First: of a database alone the verification finds the logs missing that live in the others.
        source.read(partial(_refuse_member, source))
        remedy = "`txnstore verify` says what to do"
        _check_sound(source, remedy, even_if_damaged, lambda *of: tell("verifying the source", *of))
    if arriving is None:
        arriving = _arrive(source, target, found)
    _check_going_on(source, target, found, arriving)
    if found is None:
        found = _close(source, target, arriving)
    tables: dict[str, Digest] = {}
    if found.state is MoveState.CLOSED:
        filling = _Filling(source, target, arriving)
        filling.run(lambda *of: tell("copying", *of))
        if not filling.position.is_verified:
            remedy = (
                "the source is the same: `txnstore copy --cancel` opens it again, `txnstore verify` says what to do"
            )
            try:
                tables = _compare(source, target, dict(filling.position.next_keys), tell)
                _check_sound(target, remedy, even_if_damaged, lambda *of: tell("verifying the target", *of))
            except StoreDamaged:
                # What clients write to a target that another call has opened is no damage, nor what they write to a
                # source that is open again.
                filling.check_alone()
                raise
            filling.settle(replace(filling.position, is_verified=True))
        _leave(source, found)
    _open(target, arriving)
    return Moved(_uuid(target), tables)


def _check_lasting(*both: Store) -> None:
    for store in both:
        if store.url.is_in_memory:
            raise InvalidRequest(f"{store.url} is in memory: what is in it is gone with this process")


def _check_source(source: Store, found: Move | None) -> None:
    """Refuse what is filled itself, and a copy unless it has gone: any copy of that says the same, nothing opens it."""
    if found is None:
        check_original(source)
    elif found.state is MoveState.ARRIVING:
        # A copy of the target has the same name: it says nothing of whether the source has gone.
        raise refuse(source.url, found)
    elif found.state is MoveState.CLOSED:
        check_original(
            source,
            f"It was closed there for a copy to {found.peer}: only from there that goes on. Of what is a backup,"
            " `txnstore copy --cancel` and `txnstore adopt` make a store of its own. Only if the original is gone, and"
            " the copy that it was closed for was never opened, `--cancel` and `txnstore adopt --same` make this"
            " one the original",
        )


def _check_target(target: Store, arriving: Move | None) -> None:
    """Refuse a copy; of one that is filled no word of anybody makes the original: both would be opened."""
    if arriving is None:
        check_original(target)
    else:
        check_original(
            target,
            f"It was filled there from {arriving.peer}, and only there it is opened. If FROM is closed and not gone,"
            " `txnstore copy --cancel` opens it again, and it moves to a fresh database",
        )


def _check_shown(store: Store) -> None:
    """Refuse to take a part of what a database holds for a store, or a store for an empty place."""
    store.read(partial(check_sees_store, store, judgement="there is more in the store"))


def cancel(source: Store) -> bool:
    """Open the store again for everybody, unless it has gone; return whether it was closed.

    What was copied stays where it is, and can never be opened; empty that database before another move.

    Raises:
        StoreMoved: the store has gone elsewhere, or is itself being filled.
        TxnStoreError: the database refuses or cannot be reached.
    """

    def work(connection: Connection) -> bool:
        wait_for_writers(connection)
        found = read_move(connection)
        if found is None:
            return False
        if found.state is not MoveState.CLOSED:
            raise refuse(source.url, found)
        closing.cancel(connection, found)
        # It may be on another server since it was closed.
        tell_callers_apart(connection)
        return True

    return source.write(work)


def name_of(store: Store) -> str:
    """Return what a store is called in the other one's row: its address, without a password."""
    name = str(store.url)
    if store.url.kind == "sqlite" and store.url.url.database:
        name = f"sqlite:///{Path(store.url.url.database).absolute()}"
    return name if store.schema == DEFAULT_SCHEMA else f"{name} (schema {store.schema})"


def _nobody(_step: str, _done: int, _total: int) -> None:
    pass


def _uuid(store: Store) -> str:
    """Return what the store is called now; the one in memory is from when it was opened."""
    return store.read(lambda connection: str(connection.execute(select(stores.c.store_uuid)).scalar_one()))


def _place_of(store: Store) -> tuple[str, str]:
    """Return which database and schema a store is in, however its address is written."""
    return store.read(store.backend.identity) or name_of(store), store.schema


# --- 1: the target -----------------------------------------------------------------------------------------------


def _arrive(source: Store, target: Store, found: Move | None) -> Move:
    """Close the target for all but this move, if it is fresh; return its mark."""

    def work(connection: Connection) -> Move:
        wait_for_writers(connection)
        arriving = read_move(connection)
        if arriving is not None:
            # Another call was faster; whether it is one of the same move is seen below.
            return arriving
        if found is not None:
            raise refuse(source.url, found)
        arriving = Move(MoveState.ARRIVING, str(uuid.uuid4()), name_of(source), FillPosition().to_json())
        closing.close(connection, arriving)
        closing.admit(connection, arriving)
        _check_fresh(connection, target)
        for table in (*MADE_WITH_TABLES, *LEFT_BY_ANYBODY):
            connection.execute(delete(table))
        identity = target.backend.identity(connection)
        connection.execute(_CALL, {"new_uuid": source.store_uuid, "new_identity": identity})
        set_move(connection, arriving)
        return arriving

    return target.write(work)


def _check_going_on(source: Store, target: Store, found: Move | None, arriving: Move) -> None:
    """Refuse a target that another move fills, or filled."""
    if arriving.state is not MoveState.ARRIVING:
        raise refuse(target.url, arriving)
    if found is not None and arriving.uuid != found.uuid:
        raise refuse(source.url, found)
    if _uuid(target) != source.store_uuid:
        raise refuse(target.url, arriving)
    if found is None and FillPosition.from_json(arriving.position) != FillPosition():
        raise _was_cancelled(target)


def _was_cancelled(target: Store) -> InvalidRequest:
    return InvalidRequest(
        f"{target.url} was to hold a copy that was cancelled: drop its tables, run `txnstore migrate` on it, and start"
        " again"
    )


def _check_fresh(connection: Connection, target: Store) -> None:
    """Refuse a database in which there is anything but what its tables are made with."""
    used = [copied.name for copied in COPIED if not _is_fresh(connection, copied)]
    if used or connection.execute(_PRODUCER_IDS).scalar_one() != 0:
        where = f": there are rows in {', '.join(used)}" if used else ": producers have used it"
        raise InvalidRequest(
            f"{target.url} is not empty{where}. The target must be a separate database, prepared by `txnstore migrate`"
        )


def _is_fresh(connection: Connection, copied: CopiedTable) -> bool:
    if copied.table in LEFT_BY_ANYBODY:
        return True
    if copied.table in MADE_WITH_TABLES:
        return bool(connection.execute(select(func.count()).select_from(copied.table)).scalar_one() == 1)
    return not connection.execute(select(exists(select(*copied.key)))).scalar_one()


# --- 2: the source -----------------------------------------------------------------------------------------------


def _refuse_member(source: Store, connection: Connection) -> None:
    members = read_databases(connection)
    if len(members) > 1 or members[0].label != ALONE_LABEL or members[0].database_id != CONTROLLER_ID:
        raise InvalidRequest(
            f"{source.url} is one of the databases of a cluster ({', '.join(member.label for member in members)});"
            " only a store that is alone can be copied. Move each database by a dump of its own kind, and run"
            " `txnstore adopt --same` on all"
        )


def _close(source: Store, target: Store, arriving: Move) -> Move:
    """Let nobody write to the source from now on; return its mark."""
    closed = Move(MoveState.CLOSED, arriving.uuid, name_of(target))

    def work(connection: Connection) -> Move:
        wait_for_writers(connection)
        found = read_move(connection)
        if found is not None:
            # Another call of the same move was faster, or another move.
            if found.uuid != closed.uuid:
                raise refuse(source.url, found)
            return found
        cancelled = read_cancelled_moves(connection)
        if closed.uuid in cancelled:
            # A call from before may still be there: it would take this closing for its own, and what it has read and
            # compared is from before the last writes.
            raise _was_cancelled(target)
        closing.close(connection, replace(closed, position=json.dumps(cancelled)))
        _refuse_member(source, connection)
        branches = [
            f"{each.gid} of {each.transactional_id} in {each.database_label}" for each in all_branches(connection)
        ]
        if branches:
            raise InvalidRequest(
                f"transactions of {source.url} have branches in other databases; end them first with"
                " `txnstore maintain --once --participant URL`, or, where a database is gone for good, give them up"
                f" with `txnstore transactions forget GID`: {_listed(branches)}"
            )
        return closed

    mark = source.write(work)
    # Readers that wait for something look again.
    source.announce()
    return mark


def _leave(source: Store, closed: Move) -> None:
    """Mark the source as gone, if it is still closed for this move."""

    def work(connection: Connection) -> None:
        wait_for_writers(connection)
        if not _is_closed_for(read_move(connection), closed):
            raise _open_again(source)
        set_move(connection, replace(closed, state=MoveState.GONE))

    source.write(work)


def _is_closed_for(found: Move | None, closed: Move) -> bool:
    return found is not None and found.uuid == closed.uuid


def _open_again(source: Store) -> StoreMoved:
    return StoreMoved(f"the copy was cancelled, and {source.url} is open again: what was copied is no longer the store")


# --- 3 and 4: the rows -------------------------------------------------------------------------------------------


class _Filling:
    """A target while it is filled: each page goes on from the position that the one before has left."""

    def __init__(self, source: Store, target: Store, arriving: Move) -> None:
        self._source = source
        self._target = target
        self._arriving = arriving

    @property
    def position(self) -> FillPosition:
        """How far it is filled."""
        return FillPosition.from_json(self._arriving.position)

    def run(self, told: Callable[[int, int], None]) -> None:
        """Copy what is not copied yet."""
        if self.position.is_complete:
            return
        total = self._source.read(_count_rows)
        told(self.position.row_count, total)
        into_sqlite = self._target.backend.name == "sqlite"
        for copied, after in _left(self.position):
            for rows in pages(self._source, copied, after):
                check_values(copied, rows, into_sqlite=into_sqlite)
                self._write_page(copied, rows)
                told(self.position.row_count, total)
        self._set_numbers()

    def settle(self, position: FillPosition, work: Callable[[Connection], None] | None = None) -> None:
        """Do some work on the target and move it on to this position, in one database transaction.

        InvalidRequest if somebody else has filled it further.
        """
        behind = replace(self._arriving, position=position.to_json())

        def settle(connection: Connection) -> None:
            if not closing.admit(connection, self._arriving):
                raise self._not_alone()
            if work is not None:
                work(connection)
            set_move(connection, behind)

        while True:
            try:
                self._target.write(settle)
            except OutcomeUnknown:
                # It was done if its position is there; otherwise it is done again.
                if self._target.read(read_move) == behind:
                    break
            else:
                break
        self._arriving = behind

    def check_alone(self) -> None:
        """Raise what becomes of this call if somebody else has filled the target further, or opened either of both."""
        if self._target.read(read_move) != self._arriving:
            raise self._not_alone()
        if not _is_closed_for(self._source.read(read_move), self._arriving):
            raise _open_again(self._source)

    def _not_alone(self) -> InvalidRequest:
        return InvalidRequest(
            f"another call of `txnstore copy` has gone on with {self._target.url}: wait for its end, or end it"
        )

    def _write_page(self, copied: CopiedTable, rows: Sequence[Row[Any]]) -> None:
        values = [row._asdict() for row in rows]
        before = self.position
        behind = FillPosition(copied.name, key_of(copied, rows[-1]), before.row_count + len(rows))
        self.settle(behind, lambda connection: _insert(connection, copied, values))

    def _set_numbers(self) -> None:
        """Let the target give out numbers from where the source stopped."""
        of_store = self._source.read(lambda connection: connection.execute(_OF_STORE).one())
        keys = {copied.name: next_key(self._source, copied) for copied in COPIED if copied.own_key is not None}

        def work(connection: Connection) -> None:
            connection.execute(_TAKE_OVER, {f"new_{name}": value for name, value in of_store._asdict().items()})
            backend, schema = self._target.backend, self._target.schema
            for name, key in keys.items():
                column = COPIED_BY_NAME[name].own_key
                assert column is not None
                backend.set_next_key(connection, schema, name, column, key)

        self.settle(replace(self.position, is_complete=True, next_keys=tuple(keys.items())), work)


def _left(position: FillPosition) -> Iterator[tuple[CopiedTable, Key | None]]:
    """Return the tables that are not copied to their end, and the last key of what is copied of each."""
    names = [copied.name for copied in COPIED]
    begun = names.index(position.table) if position.table else -1
    if begun >= 0:
        yield COPIED[begun], position.after
    for copied in COPIED[begun + 1 :]:
        yield copied, None


def _count_rows(connection: Connection) -> int:
    return sum(
        int(connection.execute(select(func.count()).select_from(copied.table)).scalar_one()) for copied in COPIED
    )


def _insert(connection: Connection, copied: CopiedTable, rows: Sequence[dict[str, Any]]) -> None:
    connection.execute(insert(copied.table), rows)


# --- 5 to 7: what both hold, and the change ----------------------------------------------------------------------


def _check_sound(store: Store, remedy: str, even_if_damaged: bool, told: Callable[[int, int], None]) -> None:
    """Refuse to go on with a store in which something is wrong."""
    if even_if_damaged:
        return
    found: Sequence[Violation] = verify_store(store, told=told)
    if found:
        raise StoreDamaged(
            f"{store.url} is not sound: {_listed([f'{violation.place}: {violation.seen}' for violation in found])}."
            f" As for that, {remedy}; --even-if-damaged moves it as it is"
        )


def _compare(source: Store, target: Store, next_keys: Mapping[str, int], tell: Told) -> dict[str, Digest]:
    """Return what both hold, or StoreDamaged; the target is to give out `next_keys`, by table, next."""
    total, done = 2 * source.read(_count_rows), 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        tell("comparing", done, total)

    of_source, of_target = digest_of(source, told=count), digest_of(target, told=count)
    for name, key in next_keys.items():
        part = part_of_next_key(COPIED_BY_NAME[name])
        # A writer that is refused may already have drawn a number, which PostgreSQL does not take back; it is unused.
        if of_source[part].sum_ > key:
            of_source[part] = Digest(1, key)
    if found := list(differences(of_source, of_target)):
        raise StoreDamaged(
            f"{source.url} and {target.url} do not hold the same, and nothing was opened: {_listed(found)}"
        )
    return by_table(of_source)


def _open(target: Store, ours: Move) -> None:
    """Let everybody write to the target, which is the store from now on; a second call changes nothing."""

    def work(connection: Connection) -> None:
        wait_for_writers(connection)
        arriving = read_move(connection)
        if arriving is None:
            return
        if arriving.uuid != ours.uuid:
            # Another call has opened it, and it has begun to move on, or is filled again.
            raise refuse(target.url, arriving)
        assert FillPosition.from_json(arriving.position).is_verified, arriving.position
        closing.admit(connection, arriving)
        tell_callers_apart(connection)
        closing.open_(connection, replace(arriving, position=None))

    target.write(work)


def _listed(items: Iterable[str]) -> str:
    texts = list(items)
    more = f"; and {len(texts) - _LISTED_MAX} more" if len(texts) > _LISTED_MAX else ""
    return "; ".join(texts[:_LISTED_MAX]) + more
