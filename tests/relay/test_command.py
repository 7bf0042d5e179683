"""`txnstore relay` without a broker: the outbox, wrong calls, the missing package, and an address where nobody is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from sqlalchemy import insert, update

import txnstore
from tests.clients.steps import PATIENCE_SECONDS
from tests.relay.refusing_broker import refusing_broker
from tests.relay.store_side import make_topic, read
from tests.tools.silent_port import silent_port
from txnstore import cli
from txnstore.cli.relay import ends_soon
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.errors import InvalidConfiguration, StoreUnavailable
from txnstore.log.topics import get_topic
from txnstore.model import PartitionName
from txnstore.relay.errors import (
    PAUSE_FIRST_SECONDS,
    PAUSE_LAST_SECONDS,
    KafkaUnavailable,
    Patience,
    RelayFailed,
    RelayFenced,
)
from txnstore.relay.kafka_cluster import KafkaCluster, consumer_settings, producer_settings
from txnstore.relay.options import check_leaders, relay_id_from, relay_id_to, start_id_of, transactional_id_of
from txnstore.relay.positions import RelayPosition, begin_relay_positions, read_relay_positions

SECRET = "Hunter2SecretWord"
_SASL = ("sasl.mechanism=PLAIN", "sasl.username=u", f"sasl.password={SECRET}")


@pytest.fixture
def relay(capsys):
    """Run `txnstore relay`: return its exit code, and what it printed."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["relay", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def confluent_kafka():
    return pytest.importorskip("confluent_kafka", reason="needs confluent-kafka: pip install 'txnstore[kafka]'")


def test_alone_it_moves_the_rows_of_the_outbox(relay, url, store):
    make_topic(store, "shop")
    row = {"topic": "shop", "partition_number": 0, "value": b"v", "key": b"k"}
    store.write(lambda connection: connection.execute(insert(outbox), [row, row]))
    assert relay(url, "--once") == (0, "2 rows of the outbox were moved\n", "")
    assert relay(url, "--once") == (0, "0 rows of the outbox were moved\n", "")
    assert [(record.key, record.value) for record in read(store, "shop")[0]] == [(b"k", b"v")] * 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("beside", [[], ["--outbox", "--to", "a:1"]], ids=["alone", "beside"])
def test_one_that_is_told_to_end_while_it_moves_the_rows_of_the_outbox_ends_after_a_round(
    relay, url, store, monkeypatch, beside
):
    make_topic(store, "shop")
    row = {"topic": "shop", "partition_number": 0, "value": b"v", "key": b"k"}
    for _ in range(5):
        store.write(lambda connection: connection.execute(insert(outbox), [row]))
    # Where there is one writer, a round ends between two callers: before the last row that it has seen.
    apart = update(outbox).values(committed_id=outbox.c.outbox_id - 1)
    store.write(lambda connection: connection.execute(apart))
    monkeypatch.setattr("txnstore.log.outbox.sequencer.ROUND_ROWS_MAX", 3)
    monkeypatch.setattr("txnstore.log.outbox.sequencer.PAGE_ROWS_MAX", 2)
    # Its signal comes during the first round.
    monkeypatch.setattr("txnstore.cli.relay.stop_at_signals", lambda stop: stop.set())
    monkeypatch.setattr("txnstore.cli.relay.KafkaCluster", lambda *_: object())
    monkeypatch.setattr("txnstore.cli.relay.ToKafka", None)
    assert relay(url, "--once", *beside) == (0, "2 rows of the outbox were moved\n", "")
    monkeypatch.setattr("txnstore.cli.relay.stop_at_signals", lambda _: None)
    assert relay(url, "--once") == (0, "3 rows of the outbox were moved\n", "")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "a:1", "--from", "b:1"], "give only one direction"),
        (["--topic", "shop"], "need --to or --from"),
        (["--name", "x"], "need --to or --from"),
        (["--start", "latest"], "need --to or --from"),
        (["--on-gap", "error", "--outbox"], "need --to or --from"),
        (["-X", "a=b"], "need --to or --from"),
        (["--config-file", "/no/such/file"], "need --to or --from"),
        (["--to", "a:1", "-X", "nonsense"], "not KEY=VALUE"),
        (["--to", "a:1", "--config-file", "/no/such/file"], "cannot be read"),
        (["--to", "a:1", "--start", "middle"], "middle"),
        (["--to", "a:1", "--on-gap", "ignore"], "ignore"),
        (["--to", "a:1", "--forget", "x"], "--forget goes with --topic"),
        (["--forget", "x", "--outbox"], "--forget goes with --topic"),
        (["--forget", "x", "--name", "y"], "--forget goes with --topic"),
        (["--forget", "x", "--once"], "--forget goes with --topic"),
        (["--forget", "x", "-X", "a=b"], "--forget goes with --topic"),
        (["--forget", "x", "--start", "earliest"], "--forget goes with --topic"),
        (["--forget", "x", "--on-gap", "error"], "--forget goes with --topic"),
    ],
)
def test_a_wrong_call_ends_with_2(relay, txnstore_sqlite_url, arguments, said):
    code, out, err = relay(txnstore_sqlite_url, *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())


