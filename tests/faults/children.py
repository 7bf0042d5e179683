"""What runs in processes of its own: `python children.py FUNCTION ARGUMENT...` calls the function with the arguments.

A child says what it has done in lines on its standard output, and goes on when it reads a line.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, event

from tests.tools.sqlite_faults import FailingDisk
from txnstore import KafkaError, Message, Producer
from txnstore.db.backend import Limits
from txnstore.db.opening import backend_of, open_store
from txnstore.db.sqlite.connections import checkpoint, connect
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import ensure_topic
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import resolve_outcome

TOPIC: Final = "orders"
TOPIC_OF_CLIENTS: Final = "t"
#: The user id that owns nothing.
NOBODY: Final = 65534


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def wait_for_line() -> None:
    sys.stdin.readline()


def partition_of(store: Store, topic: str = TOPIC) -> int:
    return store.write(lambda connection: ensure_topic(connection, topic)).partition_ids[0]


def add(store: Store, partition_id: int, *values: bytes) -> int:
    """Append one batch and return its first offset."""
    batch = encode([Record(value) for value in values])
    return store.write(lambda connection: append(connection, [Append(partition_id, batch)]))[0].base_offset


def hold_head(url: str, topic: str, idle_timeout_ms: str) -> None:
    """Append in a database transaction that is committed when a line comes."""
    limits = Limits(idle_timeout_ms=int(idle_timeout_ms), retry_timeout_ms=0)
    with open_store(url, limits=limits) as store:
        partition_id = partition_of(store, topic)

        def work(connection: Connection) -> None:
            append(connection, [Append(partition_id, encode([Record(b"from a stopped client")]))])
            say("locked")
            wait_for_line()

        try:
            store.write(work)
        except TxnStoreError as error:
            say(type(error).__name__)
        else:
            say("committed")


def hold_write_lock(path: str) -> None:
    """Hold the file's write lock until a line comes."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        say("locked")
        wait_for_line()
        connection.execute("ROLLBACK")
        say("unlocked")


def lose_log(url: str, end: str) -> None:
    """Add, and end when a line comes.

    One who does not end unaware writes meanwhile, and reads the file as a backup would, which gives up the locks.
    """
    path = url.removeprefix("sqlite:///")
    store = open_store(url, limits=Limits(retry_timeout_ms=0))
    partition_id = partition_of(store)
    batch = encode([Record(bytes(2_000))])

    def work(connection: Connection) -> None:
        append(connection, [Append(partition_id, batch)])
        Path(path).read_bytes()
        say("added")
        wait_for_line()

    for _ in range(20):
        add(store, partition_id, bytes(2_000))
    checkpoint(path)
    if end == "exit unaware":
        add(store, partition_id, bytes(2_000))
        say("added")
        wait_for_line()
    else:
        say(type(_error_of(lambda: store.write(work))).__name__)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "close":
        store.close()


def become_somebody_else() -> None:
    """Go on as a user who owns nothing here, if we are root."""
    # He may not be able to read the checkout, from which this is imported when it is needed.
    backend_of("sqlite")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def open_as_somebody_else(url: str) -> None:
    """Read and write as a user who owns nothing here, if we are root."""
    become_somebody_else()
    try:
        with open_store(url) as store:
            say("opened")
            say(type(_error_of(lambda: add(store, partition_of(store), b"a pen"))).__name__)
    except TxnStoreError as error:
        say(type(error).__name__)


def produce_as_somebody_else(url: str) -> None:
    """Produce as a user who owns nothing here, if we are root: say the first error, and go on until it is delivered."""
    become_somebody_else()
    names: list[str] = []

    def told(error: KafkaError | None, message: Message) -> None:
        names.append("delivered" if error is None else error.name())

    # What the maintenance imports when it is due is not for him either.
    with Producer({"bootstrap.servers": url, "linger.ms": 0, "txnstore.maintenance": False}) as producer:
        for value in (b"too early", b"in time"):
            producer.produce(TOPIC_OF_CLIENTS, value, on_delivery=told)
            producer.flush()
            say(names.pop())
            if value == b"too early":
                wait_for_line()


def _error_of(call: Callable[[], object]) -> TxnStoreError | None:
    try:
        call()
    except TxnStoreError as error:
        return error
    return None


def commit_loops(url: str, rounds: str) -> None:
    """Fork a process that commits one pair of records after the other until somebody kills it; then the next."""
    with open_store(url) as store:
        partition_id = partition_of(store)
    for _ in range(int(rounds)):
        child = os.fork()
        if child == 0:
            store = open_store(url)
            say("pid", os.getpid())
            while True:
                say(add(store, partition_id, b"left", b"right"))
        os.waitpid(child, 0)
        say("killed")


