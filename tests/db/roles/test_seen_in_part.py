"""What a role that is shown some rows must not conclude from the others: that nobody has what it does not see."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from typer.testing import CliRunner

from tests.db.roles.shop import INTO_TRANSACTIONS, PATIENCE_SECONDS
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.admin import AbortTransactionSpec, AdminClient
from txnstore.cli.program import NAMES, program_with
from txnstore.db.closing import read_move
from txnstore.db.opening import open_store
from txnstore.db.portions import Portions
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.db.row_security import check_sees_all
from txnstore.db.schema import topics, transactions
from txnstore.errors import PermissionDenied, StoreDamaged
from txnstore.log.topics import get_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import take_turn
from txnstore.model import ProducerIdentity
from txnstore.moving.move import move
from txnstore.transactions.administration import OpenInPartition, abort_open_transactions
from txnstore.transactions.outcome import owner_of
from txnstore.verification.verify import verify_store

_NUMBERS = itertools.count(1)
#: May write to the topics of all, as no transactional id but its own.
GUEST = "guest"


@pytest.fixture(scope="module")
def guest(shop):
    name = shop.roles[GUEST] = f"{shop.name}_{GUEST}"
    shop.server.create_role(name, "secret")
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        shop.grant(kind, GUEST, RoleScope(("shared-*",), ("guest-*",), ("guest-*",)))
    shop.create_topics("shared-quiet")
    return GUEST


@pytest.fixture
def open_one(shop, guest):
    """A transaction of somebody else's, open in two partitions: its producer, and the numbers of one of them."""
    topic = f"shared-{next(_NUMBERS)}"
    shop.create_topics(topic, f"{topic}-more")
    with shop.producer("worker", transactional_id=topic) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        for written in (topic, f"{topic}-more"):
            producer.produce(written, "a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin:
            (described,) = (
                future.result(PATIENCE_SECONDS)
                for future in admin.describe_producers([TopicPartition(topic, 0)]).values()
            )
        yield producer, topic, described.active_producers[0]


def assert_it_commits_as_a_whole(shop, producer, *written_to):
    producer.commit_transaction(PATIENCE_SECONDS)
    for written in written_to:
        with shop.consumer("reader", f"whole-{next(_NUMBERS)}") as consumer:
            consumer.assign([TopicPartition(written, 0, 0)])
            assert consumer.poll(PATIENCE_SECONDS).value() == b"a", written


@pytest.mark.slow
def test_an_abort_by_partition_and_producer_is_refused(shop, guest, open_one):
    producer, topic, state = open_one
    spec = AbortTransactionSpec(TopicPartition(topic, 0), state.producer_id, state.producer_epoch, 0)
    with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin, pytest.raises(KafkaException) as refused:
        admin.abort_transaction(spec).result(PATIENCE_SECONDS)
    assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    assert "some rows of transaction_writers, transactions" in refused.value.args[0].str()
    assert str(state.producer_id) in refused.value.args[0].str()
    assert_it_commits_as_a_whole(shop, producer, topic, f"{topic}-more")


def test_where_two_say_that_they_have_a_producer_nothing_is_done_by_the_producer_alone(shop, guest, open_one):
    """The one that a role with limits has made up is not ended in place of the other's, nor the other's in part."""
    producer, topic, state = open_one
    with shop.connect(guest) as connection:
        row = "VALUES ('guest-{}', {}, -1, -1, 0, -1, 1000, 0, -1, 0, 0, -1, NULL)"
        connection.execute(INTO_TRANSACTIONS + row.format(topic, state.producer_id))
    spec = AbortTransactionSpec(TopicPartition(topic, 0), state.producer_id, state.producer_epoch, 0)
    both = f"'guest-{topic}' and '{topic}' both say that they have producer {state.producer_id}"
    with AdminClient({"bootstrap.servers": shop.url("upkeep")}) as admin, pytest.raises(KafkaException, match=both):
        admin.abort_transaction(spec).result(PATIENCE_SECONDS)
    with open_store(shop.url("upkeep")) as store, pytest.raises(StoreDamaged, match=both):
        store.read(partial(owner_of, producer=ProducerIdentity(state.producer_id, state.producer_epoch)))
    assert_it_commits_as_a_whole(shop, producer, topic, f"{topic}-more")


@pytest.mark.slow
def test_what_is_open_is_not_listed_as_hanging_nor_aborted_as_such(shop, guest, open_one):
    producer, topic, state = open_one
    with shop.connect() as connection:
        connection.execute(
            "UPDATE txnstore.producer_states SET last_timestamp_ms = last_timestamp_ms - 3600000"
            " WHERE producer_id = %s",
            [state.producer_id],
        )
    with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin:
        # Of topics where nothing looks as if it hung, that can be said.
        assert admin.find_hanging_transactions([TopicPartition("shared-quiet", 0)]).result(PATIENCE_SECONDS) == []
        with pytest.raises(KafkaException, match="cannot tell whether the transaction of producer"):
            admin.find_hanging_transactions().result(PATIENCE_SECONDS)
        with pytest.raises(KafkaException, match="permission denied for view open_transactions"):
            admin.list_open_transactions().result(PATIENCE_SECONDS)
        with pytest.raises(KafkaException) as unknown:
            admin.force_terminate_transaction(topic).result(PATIENCE_SECONDS)
        assert unknown.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_NOT_FOUND
        with pytest.raises(KafkaException) as refused:
            admin.fence_producers([topic])[topic].result(PATIENCE_SECONDS)
        assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    arguments = ["transactions", "find-hanging", "--abort", "--yes"]
    done = CliRunner().invoke(
        program_with(NAMES), arguments, prog_name="txnstore", env={"TXNSTORE_URL": shop.url(guest), "COLUMNS": "500"}
    )
    assert done.exit_code == 1
    assert not done.stdout
    assert "Nothing was changed. Do this as a role that is not limited: as a coordinator" in str(done.exception)
    with open_store(shop.url(guest)) as store:
        identity = ProducerIdentity(state.producer_id, state.producer_epoch)
        partition_id = store.read(partial(get_topic, name=topic)).partition_id(0)
        with pytest.raises(PermissionDenied, match=f"the transaction of producer {state.producer_id}"):
            abort_open_transactions(store, [OpenInPartition(partition_id, identity)])
    for sees_all in ("worker", "upkeep", "watcher"):
        with AdminClient({"bootstrap.servers": shop.url(sees_all)}) as admin:
            assert admin.find_hanging_transactions().result(PATIENCE_SECONDS) == []
    assert_it_commits_as_a_whole(shop, producer, topic, f"{topic}-more")


def test_a_role_with_limits_ends_what_is_its_own(shop, guest):
    shop.create_topics(topic := f"shared-{next(_NUMBERS)}")
    with shop.producer(guest, transactional_id="guest-own") as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, "a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin:
            partition = TopicPartition(topic, 0)
            (described,) = (each.result(PATIENCE_SECONDS) for each in admin.describe_producers([partition]).values())
            (state,) = described.active_producers
            spec = AbortTransactionSpec(partition, state.producer_id, state.producer_epoch, 0)
            admin.abort_transaction(spec).result(PATIENCE_SECONDS)
        with pytest.raises(KafkaException) as aborted:
            producer.commit_transaction(PATIENCE_SECONDS)
        assert aborted.value.args[0].txn_requires_abort()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["terminate", "init", "abort"])
