"""`txnstore copy`: says what it has moved, goes on, gives up, and is not called wrongly."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from sqlalchemy import text, update

from tests.copies import copy_file
from txnstore.cli import copy as command
from txnstore.db import closing
from txnstore.db.closing import read_move
from txnstore.db.opening import open_store
from txnstore.db.schema import stores
from txnstore.db.url import parse_url
from txnstore.errors import StoreFull, StoreUnavailable
from txnstore.log.topics import create_topic
from txnstore.moving import move as moving


@pytest.fixture
def urls(request, url):
    """A store with a topic, and a fresh database of the other kind."""
    kind = "postgresql" if url.startswith("sqlite") else "sqlite"
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "orders", partition_count=2))
    return url, request.getfixturevalue(f"txnstore_{kind}_url")


def stop_at(txnstore, urls, monkeypatch, step):
    """Begin to copy, and die at this step."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, step, stop)
        assert txnstore("copy", *urls).code == 130


def give_identity(url, identity):
    """Let the store have been made in this place; None: nobody knows where."""
    with open_store(url, create=False, moving=True) as store:
        store.write(lambda connection: connection.execute(update(stores).values(database_identity=identity)))


@pytest.mark.slow
def test_it_says_what_went_where(txnstore, urls):
    ended = txnstore("copy", *urls)
    assert (ended.code, ended.err) == (0, "")
    heading, *rows, empty, last = ended.out.splitlines()
    assert heading.split() == ["TABLE", "ROWS", "DIGEST"]
    assert [row.split()[:2] for row in rows] == [
        ["databases", "1"],
        ["topics", "1"],
        ["partitions", "2"],
        ["partition_heads", "2"],
        ["outbox_sequencers", "1"],
    ]
    assert empty == ""
    assert "lives in" in last
    assert "***" not in urls[1] or "postgres:***@" in last
    again = json.loads(txnstore("copy", *urls, "--json").out)
    assert (again["was_there"], again["tables"]) == (True, [])
    assert "moved to" in txnstore("topics", "list", "--url", urls[0]).err
    assert txnstore("topics", "list", "--url", urls[1]).out.splitlines()[1].split()[0] == "orders"


@pytest.mark.slow
def test_a_copy_that_stopped_is_cancelled_or_goes_on(txnstore, urls, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_compare", stop)
        ended = txnstore("copy", *urls)
        assert ended.code == 130
        assert "is closed now, and the copy is not complete; the same command goes on with it" in ended.err
    ended = txnstore("topics", "list", "--url", urls[0])
    assert (ended.code, "it is being copied to" in ended.err) == (1, True)
    assert txnstore("copy", "--cancel", urls[0]).out.endswith(": open again\n")
    assert txnstore("copy", "--cancel", urls[0]).out.endswith(": open already: no copy has closed it\n")
    assert txnstore("topics", "list", "--url", urls[0]).code == 0
    ended = txnstore("copy", *urls)
    assert (ended.code, "a copy that was cancelled" in ended.err) == (1, True)
    with open_store(urls[0]) as store:
        assert store.read(read_move) is None


def test_what_a_newer_version_has_closed_is_to_be_opened_by_it(txnstore, txnstore_postgresql_url):
    url = txnstore_postgresql_url

    def close_anew(connection):
        closing.wait_for_writers(connection)
        closing.close(connection, closing.Move(closing.MoveState.CLOSED, str(uuid4()), "sqlite:///elsewhere.db"))
        trigger = "CREATE TRIGGER newer BEFORE INSERT ON txnstore.outbox EXECUTE FUNCTION txnstore.refuse_write('no')"
        connection.execute(text(trigger))

    with open_store(url) as store:
        store.write(close_anew)
    ended = txnstore("copy", "--cancel", url)
    assert (ended.code, "run this with the version that closed the store" in ended.err) == (1, True)
    assert "is closed" in txnstore("topics", "list", "--url", url).err


@pytest.mark.slow
def test_an_error_says_that_the_source_is_closed_only_if_it_is(txnstore, urls, monkeypatch):
    def fail(*_, **__):
        raise StoreFull("there is no room; nothing was changed")

    told = "is closed now, and the copy is not complete; the same command goes on with it, and `txnstore copy --cancel"
    with monkeypatch.context() as patched:
        patched.setattr(moving, "_arrive", fail)
        ended = txnstore("copy", *urls)
        assert (ended.code, ended.err) == (1, "txnstore: there is no room; nothing was changed\n")
    with monkeypatch.context() as patched:
        patched.setattr(moving, "_compare", fail)
        ended = txnstore("copy", *urls)
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert f"there is no room; nothing was changed; {parse_url(urls[0])} {told}" in ended.err
    assert txnstore("copy", *urls).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreUnavailable("no server")])