def die_after_failed_sync(url: str, then: str) -> None:
    """Commit a transaction on a disk that fails to sync, look, and die; with `then`, ask for the outcome before."""
    with FailingDisk.install() as disk:
        store = open_store(url)
        partition_id = partition_of(store)
        coordinator = TransactionCoordinator(store)
        producer = coordinator.init_producer_id("transfer").identity
        batch = encode([Record(b"a book")], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append("transfer", producer, [Append(partition_id, batch)])
        # Somebody else has the file open as well, so it is not made anew from the log on disk.
        reader = store.waiter()
        disk.syncs_fail = True
        error = _error_of(lambda: coordinator.end_transaction("transfer", producer, commit=True))
        disk.syncs_fail = False
        say(type(error).__name__, producer.producer_id, producer.epoch)
        say(len(store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id].batches))
        if then == "resolve":
            say(resolve_outcome(store, "transfer", producer).value)
        os.kill(os.getpid(), signal.SIGKILL)
        reader.close()


def compete(url: str, processes: str, seconds: str) -> None:
    """Let several processes commit for some seconds, all at once; say how often each did."""
    with open_store(url) as store:
        partition_id = partition_of(store)

    def commit_until_time_is_up() -> int:
        deadline = time.monotonic() + float(seconds)
        count = 0
        with open_store(url) as store:
            while time.monotonic() < deadline:
                add(store, partition_id, b"a book")
                count += 1
        return count

    say(*in_processes([commit_until_time_is_up] * int(processes)))


def write_and_checkpoint(path: str, processes: str, rounds: str) -> None:
    """Let several processes commit and checkpoint in turns, as often as they can; say how many checkpoints ran."""

    def run() -> int:
        # A store's connections, without what else a store does: the processes are to meet as often as they can.
        checkpoints = 0
        with closing(_connect_when_free(path)) as connection:
            for number in range(int(rounds)):
                while _is_refused(connection, "BEGIN IMMEDIATE"):
                    time.sleep(0.0001)
                connection.execute(f"INSERT INTO shop VALUES ({os.getpid()}, {number}, randomblob(500))")
                connection.execute("COMMIT")
                checkpoints += checkpoint(path)
        return checkpoints

    with closing(connect(path)) as connection:
        connection.execute("CREATE TABLE shop (process INTEGER, number INTEGER, data BLOB)")
    say(*in_processes([run] * int(processes)))


def _connect_when_free(path: str) -> sqlite3.Connection:
    """Open the file, which is locked for a moment while another process is the first to open it."""
    while True:
        try:
            return connect(path)
        except sqlite3.OperationalError as error:
            # Of any kind: SQLITE_BUSY_RECOVERY while the other one looks through the log.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(0.0001)


def _is_refused(connection: sqlite3.Connection, statement: str) -> bool:
    try:
        connection.execute(statement)
    except sqlite3.OperationalError:
        return True
    return False


def write_megabytes(url: str, processes: str, megabytes: str) -> None:
    """Let several processes write that much each."""

    def run() -> int:
        with open_store(url) as store:
            partition_id = partition_of(store)
            for _ in range(10 * int(megabytes)):
                add(store, partition_id, os.urandom(100_000))
        return 0

    say(*in_processes([run] * int(processes)))


def fork_and_close(url: str) -> None:
    """Fork with an open store; the child goes on to use it after the parent has closed its own."""
    store = open_store(url)
    partition_id = partition_of(store)
    add(store, partition_id, b"parent")
    waiter = store.waiter()
    child_turn, parent_turn = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        add(store, partition_id, b"child")
        waiter.wait(0)
        os.write(parent_turn[1], b"x")
        os.read(child_turn[0], 1)
        add(store, partition_id, b"child, alone")
        store.close()
        os._exit(0)
    os.read(parent_turn[0], 1)
    add(store, partition_id, b"parent again")
    waiter.close()
    store.close()
    os.write(child_turn[1], b"x")
    _, status = os.waitpid(child, 0)
    say(status)


def fork_and_compete(url: str) -> None:
    """Fork with an open store; parent and child go on to use it at the same time."""
    store = open_store(url)
    partition_id = partition_of(store)
    child = os.fork()
    for _ in range(50):
        add(store, partition_id, b"parent" if child else b"child")
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say(status)
    store.close()


def fork_and_leave(url: str) -> None:
    """Fork with an open store and a listening waiter; the child uses both and ends as programs do."""
    store = open_store(url)
    partition_id = partition_of(store)
    add(store, partition_id, b"parent")
    store.announce()
    waiter = store.waiter()
    child = os.fork()
    if child == 0:
        add(store, partition_id, b"child")
        waiter.wait(1)
        waiter.close()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    add(store, partition_id, b"parent again")
    with open_store(url) as other:
        other.announce()
        other.write(lambda connection: ensure_topic(connection, "news"), wakes_readers=True)
        # Notified, or told by the file; no longer than a waiter waits for its own sake.
        say(status, any(waiter.wait(400) for _ in range(20)))
    waiter.close()
    store.close()


