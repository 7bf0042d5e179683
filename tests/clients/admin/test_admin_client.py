"""The admin client itself: its time limits, its end, and what it tells of the cluster."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from concurrent.futures import wait

import pytest

from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.databases import on_sqlite_alone
from txnstore import KafkaError, KafkaException, TopicCollection
from txnstore.admin import AdminClient, ConfigResource, NewPartitions, NewTopic
from txnstore.clients import connection as connection_module
from txnstore.clients.worker import Worker
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.errors import StoreUnavailable
from txnstore.log.topics import list_topics

PATIENCE_SECONDS = 60


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        yield admin


class Gate:
    """Holds up whoever opens the store until it is opened itself."""

    def __init__(self):
        self.reached, self.passed = threading.Event(), threading.Event()

    def __call__(self, *arguments, **keywords):
        self.reached.set()
        assert self.passed.wait(PATIENCE_SECONDS)
        return open_cluster(*arguments, **keywords)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(connection_module, "open_cluster", gate)
    yield gate
    gate.passed.set()


def error_of(future) -> KafkaError:
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, KafkaException), error
    found: KafkaError = error.args[0]
    return found


# --- time limits ------------------------------------------------------------------------------------------------------


def test_a_call_returns_at_once_and_its_future_keeps_the_time_limit(url, gate):
    with AdminClient({"bootstrap.servers": url}) as admin:
        future = admin.create_topics([NewTopic("a")], request_timeout=0.05)["a"]
        error = error_of(future)
        assert error == KafkaError._TIMED_OUT
        assert error.retriable()
        assert error.str().startswith("create_topics: the database has not answered within 0.05 s")
        gate.passed.set()


def test_what_has_not_begun_when_its_time_is_up_is_not_done_later(url, gate):
    with AdminClient({"bootstrap.servers": url}) as admin:
        held_up = admin.create_topics([NewTopic("a")])["a"]
        assert gate.reached.wait(PATIENCE_SECONDS)
        late = admin.create_topics([NewTopic("b"), NewTopic("c")], request_timeout=0)
        assert {error_of(future).code() for future in late.values()} == {KafkaError._TIMED_OUT}
        gate.passed.set()
        assert held_up.result(PATIENCE_SECONDS) is None
        assert list(admin.list_topics().topics) == ["a"]


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (
            "list_topics",
            KafkaError._TRANSPORT,
            # How long it has waited: longer than it was told to where the machine is busy.
            r"Failed to get metadata: the database has not answered within (0\.[2-9]|[1-9]\d*\.\d) s",
        ),
        ("cluster_id", KafkaError._TIMED_OUT, "cluster_id: the database has not answered within 0.2 s"),
    ],
)
def test_calls_that_wait_keep_their_timeout(url, gate, call, code, text):
    with AdminClient({"bootstrap.servers": url}) as admin:
        with pytest.raises(KafkaException, match=text) as raised:
            getattr(admin, call)(timeout=0.2)
        assert raised.value.args[0] == code
        gate.passed.set()
        assert getattr(admin, call)()


def test_the_default_time_limit_is_the_sockets(url, gate):
    with AdminClient({"bootstrap.servers": url, "socket.timeout.ms": 50}) as admin:
        assert "within 0.05 s" in error_of(admin.describe_cluster()).str()
        gate.passed.set()


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"request_timeout": "x"}, TypeError, "^must be real number, not str$"),
        ({"request_timeout": True}, TypeError, "^must be real number, not bool$"),
        ({"request_timeout": -1}, ValueError, r'"request_timeout": expecting integer in range 0\.\.3600000$'),
        ({"request_timeout": 1e9}, ValueError, "request_timeout"),
        ({"request_timeout": float("nan")}, ValueError, "request_timeout"),
        ({"operation_timeout": -2}, ValueError, r'"operation_timeout": expecting integer in range -1\.\.3600000$'),
        ({"operation_timeout": "a"}, TypeError, "^must be real number, not str$"),
        ({"validate_only": "x"}, TypeError, "^Expected validate_only to be bool type, not str$"),
        ({"foo": 1}, TypeError, "foo"),
    ],
    ids=ascii,
)
def test_wrong_options_are_refused(idle_admin, keywords, error, text):
    for method, argument in (
        (idle_admin.create_topics, [NewTopic("a")]),
        (idle_admin.create_partitions, [NewPartitions("a", 2)]),
    ):
        with pytest.raises(error, match=text):
            method(argument, **keywords)


def test_more_wrong_options_are_refused(idle_admin):
    for method, argument in (
        (idle_admin.describe_topics, (TopicCollection(["a"]),)),
        (idle_admin.describe_cluster, ()),
    ):
        with pytest.raises(TypeError, match=r"^Expected include_authorized_operations to be bool type, not str$"):
            method(*argument, include_authorized_operations="x")
        with pytest.raises(TypeError, match=r"^must be real number, not str$"):
            method(*argument, request_timeout="x")
    with pytest.raises(TypeError, match=r"^argument 1 must be str or None, not int$"):
        idle_admin.list_topics(5)
    for method in (idle_admin.list_topics, idle_admin.cluster_id, idle_admin.poll):
        with pytest.raises(TypeError, match=r"^must be real number, not str$"):
            method(timeout="x")


def test_a_future_cannot_be_cancelled(admin):
    future = admin.create_topics([NewTopic("a")])["a"]
    assert not future.cancel()
    assert future.result(PATIENCE_SECONDS) is None


def test_a_future_that_is_taken_out_of_the_answer_is_settled(url, gate):
    with AdminClient({"bootstrap.servers": url}) as admin:
        _, future = admin.create_topics([NewTopic("a")]).popitem()
        gate.passed.set()
        assert future.result(PATIENCE_SECONDS) is None


# --- the database is away ---------------------------------------------------------------------------------------------


def test_an_error_of_the_database_comes_out_of_every_future_and_of_error_cb(url, monkeypatch):
    def refuse(*arguments, **keywords):
        raise StoreUnavailable("the database is away")

    served: list = []
    with AdminClient({"bootstrap.servers": url, "error_cb": served.append}) as admin:
        with monkeypatch.context() as patch:
            patch.setattr(connection_module, "open_cluster", refuse)
            futures = admin.create_topics([NewTopic("a"), NewTopic("b")])
            for future in futures.values():
                assert error_of(future) == KafkaError._TRANSPORT
                with pytest.raises(KafkaException) as raised:
                    future.result()
                assert isinstance(raised.value.__cause__, StoreUnavailable)
            with pytest.raises(KafkaException, match="the database is away"):
                admin.list_topics()
        assert not served
        # What is the matter is told once in a while, not of each call.
        assert admin.poll(PATIENCE_SECONDS) + admin.poll(0) == len(served) == 2
        assert [error.code() for error in served] == [KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN]
        assert admin.create_topics([NewTopic("a")])["a"].result(PATIENCE_SECONDS) is None
        assert admin.poll(0) == 0


@on_sqlite_alone
def test_an_event_is_told_once_wherever_that_is_interrupted(admin):
    told: list[int] = []
    for number, moment in every_interrupt({"admin/client.py", "clients/callbacks.py"}, is_no_moment_for_signals):
        admin._events.put(lambda number=number: told.append(number))
        attempt(moment, lambda: admin.poll(0))
        admin.poll(0)
        assert told == list(range(1, number + 1)), moment.where


def test_an_error_of_ours_comes_out_of_the_future(admin, monkeypatch):
    admin.cluster_id()
    monkeypatch.setattr(admin._connection.opened.controller, "write", lambda *_, **__: 1 / 0)
    future = admin.create_topics([NewTopic("a")])["a"]
    assert isinstance(future.exception(PATIENCE_SECONDS), ZeroDivisionError)


# --- its end ----------------------------------------------------------------------------------------------------------


def test_after_with_everything_is_refused(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        assert admin.list_topics().topics == {}
    assert admin._connection.opened is None
    with pytest.raises(RuntimeError, match=r"^Handle has been closed$"):
        admin.list_topics()
    with pytest.raises(RuntimeError, match=r"^Handle has been closed$"):
        admin.cluster_id()
    for call in (
        admin.describe_cluster,
        lambda: admin.poll(0),
        lambda: admin.create_topics([NewTopic("a")]),
        lambda: admin.delete_topics(["a"]),
        lambda: admin.create_partitions([NewPartitions("a", 2)]),
        lambda: admin.describe_topics(TopicCollection(["a"])),
        lambda: admin.describe_configs([ConfigResource("topic", "a")]),
        lambda: admin.incremental_alter_configs([]),
        lambda: admin.list_offsets({}),
    ):
        with pytest.raises(RuntimeError, match=r"^AdminClient has been closed$"):
            call()
    with admin:
        pass
    assert len(admin) == 0
    assert admin


def test_with_passes_the_error_on_and_closes(url):
    with pytest.raises(ZeroDivisionError), AdminClient({"bootstrap.servers": url}) as admin:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError):
        admin.list_topics()


def test_what_waits_when_the_client_is_closed_fails_and_what_runs_is_finished(url, gate, monkeypatch):
    admin = AdminClient({"bootstrap.servers": url})
    running = admin.create_topics([NewTopic("a")])["a"]
    assert gate.reached.wait(PATIENCE_SECONDS)
    waiting = admin.create_topics([NewTopic("b")])["b"]
    close = Worker.close

    def close_and_pass(worker, timeout_seconds):
        # The first call drops what waits; then the gate opens, and the second one waits for what runs.
        close(worker, 0)
        gate.passed.set()
        return close(worker, timeout_seconds)

    monkeypatch.setattr(Worker, "close", close_and_pass)
    with admin:
        pass
    assert error_of(waiting) == KafkaError._DESTROY
    assert running.result(PATIENCE_SECONDS) is None
    with open_store(url) as store:
        assert store.read(list_topics) == ["a"]


def test_a_client_that_is_forgotten_finishes_what_it_began_and_closes(url, gate):
    futures = AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("a"), NewTopic("b")])
    assert gate.reached.wait(PATIENCE_SECONDS)
    gc.collect()
    gate.passed.set()
    assert not wait(futures.values(), PATIENCE_SECONDS).not_done
    with open_store(url) as store:
        assert store.read(list_topics) == ["a", "b"]


def test_a_client_that_is_forgotten_is_collected(tmp_path):
    admin = AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"})
    assert admin.list_topics().topics == {}
    connection, gone = admin._connection, weakref.ref(admin)
    del admin
    # The worker lets go of its last job a moment after the answer.
    assert _soon(lambda: gc.collect() >= 0 and gone() is None)
    assert _soon(lambda: connection.opened is None)


def _soon(is_so) -> bool:
    event = threading.Event()
    return any(is_so() or event.wait(0.01) for _ in range(100 * PATIENCE_SECONDS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_in_a_forked_child_it_is_refused_and_the_parents_goes_on(admin):
    admin.cluster_id()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(KafkaException, match="make a new client in each process") as raised:
                admin.list_topics()
            assert raised.value.args[0] == KafkaError._STATE
            with admin:
                pass
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert admin.list_topics().topics == {}


# --- the cluster ------------------------------------------------------------------------------------------------------


def test_the_cluster_is_the_store(admin, url):
    with open_store(url) as store:
        identity = store.store_uuid
    described = admin.describe_cluster(include_authorized_operations=True).result(PATIENCE_SECONDS)
    assert described.cluster_id == admin.cluster_id() == admin.list_topics().cluster_id == identity
    (node,) = described.nodes
    assert (node.id, described.controller.id, described.authorized_operations) == (0, 0, None)
    (broker,) = admin.list_topics().brokers.values()
    assert (broker.host, broker.port) == (node.host, node.port)


def test_topics_are_listed_and_looking_for_one_does_not_make_it(admin):
    admin.create_topics([NewTopic("a", 2), NewTopic("b")])
    assert {name: len(topic.partitions) for name, topic in admin.list_topics().topics.items()} == {"a": 2, "b": 1}
    assert list(admin.list_topics("a", 10).topics) == ["a"]
    assert admin.list_topics(topic="nobody", timeout=10).topics["nobody"].error == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert sorted(admin.list_topics("").topics) == ["a", "b"]


def test_a_topic_is_made_by_looking_for_it_where_that_is_asked_for(url):
    with AdminClient({"bootstrap.servers": url, "allow.auto.create.topics": True}) as admin:
        assert admin.list_topics("new").topics["new"].error is None


def test_wrong_configurations_are_refused():
    with pytest.raises(TypeError):
        AdminClient()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected configuration dict"):
        AdminClient(5)  # type: ignore[arg-type]
    with pytest.raises(KafkaException, match='No such configuration property: "foo"'):
        AdminClient({"bootstrap.servers": "sqlite://", "foo": 1})


def test_threads_may_share_a_client(admin):
    failed: list = []

    def work(number):
        try:
            name = f"t{number}"
            admin.create_topics([NewTopic(name)])[name].result(PATIENCE_SECONDS)
            assert name in admin.list_topics(timeout=PATIENCE_SECONDS).topics
        except BaseException as error:  # noqa: BLE001 - it is shown by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert failed == []
    assert len(admin.list_topics().topics) == 8
