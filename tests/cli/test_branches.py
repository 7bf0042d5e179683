"""`txnstore transactions branches`, `... recover` and `txnstore maintain --participant`: what was left is ended."""

from __future__ import annotations

import json
import os

import pytest

from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.opening import open_store
from txnstore.errors import (
    BranchEndedOtherwise,
    BranchUnfinished,
    InvalidRequest,
    MissingMember,
    PermissionDenied,
    StoreBusy,
    StoreUnavailable,
    WrongCluster,
)
from txnstore.participants.branches import Branches
from txnstore.participants.recovery import RecoveredBranches
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.coordinator import TransactionCoordinator


@pytest.fixture
def other(txnstore_postgres_server):
    """The URL of another database that can vote."""
    if not txnstore_postgres_server.keeps_prepared_transactions:
        pytest.skip("needs a PostgreSQL server with max_prepared_transactions above 0")
    txnstore_postgres_server.create_database("txnstore_other")
    with txnstore_postgres_server.connect("txnstore_other") as connection:
        connection.execute("CREATE TABLE account (name text)")
    yield txnstore_postgres_server.url("txnstore_other")
    txnstore_postgres_server.drop_database("txnstore_other")


def prepare(url, other, name, *, commit):
    """Leave a branch as a process does that dies after the vote, or after the decision."""
    import psycopg

    with open_store(url) as store, psycopg.connect(connection_string(other)) as connection:
        coordinator = TransactionCoordinator(store)
        producer = coordinator.init_producer_id(name).identity
        branches = Branches(store, name)
        branches.enlist(connection)
        connection.execute("INSERT INTO account VALUES (%s)", [name])
        branches.prepare(producer)
        if commit is not None:
            coordinator.end_transaction(name, producer, commit=commit)


def names(other):
    import psycopg

    with psycopg.connect(connection_string(other)) as connection:
        return sorted(name for (name,) in connection.execute("SELECT name FROM account"))


def test_recover_ends_what_was_left_and_says_what(run, done, url, other):
    for name, commit in (("yes", True), ("no", False), ("open", None)):
        prepare(url, other, name, commit=commit)
    listed = json.loads(done("transactions", "branches", "--json"))
    assert [(row["transactional_id"], row["outcome"]) for row in listed] == [
        ("yes", "commit"),
        ("no", "abort"),
        ("open", "open"),
    ]
    out = done("transactions", "recover", "--participant", other)
    assert "/txnstore_other: 1 committed, 1 rolled back, 0 ended before, 1 still open" in out
    assert ":" not in out.split("@")[0].partition("/txnstore_other")[0].partition("://")[2]
    assert names(other) == ["yes"]
    answered = json.loads(done("transactions", "recover", "--participant", other, "--json"))
    assert [len(each["open"]) for each in answered] == [1]
    assert [row["transactional_id"] for row in json.loads(done("transactions", "branches", "--json"))] == ["open"]


def test_recover_does_not_ask_to_be_repeated_for_what_has_ended_otherwise(run, url, other):
    import psycopg

    prepare(url, other, "yes", commit=True)
    with psycopg.connect(connection_string(other), autocommit=True) as connection:
        of_other = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ((gid,),) = connection.execute(of_other)
        connection.execute(f"ROLLBACK PREPARED '{gid}'")
    ended = run("transactions", "recover", "--participant", other)
    assert ended.code == 1
    assert "somebody else has ended its branch" in ended.err
    assert run("transactions", "recover", "--participant", other).code == 0
    (row,) = json.loads(run("transactions", "branches", "--json").out)
    assert (row["gid"], row["outcome"]) == (gid, "missing")


def test_forget_is_for_what_is_prepared_nowhere_and_takes_force_if_it_was_to_commit(run, done, url, other):
    import psycopg

    prepare(url, other, "yes", commit=True)
    (row,) = json.loads(done("transactions", "branches", "--json"))
    refused = run("transactions", "forget", row["gid"], "--force", "--participant", other)
    assert (refused.code, refused.out) == (1, "")
    assert "is prepared in" in refused.err
    with psycopg.connect(connection_string(other), autocommit=True) as connection:
        connection.execute(f"ROLLBACK PREPARED '{row['gid']}'")
    refused = run("transactions", "forget", row["gid"])
    assert refused.code == 1
    assert "is decided to commit" in refused.err
    away = "postgresql://bank:secret@127.0.0.1:1/bank"
    refused = run("transactions", "forget", row["gid"], "--force", "--participant", away)
    assert (refused.code, refused.out) == (75, "")
    assert "leave out a participant that is gone for good" in refused.err
    assert "secret" not in refused.err
    ended = run("transactions", "forget", row["gid"], "--force")
    assert (ended.code, ended.out) == (0, f"the branch {row['gid']} is forgotten\n")
    unknown = run("transactions", "forget", row["gid"], "--force")
    assert (unknown.code, unknown.err) == (1, f"txnstore: no branch {row['gid']} is known\n")