def test_a_relay_that_was_given_up_is_forgotten(relay, url, store):
    code, _, err = relay(url, "--forget", "a")
    assert (code, err.endswith("a is no relay with a position in this store: there is none\n")) == (1, True)
    to_one, to_two, from_one = relay_id_to("one", "a"), relay_id_to("two", "a"), relay_id_from("one", "b")
    for relay_id in (to_one, start_id_of(to_one), to_two, from_one):
        at = {PartitionName(topic, number): RelayPosition("uuid", 7) for topic in ("t", "u") for number in (0, 1)}
        store.write(lambda connection, of=relay_id, at=at: begin_relay_positions(connection, of, at))

    def left():
        return store.read(
            lambda connection: {
                of: {partition.topic for partition in read_relay_positions(connection, of)}
                for of in (to_one, start_id_of(to_one), to_two, from_one)
            }
        )

    code, out, err = relay(url, "--forget", "a")
    assert (code, out) == (1, "")
    assert err.endswith("a is the name of several relays; say which: to/one/a, to/two/a\n")
    assert relay(url, "--forget", "c")[2].endswith("in this store: from/one/b, to/one/a, to/two/a\n")
    assert set(map(len, left().values())) == {2}
    code, out, err = relay(url, "--forget", "to/one/a", "--topic", "v", "-t", "w")
    assert (code, out) == (1, "")
    assert err.endswith("to/one/a has a position in none of these topics: v, w\n")
    assert relay(url, "--forget", "to/one/a", "--topic", "t") == (
        0,
        "the positions in 2 partitions were forgotten\n",
        "",
    )
    both = {"t", "u"}
    assert left() == {to_one: {"u"}, start_id_of(to_one): {"u"}, to_two: both, from_one: both}
    assert relay(url, "--forget", "to/one/a") == (0, "the positions in 2 partitions were forgotten\n", "")
    assert left() == {to_one: set(), start_id_of(to_one): set(), to_two: both, from_one: both}
    # There is one of this name left.
    assert relay(url, "--forget", "a") == (0, "the positions in 4 partitions were forgotten\n", "")
    assert relay(url, "--forget", "b") == (0, "the positions in 4 partitions were forgotten\n", "")
    assert not any(left().values())


def test_a_relay_that_has_only_written_where_it_is_to_begin_is_forgotten(relay, url, store):
    start_id = start_id_of(relay_id_to("one", "a"))
    at = {PartitionName("t", number): RelayPosition("uuid", 0) for number in (0, 1)}
    store.write(lambda connection: begin_relay_positions(connection, start_id, at))
    assert relay(url, "--forget", "a", "-t", "t") == (0, "the positions in 2 partitions were forgotten\n", "")
    assert relay(url, "--forget", "a")[0] == 1


