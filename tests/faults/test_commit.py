"""A COMMIT on PostgreSQL that fails, never arrives, or whose answer is lost: done, not done or unknown."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy.exc import DBAPIError

from txnstore.errors import (
    OutcomeUnknown,
    ProducerFenced,
    StatementFailed,
    StatementTimedOut,
    StoreBusy,
    StoreFull,
    StoreUnavailable,
    TransactionPoisoned,
    WriteConflict,
)
from txnstore.log.append import append, append_at_once
from txnstore.model import NO_PRODUCER
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome

#: At COMMIT a deferred trigger looks at what was appended. A sequence, which no rollback turns back, counts its visits.
REFUSE_COMMITS = """
CREATE SEQUENCE public.visits;
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('public.visits') <= {times} THEN
        RAISE EXCEPTION 'refused at COMMIT' USING ERRCODE = '{sqlstate}';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON txnstore.record_batches
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.refuse();
"""
EVERY_TIME = 2**31


@pytest.fixture
def refuse_commits(fresh):
    def refuse(sqlstate, times=EVERY_TIME):
        fresh.store.write(
            lambda connection: connection.exec_driver_sql(REFUSE_COMMITS.format(sqlstate=sqlstate, times=times))
        )

    return refuse


class Attempt:
    """An append that remembers the ids which PostgreSQL gave its database transactions."""

    def __init__(self, orders, *batches):
        self.orders = orders
        self.batches = batches
        self.transaction_ids = []

    def __call__(self, **options):
        return self.orders.store.write(self._work, **options)

    def _work(self, connection):
        appended = append(connection, self.batches)
        (transaction_id,) = connection.exec_driver_sql("SELECT pg_current_xact_id()::text").one()
        self.transaction_ids.append(transaction_id)
        return appended

    def truth(self, direct):
        """Ask the server, on a connection that no fault touches, what became of the last one."""
        statement = f"SELECT pg_xact_status('{self.transaction_ids[-1]}'::xid8)"
        return direct.store.read(lambda connection: connection.exec_driver_sql(statement).scalar_one())


@pytest.fixture
def attempt(proxied):
    """An append, through the proxy, of a batch that can be recognised."""
    producer = TransactionCoordinator(proxied.store).init_producer_id(None).identity
    return Attempt(proxied, proxied.batch(b"a book", producer=producer))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("23514", StatementFailed),
        ("40001", WriteConflict),
        ("40P01", WriteConflict),
        ("53100", StoreFull),
        ("55P03", StoreBusy),
        ("57014", StatementTimedOut),
    ],
)
def test_a_commit_that_the_server_refuses_is_not_done(fresh, refuse_commits, sqlstate, kind):
    refuse_commits(sqlstate)
    with pytest.raises(kind) as refusal:
        fresh.add(b"a book", retry_timeout_ms=0)
    assert not refusal.value.outcome_unknown
    assert fresh.values() == []
    assert fresh.store.engine.pool.checkedout() == 0


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_victim_at_commit_is_tried_again_and_done_once(fresh, refuse_commits, sqlstate):
    refuse_commits(sqlstate, times=2)
    attempt = Attempt(fresh, fresh.batch(b"a book"))
    attempt()
    assert len(attempt.transaction_ids) == 3
    assert fresh.values() == [b"a book"]


def commit_whole(orders, **options):
    coordinator, producer = orders.transaction("payments")
    batch = orders.batch(b"a book", producer=producer, transactional=True)
    return lambda: coordinator.end_transaction("payments", producer, commit=True, appends=[batch], **options)


def append_alone(orders, **options):
    return lambda: append_at_once(orders.store, [orders.batch(b"a book")], NO_PRODUCER, **options)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make_call", [commit_whole, append_alone])
@pytest.mark.parametrize(("sqlstate", "kind"), [("23514", StatementFailed), ("40001", WriteConflict)])
def test_one_statement_that_the_server_refuses_to_commit_is_not_done(fresh, refuse_commits, make_call, sqlstate, kind):
    """The server says of such a statement that it is done before it commits."""
    fresh.store.commits_whole = True
    call = make_call(fresh, retry_timeout_ms=0)
    refuse_commits(sqlstate)
    with pytest.raises(kind) as refusal:
        call()
    assert not refusal.value.outcome_unknown
    assert fresh.values() == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make_call", [commit_whole, append_alone])
@pytest.mark.parametrize("sqlstate", ["23514", "40001"])
def test_one_statement_whose_commit_is_refused_is_done_once_in_the_end(fresh, refuse_commits, make_call, sqlstate):
    fresh.store.commits_whole = True
    call = make_call(fresh)
    refuse_commits(sqlstate, times=1)
    call()
    assert fresh.committed() == [b"a book"]


def test_a_default_isolation_level_of_the_role_makes_no_victims(fresh, txnstore_postgresql_url, txnstore_open):
    database = txnstore_postgresql_url.rpartition("/")[2]
    fresh.store.write(
        lambda connection: connection.exec_driver_sql(
            f'ALTER DATABASE "{database}" SET default_transaction_isolation = serializable'
        )
    )
    with txnstore_open(txnstore_postgresql_url) as store:
        shown = "SHOW transaction_isolation"
        assert store.write(lambda connection: connection.exec_driver_sql(shown).scalar_one()) == "read committed"
        assert store.read(lambda connection: connection.exec_driver_sql(shown).scalar_one()) == "repeatable read"


def swallow_an_error(connection):
    with contextlib.suppress(DBAPIError):
        connection.exec_driver_sql("SELECT 1 / 0")


def test_a_swallowed_error_of_a_statement_cannot_be_committed_over(direct):
    def work(connection):
        append(connection, [direct.batch(b"a book")])
        swallow_an_error(connection)

    with pytest.raises(TransactionPoisoned):
        direct.store.write(work)
    assert direct.values() == []
    assert direct.add(b"a pen")[0].base_offset == 0


def test_the_answer_rollback_to_commit_is_an_error(direct):
    """The server says it without an error, when the failed database transaction is committed after all."""

    def work(connection):
        append(connection, [direct.batch(b"a book")])
        swallow_an_error(connection)
        connection.exec_driver_sql("COMMIT")

    with pytest.raises(TransactionPoisoned, match="ROLLBACK"):
        direct.store.write(work)
    assert direct.values() == []


def test_a_statement_after_a_swallowed_error_is_refused(direct):
    def work(connection):
        swallow_an_error(connection)
        append(connection, [direct.batch(b"a book")])

    with pytest.raises(TransactionPoisoned):
        direct.store.write(work)
    assert direct.values() == []


def test_a_commit_that_never_arrives_is_unknown_and_was_aborted(direct, proxy, attempt):
    cut = proxy.cut(before="COMMIT")
    with pytest.raises(OutcomeUnknown):
        attempt()
    assert cut.wait()
    assert attempt.truth(direct) == "aborted"
    assert direct.values() == []
    (appended,) = attempt()
    assert not appended.is_duplicate
    assert direct.values() == [b"a book"]


def test_a_commit_whose_answer_is_lost_is_unknown_and_was_done(direct, proxy, attempt):
    lost = proxy.cut(after="COMMIT")
    with pytest.raises(OutcomeUnknown):
        attempt()
    assert lost.wait()
    assert attempt.truth(direct) == "committed"
    (appended,) = attempt()
    assert appended.is_duplicate
    assert direct.values() == [b"a book"]


@pytest.mark.parametrize("where", ["before", "after"])
def test_nobody_repeats_blindly_what_may_have_been_done(direct, proxy, open_proxied, where):
    patient = open_proxied(retry_timeout_ms=30_000)
    attempt = Attempt(patient, patient.batch(b"a book"))
    cut = proxy.cut(**{where: "COMMIT"})
    with pytest.raises(OutcomeUnknown):
        attempt()
    assert cut.wait()
    assert len(attempt.transaction_ids) == 1
    assert direct.values() == ([b"a book"] if where == "after" else [])


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_was_only_read_is_known_whatever_becomes_of_its_commit(direct, proxy, open_proxied, where):
    direct.add(b"a book")
    patient = open_proxied(retry_timeout_ms=30_000)
    cut = proxy.cut(**{where: "COMMIT"})
    assert patient.values() == [b"a book"]
    assert cut.wait()


def test_an_unknown_outcome_leaves_no_connection_open(proxy, attempt, proxied):
    proxy.cut(after="COMMIT")
    with pytest.raises(OutcomeUnknown):
        attempt()
    assert proxied.store.engine.pool.checkedin() == 0
    assert proxied.store.engine.pool.checkedout() == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("decision", ["commit", "abort"])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("way", ["repeat", "init", "resolve"])
def test_an_unknown_end_of_a_transaction_is_resolved_in_every_way(direct, proxy, proxied, decision, where, way):
    coordinator, producer = proxied.transaction(direct.name, b"a book")
    cut = proxy.cut(**{where: "COMMIT"})
    commit = decision == "commit"
    with pytest.raises(OutcomeUnknown):
        coordinator.end_transaction(direct.name, producer, commit=commit)
    assert cut.wait()
    was_done = where == "after"
    assert direct.committed() == ([b"a book"] if commit and was_done else [])
    if way == "repeat":
        coordinator.end_transaction(direct.name, producer, commit=commit)
        is_there = commit
    elif way == "init":
        assert coordinator.init_producer_id(direct.name).identity.epoch > producer.epoch + was_done
        is_there = commit and was_done
    else:
        is_there = resolve_outcome(proxied.store, direct.name, producer) is Outcome.COMMITTED
        assert is_there == (commit and was_done)
    assert direct.committed() == ([b"a book"] if is_there else [])
    if way != "repeat":
        # The late twin of the lost call changes nothing any more; it may be told what stands, but nothing else.
        with contextlib.suppress(ProducerFenced):
            coordinator.end_transaction(direct.name, producer, commit=is_there)
        assert direct.committed() == ([b"a book"] if is_there else [])


@pytest.mark.parametrize("arrives", [True, False], ids=["arrives late", "never arrives"])
def test_a_commit_under_way_is_waited_for_before_the_outcome_is_told(
    direct, proxy, proxied, in_background, until, arrives
):
    """The question raises the epoch first, and for that it needs the lock that the commit under way still holds."""
    coordinator, producer = proxied.transaction(direct.name, b"a book")
    pause = proxy.pause(before="COMMIT")
    ending = in_background(lambda: coordinator.end_transaction(direct.name, producer, commit=True))
    assert pause.wait()
    resolving = in_background(lambda: resolve_outcome(direct.store, direct.name, producer))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    until(lambda: direct.store.read(lambda connection: connection.exec_driver_sql(waiting).scalar_one()))
    if arrives:
        pause.resume()
        ending.result()
    else:
        proxy.cut_connections()
        with pytest.raises(OutcomeUnknown):
            ending.result()
    assert resolving.result() is (Outcome.COMMITTED if arrives else Outcome.ABORTED)
    assert direct.committed() == ([b"a book"] if arrives else [])
    assert resolve_outcome(direct.store, direct.name, producer) is (Outcome.COMMITTED if arrives else Outcome.ABORTED)


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_unknown_init_is_resolved_by_another_one(direct, proxy, proxied, where):
    coordinator, producer = proxied.transaction(direct.name, b"a book")
    cut = proxy.cut(**{where: "COMMIT"})
    with pytest.raises(OutcomeUnknown):
        coordinator.init_producer_id(direct.name)
    assert cut.wait()
    again = coordinator.init_producer_id(direct.name).identity
    assert again.epoch > producer.epoch
    with pytest.raises(ProducerFenced):
        coordinator.end_transaction(direct.name, producer, commit=True)
    assert direct.committed() == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kills", ["pg_terminate_backend", "pg_cancel_backend"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_session_ended_around_its_commit_is_done_or_unknown(
    direct, proxy, attempt, in_background, txnstore_postgres_server, kills, when
):
    pause = proxy.pause(**{when: "COMMIT"})
    running = in_background(attempt)
    assert pause.wait()
    with txnstore_postgres_server.connect() as administrator:
        administrator.execute(
            f"SELECT {kills}(pid) FROM pg_stat_activity WHERE application_name = 'txnstore' AND datname = %s"
            " AND pid <> ALL (%s)",
            [direct.store.url.url.database, sessions_of(direct)],
        )
    pause.resume()
    if kills == "pg_terminate_backend" and when == "before":
        with pytest.raises(OutcomeUnknown):
            running.result()
        assert attempt.truth(direct) == "aborted"
    else:
        # A session that waits for its client has nothing to cancel; an answer that is under way arrives.
        running.result()
        assert attempt.truth(direct) == "committed"
    (appended,) = attempt(retry_timeout_ms=10_000)
    assert appended.is_duplicate == (kills == "pg_cancel_backend" or when == "after")
    assert direct.values() == [b"a book"]


def sessions_of(orders):
    """Return the server's processes of a store's connections: one at a time is enough for these tests."""
    return [orders.store.read(lambda connection: connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())]


def test_an_error_before_the_commit_is_not_done_and_tried_again(direct, proxy, open_proxied):
    patient = open_proxied(retry_timeout_ms=30_000)
    attempt = Attempt(patient, patient.batch(b"a book"))
    cut = proxy.cut(before="INSERT INTO txnstore.record_batches")
    attempt()
    assert cut.wait()
    assert direct.values() == [b"a book"]


def test_an_error_before_the_commit_is_told_as_such_when_there_is_no_time_left(direct, proxy, attempt):
    cut = proxy.cut(after="INSERT INTO txnstore.record_batches")
    with pytest.raises(StoreUnavailable):
        attempt()
    assert cut.wait()
    assert direct.values() == []