def test_what_stops_it_between_both_says_that_neither_is_open_and_what_opens_the_target(
    txnstore, urls, monkeypatch, error
):
    def stop(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_open", stop)
        ended = txnstore("copy", *urls)
    told = f"the store has left {parse_url(urls[0])} for good, and {parse_url(urls[1])} is not open yet: run the same"
    assert (ended.code, told in ended.err) == (130 if isinstance(error, KeyboardInterrupt) else 75, True), ended.err
    assert "it is being filled by a copy of" in txnstore("topics", "list", "--url", urls[1]).err
    assert "lives in" in txnstore("copy", *urls).out


@pytest.mark.slow
def test_what_stops_it_behind_its_end_says_nothing_of_what_is_closed(txnstore, urls, monkeypatch):
    open_target = moving._open

    def stop_behind(*arguments):
        open_target(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_open", stop_behind)
        ended = txnstore("copy", *urls)
    assert (ended.code, "open yet" in ended.err) == (130, False)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1], ids=["from", "to"])
@pytest.mark.parametrize("step", ["_leave", "_open"], ids=["closed", "gone"])
def test_a_store_that_moves_and_seems_to_be_in_another_place_is_adopted_by_nobody(
    txnstore, urls, monkeypatch, step, side
):
    stop_at(txnstore, urls, monkeypatch, step)
    give_identity(urls[side], "before:1")
    for arguments in ((), ("--force",), ("--same",)):
        ended = txnstore("adopt", urls[side], *arguments)
        assert (ended.code, "is closed" in ended.err) == (1, True), ended
    ended = txnstore("copy", *urls)
    if (step, side) == ("_open", 0):
        # Nothing opens what has gone, wherever it is.
        assert ended.code == 0
    else:
        told = (ended.code, "only from there" in ended.err, "only there" in ended.err, "the same command" in ended.err)
        assert told == (1, side == 0, side == 1, False), ended
        if step == "_leave":
            assert txnstore("copy", "--cancel", urls[0]).out.endswith(": open again\n")
            assert txnstore("adopt", "--same", urls[0]).code == 0
            assert txnstore("topics", "list", "--url", urls[0]).out.splitlines()[1].split()[0] == "orders"
            return
        give_identity(urls[side], None)
        assert txnstore("copy", *urls).code == 0
    assert txnstore("topics", "list", "--url", urls[1]).out.splitlines()[1].split()[0] == "orders"
    assert "has moved to" in txnstore("topics", "list", "--url", urls[0]).err


def test_a_backup_of_a_store_that_moves_never_lives_beside_it(txnstore, tmp_path, monkeypatch):
    first, second, backup = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "second", "backup"))
    with open_store(first) as store:
        store.write(lambda connection: create_topic(connection, "orders", partition_count=2))
    open_store(second).close()
    stop_at(txnstore, (first, second), monkeypatch, "_leave")
    copy_file(first, backup)
    assert txnstore("copy", backup, second).code == 1
    assert txnstore("adopt", "--same", backup).code == 1
    ended = txnstore("copy", backup, second)
    assert (ended.code, "was closed there for a copy" in ended.err) == (1, True), ended
    copy_file(second, backup)
    ended = txnstore("copy", backup, second)
    assert (ended.code, "is being filled by a copy of" in ended.err) == (1, True), ended
    # What is filled from the first one is opened for that alone.
    stop_at(txnstore, (first, second), monkeypatch, "_open")
    copy_file(second, backup)
    assert "lives in" in txnstore("copy", first, second).out
    assert txnstore("copy", first, backup).code == 1
    assert txnstore("adopt", "--same", backup).code == 1
    ended = txnstore("copy", first, backup)
    assert (ended.code, "only there it is opened" in ended.err) == (1, True), ended
    living = [url for url in (first, second, backup) if txnstore("topics", "list", "--url", url).code == 0]
    assert living == [second]


@pytest.mark.slow
def test_a_target_that_another_copy_fills_is_not_called_one_that_the_same_command_opens(txnstore, urls, tmp_path):
    third = f"sqlite:///{tmp_path / 'third.db'}"
    others = closing.Move(closing.MoveState.ARRIVING, str(uuid4()), "sqlite:///other.db", "")
    with open_store(third, create=True) as store:
        store.write(lambda connection: closing.close(connection, others))
    assert txnstore("copy", *urls).code == 0
    ended = txnstore("copy", urls[0], third)
    assert (ended.code, "open yet" in ended.err, "it has moved to" in ended.err) == (1, False, True), ended.err