def test_a_line_of_the_file_that_is_no_setting_is_not_shown(relay, txnstore_sqlite_url, tmp_path):
    file = tmp_path / "kafka.properties"
    file.write_text(f"# a comment\nsecurity.protocol=ssl\n\n{SECRET}\n")
    code, _, err = relay(txnstore_sqlite_url, "--to", "a:1", "--config-file", file)
    assert code == 2
    assert "setting 2 is not KEY=VALUE" in " ".join(err.replace("│", " ").split())
    assert SECRET not in err


def test_the_file_may_have_spaces_around_what_it_sets(relay, txnstore_sqlite_url, tmp_path, monkeypatch):
    given = []

    def refuse(_, settings):
        given.append(settings)
        raise RelayFailed("seen")

    monkeypatch.setattr("txnstore.cli.relay.KafkaCluster", refuse)
    file = tmp_path / "kafka.properties"
    file.write_text("security.protocol = ssl\n sasl.password\t=  a = b \nclient.id=\nlinger.ms = 1\n")
    code, _, _ = relay(txnstore_sqlite_url, "--to", "a:1", "--config-file", file, "-X", "linger.ms=2")
    assert code == 1
    expected = {"security.protocol": "ssl", "sasl.password": "a = b", "client.id": "", "linger.ms": "2"}
    assert given == [expected]


@pytest.mark.parametrize("direction", ["--to", "--from"])
def test_without_the_package_it_names_the_extra(relay, txnstore_sqlite_url, monkeypatch, direction):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    code, out, err = relay(txnstore_sqlite_url, direction, "localhost:1")
    assert (code, out) == (1, "")
    assert err.endswith("needs the package confluent-kafka: pip install 'txnstore[kafka]'\n")


@pytest.mark.parametrize("direction", ["--to", "--from"])
@pytest.mark.parametrize("setting", ["transactional.id=x", "isolation.level=read_uncommitted", "group.id=g"])
def test_what_exactly_once_depends_on_cannot_be_set(relay, txnstore_sqlite_url, confluent_kafka, direction, setting):
    code, _, err = relay(txnstore_sqlite_url, direction, "localhost:1", "-X", setting)
    assert code == 1
    assert err.endswith(f"the relay sets {setting.partition('=')[0]} itself\n")


@pytest.mark.parametrize("direction", ["--to", "--from"])
def test_an_address_where_nobody_is_is_said_and_may_pass(
    relay, txnstore_sqlite_url, confluent_kafka, monkeypatch, direction
):
    monkeypatch.setattr("txnstore.relay.kafka_cluster.ANSWER_SECONDS", 0.3)
    with silent_port() as port:
        address = f"127.0.0.1:{port}"
        code, out, err = relay(txnstore_sqlite_url, direction, address)
    assert (code, out) == (75, "")
    assert f"the Kafka cluster at {address}" in err


@pytest.mark.slow_but_first
@pytest.mark.parametrize("direction", ["--to", "--from"])
@pytest.mark.parametrize(
    ("settings", "to_others", "code", "said"),
    [
        ([*_SASL, "security.protocol=sasl_plaintext"], b"", 1, "who is that?"),
        (["security.protocol=ssl"], b"HTTP/1.1 400 Bad Request", 1, "SSL handshake failed"),
        # So does one that has just gone down.
        (["security.protocol=ssl"], b"", 75, "Disconnected"),
    ],
    ids=["password", "no TLS", "breaks off"],
)
def test_a_broker_that_refuses_the_settings_ends_the_relay_as_what_stays_wrong(
    relay, txnstore_sqlite_url, confluent_kafka, monkeypatch, direction, settings, to_others, code, said
):
    monkeypatch.setattr("txnstore.relay.kafka_cluster.ANSWER_SECONDS", 1.0)
    given = [part for setting in settings for part in ("-X", setting)]
    with refusing_broker(to_others) as address:
        exit_code, out, err = relay(txnstore_sqlite_url, direction, address, *given)
    assert (exit_code, out) == (code, "")
    assert f"the Kafka cluster at {address}" in err
    assert said in err
    assert SECRET not in err