def test_one_that_is_open_in_a_topic_that_it_does_not_see_is_not_ended_in_part(shop, guest, ending):
    hidden, topic = f"hidden-{next(_NUMBERS)}", f"shared-{next(_NUMBERS)}"
    shop.create_topics(hidden, topic)
    with shop.producer("worker", transactional_id=f"guest-{topic}") as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        for written in (hidden, topic):
            producer.produce(written, "a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin:
            partition = TopicPartition(topic, 0)
            (described,) = (each.result(PATIENCE_SECONDS) for each in admin.describe_producers([partition]).values())
            (state,) = described.active_producers
            spec = AbortTransactionSpec(partition, state.producer_id, state.producer_epoch, 0)
            with (
                shop.producer(guest, transactional_id=f"guest-{topic}") as other,
                pytest.raises(KafkaException) as refused,
            ):
                {
                    "terminate": lambda: admin.force_terminate_transaction(f"guest-{topic}").result(PATIENCE_SECONDS),
                    "abort": lambda: admin.abort_transaction(spec).result(PATIENCE_SECONDS),
                    "init": lambda: other.init_transactions(PATIENCE_SECONDS),
                }[ending]()
            assert refused.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        assert_it_commits_as_a_whole(shop, producer, hidden, topic)


@pytest.fixture
def half(bare):
    """The store of a role that may do everything with the tables, of which policies show it a part."""
    bare.grant(Kind.COORDINATOR, "upkeep")
    bare.create_topics("shared-1", "others-1")
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        bare.grant(kind, "worker", RoleScope(("shared-*",), ("guest-*",), ("guest-*",)))
    with bare.producer("upkeep", transactional_id="others") as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("shared-1", "a")
        producer.commit_transaction(PATIENCE_SECONDS)
    with bare.connect() as connection:
        for what in ("SCHEMA txnstore", "ALL TABLES IN SCHEMA txnstore"):
            connection.execute(f'GRANT ALL ON {what} TO "{bare.roles["worker"]}"')
        # Of a table that its kinds do not read, nobody has made it a policy.
        connection.execute(f'CREATE POLICY half ON txnstore.partition_storage TO "{bare.roles["worker"]}" USING (true)')
    with open_store(bare.url("worker"), moving=True) as store:
        yield store


@pytest.mark.slow
def test_a_store_of_which_a_part_is_shown_does_not_move(half, tmp_path):
    with (
        open_store(f"sqlite:///{tmp_path}/there.db", moving=True) as target,
        pytest.raises(PermissionDenied, match="some rows of"),
    ):
        move(half, target, even_if_damaged=True)
    assert half.read(read_move) is None


@pytest.mark.slow
def test_a_store_that_is_there_though_nothing_of_it_is_shown_is_no_place_to_move_to(half, tmp_path):
    with open_store(f"sqlite:///{tmp_path}/there.db", moving=True) as source:
        with pytest.raises(PermissionDenied, match="some rows of"):
            move(source, half, even_if_damaged=True)
        assert source.read(read_move) is None


@pytest.mark.slow
def test_a_store_of_which_a_part_is_shown_is_not_called_damaged_nor_sound(half):
    with pytest.raises(PermissionDenied, match="cannot tell whether the store is sound"):
        verify_store(half)


@pytest.mark.slow
def test_who_is_shown_a_part_does_no_maintenance(half):
    with pytest.raises(PermissionDenied, match="some rows of"):
        take_turn(half, None, DUTIES, Portions(), forced=True)


#: What is said of the table of transactions, and whether a role sees all of it, and all of it when it locks rows.
VIEWS = {
    "nothing": ([], True, True),
    "all of it": (["CREATE POLICY a ON {table} TO {role} USING (true)"], True, True),
    "all, for everybody": (["CREATE POLICY a ON {table} USING (true)"], True, True),
    "all, by a membership": (
        ["GRANT {group} TO {role}", "CREATE POLICY a ON {table} TO {group} USING (true)"],
        True,
        True,
    ),
    "all, of somebody else": (["CREATE POLICY a ON {table} TO {group} USING (true)"], False, False),
    "a part": (["CREATE POLICY a ON {table} TO {role} USING (producer_id > 7)"], False, False),
    "what is always so, for people": (["CREATE POLICY a ON {table} TO {role} USING (1 = 1)"], False, False),
    "a part and all": (
        [
            "CREATE POLICY a ON {table} TO {role} USING (producer_id > 7)",
            "CREATE POLICY b ON {table} FOR SELECT TO {role} USING (true)",
        ],
        True,
        False,
    ),
    "all, to read and to change": (
        [
            "CREATE POLICY a ON {table} FOR SELECT TO {role} USING (true)",
            "CREATE POLICY b ON {table} FOR UPDATE TO {role} USING (true)",
        ],
        True,
        True,
    ),
    "all, to add to it": (["CREATE POLICY a ON {table} FOR INSERT TO {role} WITH CHECK (true)"], False, False),
    "all, but what is kept from it": (
        [
            "CREATE POLICY a ON {table} TO {role} USING (true)",
            "CREATE POLICY b ON {table} AS RESTRICTIVE TO PUBLIC USING (producer_id > 7)",
        ],
        False,
        False,
    ),
    "all, but what is kept from somebody else": (
        [
            "CREATE POLICY a ON {table} TO {role} USING (true)",
            "CREATE POLICY b ON {table} AS RESTRICTIVE TO {group} USING (producer_id > 7)",
        ],
        True,
        True,
    ),
    "all, but what it must not change": (
        [
            "CREATE POLICY a ON {table} TO {role} USING (true)",
            "CREATE POLICY b ON {table} AS RESTRICTIVE FOR UPDATE TO {role} USING (producer_id > 7)",
        ],
        True,
        False,
    ),
    "all, with a restriction that is none": (
        [
            "CREATE POLICY a ON {table} TO {role} USING (true)",
            "CREATE POLICY b ON {table} AS RESTRICTIVE TO {role} USING (true)",
        ],
        True,
        True,
    ),
    "a superuser": (["ALTER ROLE {role} SUPERUSER"], True, True),
    "one that is let through": (["ALTER ROLE {role} BYPASSRLS"], True, True),
    "the owner": (["ALTER TABLE {table} OWNER TO {role}"], True, True),
    "an owner that is limited as well": (
        [
            "ALTER TABLE {table} OWNER TO {role}",
            "ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            "CREATE POLICY a ON {table} USING (producer_id > 7)",
        ],
        False,
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("said", VIEWS)
def test_whether_a_role_sees_all_is_said_by_the_policies_that_are_its_own(bare, said):
    statements, sees_all, sees_all_locked = VIEWS[said]
    role, group = bare.roles["worker"], bare.roles["reader"]
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        bare.grant(kind, "worker")
    with bare.connect() as connection:
        if said != "nothing":
            connection.execute("ALTER TABLE txnstore.transactions ENABLE ROW LEVEL SECURITY")
            connection.execute(f'DROP POLICY "txnstore_producer_{role}" ON txnstore.transactions')
        if said == "all, to add to it":
            # Otherwise it is refused when it opens the store.
            connection.execute(f'CREATE POLICY c ON txnstore.transactions FOR SELECT TO "{role}" USING (false)')
        if said == "all, of somebody else":
            connection.execute(f'CREATE POLICY c ON txnstore.transactions TO "{role}" USING (false)')
        for statement in statements:
            connection.execute(statement.format(table="txnstore.transactions", role=f'"{role}"', group=f'"{group}"'))

    def is_judged(when_locking):
        try:
            store.read(
                lambda connection: check_sees_all(store, connection, tables, "it is so", when_locking=when_locking)
            )
        except PermissionDenied as refused:
            if "some rows of transactions in" not in str(refused):
                raise
            return False
        return True

    tables = [transactions, topics]
    with open_store(bare.url("worker")) as store:
        assert (is_judged(when_locking=False), is_judged(when_locking=True)) == (sees_all, sees_all_locked)