@pytest.mark.slow
def test_who_cannot_ask_the_target_says_that_it_is_perhaps_not_open(txnstore, urls, monkeypatch):
    def stop(target, _ours):
        def fail(*_, **__):
            raise StoreUnavailable("no server")

        target.read = fail
        fail()

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_open", stop)
        ended = txnstore("copy", *urls)
    assert (ended.code, f"{parse_url(urls[1])} is perhaps not open yet" in ended.err) == (75, True), ended.err


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("schema", "options"), [("txnstore", ""), ("ours", ""), ("txnstore", "?application_name=us")])
def test_what_opens_the_source_again_is_named_whole(
    txnstore, txnstore_empty_url, tmp_path, monkeypatch, schema, options
):
    url, target = txnstore_empty_url, f"sqlite:///{tmp_path / 'target.db'}"
    if url.startswith("sqlite") and schema + options != "txnstore":
        pytest.skip("an SQLite URL has no options, and the file no schema")
    open_store(url, schema=schema).close()

    def fail(*_, **__):
        raise StoreFull("there is no room; nothing was changed")

    monkeypatch.setattr(moving, "_compare", fail)
    ended = txnstore("copy", f"{url}{options}", target, "--schema", schema)
    named = f"`txnstore copy --cancel {parse_url(url)}{' --schema ours' if schema == 'ours' else ''}`"
    rest = " (with the options of its URL, which are left out here)" if options else ""
    assert (ended.code, ended.err.endswith(f"{named} opens it again{rest}\n")) == (1, True), ended
    assert txnstore("copy", "--cancel", url, "--schema", schema).out.endswith(": open again\n")


@pytest.mark.slow
def test_roles_that_may_not_use_the_target_yet_are_named(txnstore, txnstore_postgresql_url):
    url = txnstore_postgresql_url
    grant = ("roles", "grant", "producer", "pg_monitor", "--topic", "orders*", "--apply", "--url", url)
    assert txnstore(*grant).code == 0
    for told in (True, True, False):
        ended = txnstore("copy", url, url, "--to-schema", "second")
        named = ended.err.endswith(": pg_monitor, a producer limited to topics: orders*\n")
        assert (ended.code, named, bool(ended.err)) == (0, told, told), ended
        if "nothing was changed" in ended.out:
            assert txnstore(*grant, "--schema", "second").code == 0


@pytest.mark.slow
def test_the_owner_of_the_source_is_named_where_the_targets_is_another_one(txnstore, txnstore_postgresql_url):
    url = txnstore_postgresql_url
    owner = parse_url(url).url.username
    assert txnstore("migrate", url, "--schema", "second").code == 0
    to_another = ("roles", "grant", "owner", "pg_monitor", "--apply", "--url", url, "--schema", "second")
    assert txnstore(*to_another).code == 0
    ended = txnstore("copy", url, url, "--to-schema", "second")
    assert (ended.code, ended.err.endswith(f"(`txnstore roles grant`): {owner}, the owner\n")) == (0, True), ended


def test_a_copy_that_cannot_ask_for_roles_has_moved_the_store_all_the_same(
    txnstore, txnstore_postgresql_url, monkeypatch
):
    def fail(_store):
        raise StoreUnavailable("no server")

    url = txnstore_postgresql_url
    monkeypatch.setattr(command, "list_grants", fail)
    ended = txnstore("copy", url, url, "--to-schema", "second")
    assert (ended.code, "lives in" in ended.out, ended.err.endswith("is not known: no server\n")) == (0, True, True), (
        ended
    )


@pytest.mark.parametrize("memory", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_does_not_go_where_it_would_be_gone_with_the_command(txnstore, urls, memory):
    ended = txnstore("copy", urls[0], memory)
    assert (ended.code, f"{memory} is in memory" in ended.err) == (1, True), ended
    with open_store(urls[0], create=False) as store:
        assert store.read(read_move) is None
    assert txnstore("copy", memory, urls[0]).code == 1


def test_a_wrong_call_is_refused(txnstore, tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    for arguments in ((url,), ("--cancel", url, url), (f"{url},{url}b", url), (url, f"{url},{url}b")):
        assert txnstore("copy", *arguments).code == 2
    ended = txnstore("copy", url, f"sqlite:///{tmp_path / 'b.db'}")
    assert (ended.code, "leads to no file" in ended.err) == (1, True)
    assert not (tmp_path / "a.db").exists()