@pytest.fixture
def ended(monkeypatch):
    """The codes with which the process would have been ended; the relay, which asks Kafka, then has its answer."""
    codes: list[int] = []
    has_ended = threading.Event()

    class Waiting:
        do: Callable[[threading.Event, Callable], object] = staticmethod(lambda stop, failing: stop.set())

        def __init__(self, *_):
            pass

        def run(self, stop, failing):
            try:
                self.do(stop, failing)
            finally:
                assert has_ended.wait(PATIENCE_SECONDS)
            return 0

    def end_process(code):
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr("txnstore.cli.relay.STOP_SECONDS", 0.0)
    monkeypatch.setattr("txnstore.cli.relay.os._exit", end_process)
    monkeypatch.setattr("txnstore.cli.relay.KafkaCluster", Waiting)
    monkeypatch.setattr("txnstore.cli.relay.ToKafka", Waiting)
    return SimpleNamespace(codes=codes, relay=Waiting, wait=lambda: has_ended.wait(PATIENCE_SECONDS))


def test_a_relay_for_which_kafka_has_no_answer_ends_soon_all_the_same(relay, txnstore_sqlite_url, ended):
    """One that asks Kafka for something when it is told to end, and would wait for the answer."""
    with open_store(txnstore_sqlite_url):
        assert relay(txnstore_sqlite_url, "--to", "localhost:1")[0] == 0
    assert ended.codes == [75]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RelayFailed("a record is lost"), 1),
        (RelayFenced("another relay has taken over"), 1),
        (RelayFailed("Kafka was away", may_pass=True), 75),
        (InvalidConfiguration("no such topic setting"), 1),
        (StoreUnavailable("the store is away"), 75),
    ],
)
def test_an_error_is_said_and_ends_a_relay_soon_also_if_kafka_has_no_answer(
    relay, txnstore_sqlite_url, ended, monkeypatch, error, code
):
    def fail(stop, failing):
        failing(error)
        raise error

    monkeypatch.setattr(ended.relay, "do", staticmethod(fail))
    with open_store(txnstore_sqlite_url):
        exit_code, _, err = relay(txnstore_sqlite_url, "--to", "localhost:1")
    assert (exit_code, ended.codes) == (code, [code])
    # Once by what ends the process, and once because this one has gone on.
    assert err.count(f"txnstore: {error}\n") == 2


@pytest.mark.parametrize("fails", [False, True], ids=["waits", "fails"])
def test_an_outbox_that_cannot_be_relayed_ends_the_relay_as_what_stays_wrong(
    relay, txnstore_sqlite_url, ended, monkeypatch, fails
):
    """Whether the relay waits for Kafka, or has given up on it, which by itself may pass."""

    def do(stop, failing):
        assert ended.wait()
        if fails:
            raise RelayFailed("Kafka was away", may_pass=True)

    def refuse(*_):
        raise InvalidConfiguration("no such setting")

    monkeypatch.setattr(ended.relay, "do", staticmethod(do))
    monkeypatch.setattr("txnstore.relay.outbox_loop.relay_outbox", refuse)
    with open_store(txnstore_sqlite_url):
        code, _, err = relay(txnstore_sqlite_url, "--to", "localhost:1", "--outbox")
    assert (code, ended.codes) == (1, [1])
    assert "txnstore: no such setting" in err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_reads_ends_a_relay_all_the_same(monkeypatch):
    """What prints it raises SystemExit where the other end of a pipe is gone."""
    codes: list[int] = []
    has_ended = threading.Event()

    def end_process(code):
        codes.append(code)
        has_ended.set()

    def report(_):
        raise SystemExit(1)

    monkeypatch.setattr("txnstore.cli.relay.STOP_SECONDS", 0.0)
    monkeypatch.setattr("txnstore.cli.relay.report", report)
    with ends_soon(threading.Event(), end_process) as failing:
        failing(RelayFailed("Kafka was away", may_pass=True))
        assert has_ended.wait(PATIENCE_SECONDS)
    assert codes == [75]