@pytest.mark.usefixtures("two_databases")
def test_forget_finds_the_branch_in_whichever_database_knows_it(txnstore, tmp_path):
    from sqlalchemy import insert

    from txnstore.db.schema import transaction_branches

    texts = ("transactional_id", "database_label", "database_identity", "transaction_xid8")
    numbers = {"producer_id": 4, "producer_epoch": 0, "registered_ms": 1, "outcome": 0}
    branch = {"gid": "txnstore_1", **dict.fromkeys(texts, "of nobody"), **numbers}
    with open_store(f"sqlite:///{tmp_path}/second.db") as second:
        second.write(lambda connection: connection.execute(insert(transaction_branches), branch))
    assert txnstore("transactions", "forget", "txnstore_1").out == "the branch txnstore_1 is forgotten\n"
    assert json.loads(txnstore("transactions", "branches", "--json").out) == []


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ([[], []], 0),
        ([[], [BranchUnfinished("later")]], 75),
        ([[BranchUnfinished("later"), BranchEndedOtherwise("told once")], [BranchUnfinished("later")]], 1),
    ],
)
def test_recover_asks_to_be_repeated_only_where_that_may_cure_everything(run, monkeypatch, failed, code):
    found = iter([RecoveredBranches("db", failed=errors) for errors in failed])
    monkeypatch.setattr("txnstore.cli.branches.recover_branches", lambda *_: next(found))
    ended = run("transactions", "recover", "--participant", "postgresql://a/a", "--participant", "postgresql://b/b")
    assert (ended.code, ended.err.count("txnstore: ")) == (code, sum(map(len, failed)))


def test_recover_names_the_database_of_an_error_that_does_not(run, monkeypatch):
    def refuse(_, participant, __):
        if "second" in participant:
            raise InvalidRequest("max_prepared_transactions is 0")
        return RecoveredBranches("first")

    monkeypatch.setattr("txnstore.cli.branches.recover_branches", refuse)
    urls = ["postgresql://a:secret@h/first", "postgresql://a:secret@h/second"]
    ended = run("transactions", "recover", *(f"--participant={url}" for url in urls))
    assert (ended.code, ended.out.startswith("first: ")) == (1, True)
    assert ended.err == "txnstore: postgresql://a:***@h/second: max_prepared_transactions is 0\n"
    # Of one alone it is known which one it is of.
    ended = run("transactions", "recover", f"--participant={urls[1]}")
    assert ended.err == "txnstore: max_prepared_transactions is 0\n"


@pytest.fixture
def two_databases(txnstore_sqlite_url, tmp_path, monkeypatch):
    """A store of two databases, which the program finds."""
    monkeypatch.setenv("TXNSTORE_URL", f"{txnstore_sqlite_url},sqlite:///{tmp_path}/second.db")
    with open_cluster(os.environ["TXNSTORE_URL"]):
        pass