def fork_in_use(url: str) -> None:
    """Fork while another thread is in the middle of a database transaction; say what the child can do."""
    store = open_store(url, limits=Limits(retry_timeout_ms=200, lock_timeout_ms=100))
    partition_id = partition_of(store)
    in_use, forked = threading.Event(), threading.Event()

    def work(connection: Connection) -> None:
        append(connection, [Append(partition_id, encode([Record(b"parent")]))])
        in_use.set()
        forked.wait()

    writing = threading.Thread(target=store.write, args=[work])
    writing.start()
    in_use.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, about forks with threads
        child = os.fork()
    if child == 0:
        say(type(_error_of(lambda: add(store, partition_id, b"child"))).__name__)
        say(type(_error_of(lambda: open_store(url).close())).__name__)
        sys.exit(0)
    os.waitpid(child, 0)
    forked.set()
    writing.join()
    add(store, partition_id, b"parent again")
    store.close()


def fork_with_memory() -> None:
    """Fork with a store in memory; the child ends as programs do, and its parent still has the store."""
    store = open_store("sqlite://")
    partition_id = partition_of(store)
    add(store, partition_id, b"parent")
    child = os.fork()
    if child == 0:
        say(add(store, partition_id, b"child") == 1)
        sys.exit(0)
    os.waitpid(child, 0)
    say(add(store, partition_id, b"parent again") == 2)
    say(Path(store.read(_path_of)).parent)
    store.close()


def _path_of(connection: Connection) -> str:
    return str(connection.exec_driver_sql("PRAGMA database_list").one()[2])


def commit_when_told(url: str) -> None:
    """Append a record at each line that comes, and wake readers."""
    with open_store(url) as store:
        partition_id = partition_of(store)
        say("ready")
        # A parent that has failed closes the pipe without a word.
        while sys.stdin.readline() == "\n":
            batch = encode([Record(b"news")])
            store.write(partial(append, appends=[Append(partition_id, batch)]), wakes_readers=True)


def interrupt_write(url: str) -> None:
    """Append, be interrupted while waiting for a lock, and append again."""
    with open_store(url) as store:
        partition_id = partition_of(store)
        say("ready")
        wait_for_line()
        event.listen(store.engine, "before_cursor_execute", _SayWaiting())
        _say_when_interrupted(lambda: add(store, partition_id, b"never"))
        wait_for_line()
        add(store, partition_id, b"a book")
        say(store.engine.pool.status())


def interrupt_waiter(url: str) -> None:
    """Wait for news, be interrupted, and wait again."""
    with open_store(url) as store, closing(store.waiter()) as waiter:
        while waiter.wait(1):
            pass

        def wait() -> None:
            say("waiting")
            while True:
                waiter.wait(60_000)

        _say_when_interrupted(wait)
        partition_id = partition_of(store)
        add(store, partition_id, b"a book")
        store.announce()
        say(any(waiter.wait(400) for _ in range(20)))


class _SayWaiting:
    """Says "waiting" when a lock is asked for in vain: on SQLite again and again, on PostgreSQL within a statement."""

    def __init__(self) -> None:
        self._said = False
        self._begun = 0

    def __call__(self, connection: object, cursor: object, statement: str, *_: object) -> None:
        self._begun += statement.startswith("BEGIN IMMEDIATE")
        if not self._said and (self._begun > 2 or "FOR UPDATE" in statement):
            self._said = True
            say("waiting")


def _say_when_interrupted(call: Callable[[], object]) -> None:
    try:
        call()
    except KeyboardInterrupt:
        say("interrupted")
    else:
        say("not interrupted")


def in_processes(functions: Sequence[Callable[[], int]]) -> list[int]:
    """Run each function in a forked process, all from the same moment on; return what they returned."""
    go_read, go_write = os.pipe()
    answers: list[tuple[int, int]] = []
    for function in functions:
        answer_read, answer_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(go_write)
            os.read(go_read, 1)
            os.write(answer_write, str(function()).encode())
            os._exit(0)
        os.close(answer_write)
        answers.append((child, answer_read))
    os.close(go_write)
    results = []
    for child, answer_read in answers:
        with os.fdopen(answer_read) as answer:
            results.append(int(answer.read()))
        os.waitpid(child, 0)
    return results


def main() -> None:
    name, *arguments = sys.argv[1:]
    function: Callable[..., None] = globals()[name]
    function(*arguments)


if __name__ == "__main__":
    main()