def test_a_relay_that_ends_by_itself_is_not_ended():
    stop = threading.Event()
    codes: list[int] = []
    # That of a relay before may still be about to end.
    others = set(threading.enumerate())
    with ends_soon(stop, codes.append):
        (watching,) = (each for each in set(threading.enumerate()) - others if each.name == "txnstore-relay-end")
    watching.join(PATIENCE_SECONDS)
    assert not watching.is_alive()
    assert codes == []


def test_a_setting_that_librdkafka_does_not_know_is_said(relay, txnstore_sqlite_url, confluent_kafka):
    code, _, err = relay(txnstore_sqlite_url, "--to", "localhost:1", "-X", "no.such.setting=1")
    assert code == 1
    assert "no.such.setting" in err


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_FENCED", "RelayFenced"),
        ("PRODUCER_FENCED", "RelayFenced"),
        ("MSG_SIZE_TOO_LARGE", "RelayFailed"),
        ("TOPIC_AUTHORIZATION_FAILED", "RelayFailed"),
        ("_TIMED_OUT", "KafkaUnavailable"),
        ("_ALL_BROKERS_DOWN", "KafkaUnavailable"),
        ("_AUTHENTICATION", "KafkaUnavailable"),
        ("SASL_AUTHENTICATION_FAILED", "KafkaUnavailable"),
        ("COORDINATOR_NOT_AVAILABLE", "KafkaUnavailable"),
        ("CONCURRENT_TRANSACTIONS", "KafkaUnavailable"),
    ],
)
def test_an_error_of_kafka_is_of_one_of_three_kinds(stand_in, name, kind):
    cluster = stand_in.cluster()
    kafka_error = cluster.library.KafkaError
    error = cluster.error(kafka_error(getattr(kafka_error, name)), "shop-0")
    assert type(error).__name__ == kind
    assert str(error).startswith("shop-0: ")


class _SilentAdmin:
    """Hears nothing but what is `told` to who polls, once it has given its `answers`."""

    def __init__(self, settings, told=(), answers=()):
        self._tell = settings["error_cb"]
        self._told = told
        self._answers = iter(answers)

    def list_topics(self, timeout):
        for answer in self._answers:
            return answer
        raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError._TRANSPORT))

    def poll(self, timeout):
        for name, text in self._told:
            self._tell(txnstore.KafkaError(getattr(txnstore.KafkaError, name), text))
        return len(self._told)


@pytest.fixture
def silent_cluster():
    """Make a cluster that does not answer, for these reasons."""

    def make(*told, answers=()):
        library = SimpleNamespace(
            KafkaError=txnstore.KafkaError,
            KafkaException=txnstore.KafkaException,
            admin=SimpleNamespace(AdminClient=partial(_SilentAdmin, told=told, answers=answers)),
        )
        return KafkaCluster("a:1", {}, library=library)

    return make


_NOBODY = ("_TRANSPORT", "b:1: nobody is there")
_ALL_DOWN = ("_ALL_BROKERS_DOWN", "2/2 brokers are down")


@pytest.mark.parametrize("name", ["_AUTHENTICATION", "_SSL"])
@pytest.mark.parametrize("nobody_first", [True, False])
def test_settings_that_a_broker_refuses_are_no_trouble_that_passes(silent_cluster, name, nobody_first):
    refused = (name, "a:1: the password is wrong")
    told = (_NOBODY, refused) if nobody_first else (refused, _NOBODY)
    with pytest.raises(RelayFailed, match=r"the Kafka cluster at a:1: .* \(a:1: the password is wrong\)$") as raised:
        silent_cluster(*told, _ALL_DOWN).cluster_id()
    assert not raised.value.may_pass


def test_why_there_is_no_connection_is_said(silent_cluster):
    cluster = silent_cluster(_NOBODY, _ALL_DOWN)
    with pytest.raises(KafkaUnavailable, match=r"the Kafka cluster at a:1: .* \(b:1: nobody is there\)$"):
        cluster.cluster_id()
    # A broker's own error needs no other reason.
    assert "nobody" not in str(cluster.error(txnstore.KafkaError(15), "shop-0"))