@pytest.mark.usefixtures("two_databases")
def test_recover_begins_before_the_last_database_of_the_store_is_found(txnstore, monkeypatch):
    steps = []
    own = Cluster.own

    def find(cluster, database_id):
        steps.append(f"found {database_id}")
        return own(cluster, database_id)

    def recover(store, *_):
        steps.append(f"recovered {store.database_id}")
        return RecoveredBranches("db")

    monkeypatch.setattr(Cluster, "own", find)
    monkeypatch.setattr("txnstore.cli.branches.recover_branches", recover)
    assert txnstore("transactions", "recover", "--participant", "postgresql://a/a").code == 0
    assert steps == ["found 1", "recovered 1", "found 2", "recovered 2"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("refusing", [1, 2])
@pytest.mark.parametrize(
    ("refusal", "failed", "code"),
    [
        (StoreUnavailable("it is away"), [], 75),
        (WrongCluster("it is another one"), [], 1),
        (StoreBusy("it is locked"), [BranchEndedOtherwise("told once")], 1),
    ],
)
@pytest.mark.usefixtures("two_databases")
def test_recover_tells_all_that_it_finds_if_a_database_of_the_store_refuses(
    txnstore, monkeypatch, refusing, refusal, failed, code
):
    own = Cluster.own

    def find(cluster, database_id):
        if database_id == refusing:
            raise refusal
        return own(cluster, database_id)

    monkeypatch.setattr(Cluster, "own", find)
    monkeypatch.setattr(
        "txnstore.cli.branches.recover_branches",
        lambda _, participant, __: RecoveredBranches(participant, failed=failed),
    )
    participants = ["postgresql://a/a", "postgresql://b/b"]
    ended = txnstore("transactions", "recover", *(f"--participant={each}" for each in participants))
    assert [line.split(": ")[0] for line in ended.out.splitlines()] == participants
    told = [f"txnstore: {error}" for error in (*failed, *failed, refusal)]
    assert (ended.code, [line for line in ended.err.splitlines() if line.startswith("txnstore")]) == (code, told)


@pytest.mark.usefixtures("two_databases")
def test_recover_does_not_ask_to_be_repeated_for_a_database_that_no_url_of_the_list_leads_to(
    txnstore, txnstore_sqlite_url, monkeypatch
):
    monkeypatch.setattr("txnstore.cli.branches.recover_branches", lambda *_: RecoveredBranches("db"))
    arguments = ("transactions", "recover", "--participant", "postgresql://a/a")
    assert txnstore(*arguments).code == 0
    ended = txnstore(*arguments, "--url", txnstore_sqlite_url)
    assert ended.code == 1
    assert "no URL of the list leads there" in ended.err


def test_maintain_says_by_its_code_that_repeating_does_not_cure_what_has_ended_otherwise(txnstore, url, monkeypatch):
    found = [BranchUnfinished("later"), BranchEndedOtherwise("told once")]
    monkeypatch.setattr(
        "txnstore.participants.recovery.recover_branches", lambda *_: RecoveredBranches("db", failed=found)
    )
    assert txnstore("maintain", url, "--once", "--participant", "postgresql://a/a").code == 1


def test_maintain_ends_what_was_left_where_it_was_told_of(txnstore, url, other, monkeypatch):
    prepare(url, other, "yes", commit=True)
    monkeypatch.setenv("TXNSTORE_PARTICIPANTS", other)
    ended = txnstore("maintain", url, "--once")
    assert ended.code == 0
    assert "1 branches ended in" in ended.out
    assert names(other) == ["yes"]


def test_a_database_that_is_away_is_said_and_tried_again_later(txnstore, run, url):
    away = "postgresql://bank:secret@127.0.0.1:1/bank"
    ended = txnstore("maintain", url, "--once", "--participant", away)
    assert ended.code == 75
    assert "branches ended in 127.0.0.1:1/bank" not in ended.out
    ended = run("transactions", "recover", "--participant", away)
    assert ended.code == 75
    assert "secret" not in ended.out + ended.err


def test_a_database_that_is_away_keeps_nothing_back_of_what_was_done_in_others(run, url, other):
    prepare(url, other, "yes", commit=True)
    away = [f"--participant=postgresql://bank@127.0.0.1:1/{name}" for name in ("first", "last")]
    ended = run("transactions", "recover", away[0], "--participant", other, away[1])
    assert ended.code == 75
    assert "/txnstore_other: 1 committed, 0 rolled back" in ended.out
    assert ended.err.count("no connection to PostgreSQL") == len(away)
    ended = run("transactions", "recover", away[0], "--participant", other, "--json")
    assert ended.code == 75
    assert [each["committed"] for each in json.loads(ended.out)] == [[]]


def test_without_a_database_or_with_one_that_cannot_vote_it_is_refused(txnstore, run, url):
    assert "which database" in run("transactions", "recover").err
    ended = txnstore("maintain", url, "--once", "--participant", "sqlite:///shop.db")
    assert ended.code == 1
    assert "databases of other kinds cannot vote" in ended.err


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "command",
    [
        ("transactions", "list"),
        ("transactions", "branches"),
        ("transactions", "list-open"),
        ("transactions", "find-hanging"),
        ("transactions", "abort", "--yes", "--producer-id", "7"),
        ("groups", "list"),
        ("topics", "list"),
        ("info",),
        ("info", "--json"),
        ("dump", "journal"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("refusal", "code", "is_open"),
    [
        (StoreUnavailable("it is away"), 75, False),
        (MissingMember("no URL"), 1, False),
        (StoreUnavailable("it went away"), 75, True),
        (PermissionDenied("this role may not read"), 1, True),
    ],
)
@pytest.mark.usefixtures("two_databases")
def test_a_listing_says_which_database_it_has_left_out(txnstore, monkeypatch, command, refusal, code, is_open):
    own = Cluster.own

    def refuse(*_):
        raise refusal

    def find(cluster, database_id):
        if database_id == 2 and not is_open:
            raise refusal
        store = own(cluster, database_id)
        if database_id == 2:
            monkeypatch.setattr(store, "_attempt", refuse)
        return store

    assert txnstore(*command).code == ("abort" in command)
    monkeypatch.setattr(Cluster, "own", find)
    ended = txnstore(*command)
    told = [line for line in ended.err.splitlines() if line.startswith("txnstore")]
    assert (ended.code, told) == (code, [f"txnstore: {refusal}"])