@pytest.mark.parametrize("name", ["_AUTHENTICATION", "_SSL"])
def test_a_connection_that_breaks_off_is_trouble_that_passes(silent_cluster, name):
    with pytest.raises(KafkaUnavailable, match="Disconnected"):
        silent_cluster((name, "a:1: handshake failed: Disconnected")).cluster_id()


def test_a_broker_that_does_not_know_its_users_yet_ends_no_relay_that_has_worked(silent_cluster):
    cluster = silent_cluster(("_AUTHENTICATION", "a:1: no such user"), answers=[SimpleNamespace(cluster_id="x")])
    assert cluster.cluster_id() == "x"
    for _ in range(2):
        with pytest.raises(KafkaUnavailable, match="no such user"):
            cluster.topics()


def test_a_topic_that_lives_elsewhere_is_refused(store):
    make_topic(store, "shop", 2)
    topic = store.read(lambda connection: get_topic(connection, "shop"))
    check_leaders(topic, store.database_id)
    with pytest.raises(RelayFailed, match="shop-1 is in another database"):
        check_leaders(replace(topic, leaders=(1, 2)), 1)


def test_names_never_meet():
    # "/" is in no relay's name and in no topic's.
    assert transactional_id_of("a", "b-c", 1) != transactional_id_of("a-b", "c", 1)
    assert transactional_id_of("a", "b-1", 2) != transactional_id_of("a", "b", 12)
    assert relay_id_to("c", "n") != relay_id_from("c", "n")


def test_what_the_relay_sets_wins():
    settings = producer_settings("b:1", {"linger.ms": "7"}, "id")
    assert (settings["linger.ms"], settings["transactional.id"]) == ("7", "id")
    assert consumer_settings("b:1", {}, "g")["isolation.level"] == "read_committed"
    with pytest.raises(RelayFailed, match=r"enable\.auto\.commit, group\.id itself"):
        KafkaCluster("b:1", {"group.id": "g", "enable.auto.commit": "true"}, library=object())


def test_pauses_grow_up_to_a_bound_and_patience_has_an_end():
    now = [0.0]
    trouble = Patience("shop-0", 60.0, monotonic_seconds=lambda: now[0])
    pauses = []
    while now[0] <= 60:
        trouble.met(KafkaUnavailable("away"))
        pauses.append(trouble.left_seconds())
        assert not trouble.is_over()
        now[0] += pauses[-1]
        assert trouble.is_over()
    assert PAUSE_FIRST_SECONDS / 2 <= pauses[0] <= PAUSE_FIRST_SECONDS
    assert PAUSE_LAST_SECONDS / 2 <= pauses[-1] <= PAUSE_LAST_SECONDS
    with pytest.raises(RelayFailed, match="shop-0: away") as ended:
        trouble.met(KafkaUnavailable("away"))
    assert ended.value.may_pass


def test_trouble_that_goes_on_or_comes_again_is_told_once_a_minute_and_that_it_is_over(caplog):
    caplog.set_level("INFO")
    now = [0.0]
    trouble = Patience("shop-0", None, monotonic_seconds=lambda: now[0])

    def told():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    for now[0] in range(121):
        trouble.met(KafkaUnavailable("away"))
    trying = "shop-0: away; trying again"
    assert told() == [trying, f"{trying}, for 60 seconds now", f"{trying}, for 120 seconds now"]
    trouble.passed()
    trouble.passed()
    assert told() == ["shop-0: going on"]
    # What comes and goes is told once more, and then once a minute.
    for now[0] in range(121, 180):
        trouble.met(KafkaUnavailable("away"))
        trouble.passed()
    assert told() == [trying, "shop-0: going on"]
    now[0] = 181
    trouble.met(KafkaUnavailable("away"))
    trouble.passed()
    assert told() == [trying, "shop-0: going on"]


def test_what_passes_is_forgotten():
    now = [0.0]
    trouble = Patience("shop-0", 1.0, monotonic_seconds=lambda: now[0])
    for _ in range(10):
        trouble.met(KafkaUnavailable("away"))
        trouble.passed()
        assert trouble.is_over()
        now[0] += 1
