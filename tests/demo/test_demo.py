"""The demonstration from end to end: killed halfway, every refund once; and the calls that it refuses."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console

from scripts import demo_query
from scripts.demo import AUDIT, EMITTED, PARTITIONS, Demo, DemoError, Found, closing_table, main, next_steps
from scripts.demo_lines import COLUMNS
from scripts.demo_produce import SETTLEMENTS, Input
from scripts.demo_query import BATCHES, Driver
from scripts.demo_totals import Refunds, read_topic
from tests.databases import on_sqlite_alone
from txnstore import Consumer, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.spark.local_spark import NoJavaError, find_java

ROOT = Path(__file__).parents[2]
#: Two lives of Spark, on a machine that has much else to do.
TIMEOUT_S = 560


@pytest.fixture
def demo(tmp_path):
    """Run the program; its folder is below `tmp_path`."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts/demo.py"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )

    return run


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Call the program in this process: return its exit code and what it printed, to both."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["scripts/demo", *arguments])
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as exit_:
            main()
        printed = capsys.readouterr()
        return exit_.value.code, printed.out + printed.err

    return call


@pytest.fixture
def _needs_spark(tmp_path):
    pytest.importorskip("pyspark", reason="needs pyspark: pip install 'txnstore[spark]'")
    from tests.tools.spark_classes import use_archived_classes  # imports pyspark

    try:
        use_archived_classes(str(find_java(tmp_path)))
    except NoJavaError as error:
        pytest.skip(str(error))


#: What the program's Pythons run first: Spark starts for its workers what they say that they are.
NAMED_ELSEWISE = "import os, sys\nsys.executable = os.environ['PYSPARK_PYTHON']\n"


@pytest.fixture
def _spark_forks_its_python(_needs_spark, tmp_path, monkeypatch):
    """Let Spark's workers come from a process that has imported what they need: `tests/spark` starts others, too."""
    from tests.tools.spark_forks import python_for_spark

    (tmp_path / "sitecustomize.py").write_text(NAMED_ELSEWISE)
    with python_for_spark(tmp_path) as python:
        monkeypatch.setenv("PYSPARK_PYTHON", str(python))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        yield


def command_lines():
    """What runs on this machine; not every machine has a `ps`."""
    if not Path("/proc/self/cmdline").exists():
        return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


def ends_of(url):
    with Consumer({"bootstrap.servers": url, "group.id": "looking"}) as consumer:
        partitions = [TopicPartition(SETTLEMENTS, number) for number in range(PARTITIONS)]
        return [consumer.get_watermark_offsets(partition)[1] for partition in partitions]


def quarter_of(refund, ends):
    return refund["source_offset"] * BATCHES // ends[refund["source_partition"]]


@pytest.mark.slow
@on_sqlite_alone
@pytest.mark.usefixtures("_spark_forks_its_python")
def test_every_refund_is_there_once_although_the_driver_was_killed(demo, url, tmp_path):
    """The program and its query, which know no database: what a kill leaves in each, `tests/spark` shows on both."""
    done = demo("--rows", "1000", "--seed", "5", "--url", url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,000 settlements of" in done.stdout
    assert re.search(r"SIGKILL at offset \d+ of \d+", done.stdout.replace(",", ""))
    assert "\nexactly once\n" in done.stdout
    emitted, audit = (sorted(read_topic(url, topic, lambda count: None)) for topic in (EMITTED, AUDIT))
    assert emitted == audit != []
    ends = ends_of(url)
    # Each micro-batch reads a quarter of every partition, and has refunds to write: one that was dropped is missed.
    assert {quarter_of(json.loads(value), ends) for value in emitted} == set(range(BATCHES))
    # The driver was killed, and so was all that it started.
    assert [line for line in command_lines() if "refunds.py" in line and str(tmp_path) in line] == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory"),
        (b"", "the input is empty"),
        (b"a,b\n1,2\n", "does not name the column InvoiceNo"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "does not name the column InvoiceNo"),
    ],
)
def test_an_input_that_is_none_is_refused(call, tmp_path, content, text):
    path = tmp_path / "input.csv"
    if content is not None:
        path.write_bytes(content)
    code, printed = call("--input", "input.csv", "--url", f"sqlite:///{tmp_path}/shop.db")
    assert code == 2, printed
    assert text in printed.replace("\n", " ")
    assert not (tmp_path / "shop.db").exists()


@pytest.mark.parametrize("arguments", [("--rows", "0"), ("--rows", "x"), ("--producers", "-1"), ("--unknown",)])
def test_a_wrong_call_is_refused(call, arguments):
    code, printed = call(*arguments)
    assert code == 2
    assert "usage: scripts/demo" in printed


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite:///no/such/folder/x.db", "postgresql://a:sesame@[::1]:1/x"])
def test_a_database_that_is_not_there_is_an_error_without_a_password(call, url, monkeypatch):
    monkeypatch.setattr("scripts.demo._ANSWER_SECONDS", 1.0)
    code, printed = call("--rows", "1", "--url", url)
    assert code == 1
    assert "sesame" not in printed


@pytest.mark.slow
def test_existing_topics_are_replaced_only_if_asked_for(url, tmp_path):
    admin = AdminClient({"bootstrap.servers": url})
    for future in admin.create_topics([NewTopic(EMITTED, 1), NewTopic("others", 1)]).values():
        future.result(30)
    demo = Demo(url, tmp_path, Console(quiet=True))
    with pytest.raises(DemoError, match="has the topics refunds-emitted already; --replace"):
        demo.make_topics(replace=False)
    demo.make_topics(replace=True)
    partitions = {name: len(topic.partitions) for name, topic in admin.list_topics().topics.items()}
    assert partitions == {"others": 1, "settlements": 4, "settlements-rejected": 4, EMITTED: 4, AUDIT: 4}


def counted(*amounts):
    refunds = Refunds()
    for number, amount in enumerate(amounts):
        refunds.add(f"C{number}", f"Country {number}", Decimal(amount))
    return refunds


def test_the_table_shows_the_totals_of_all_three():
    console = Console(width=120, record=True, quiet=True)
    given = Input(refunds=counted(*["1.25"] * 7))
    console.quiet = False
    with console.capture() as capture:
        console.print(closing_table(given, Found(0, 0, counted(*["1.25"] * 7), counted("1.25"))))
    text = capture.get()
    assert re.search(r"amount\W+8\.75\W+8\.75\W+1\.25", text)
    assert re.search(r"2 others\W+2 / 2\.50\W+2 / 2\.50\W+0 / 0\.00", text)


def test_whatever_differs_is_found():
    given = Input(settlements=3, reasons={"broken": 1}, refunds=counted("1", "2"))
    assert Found(3, 1, counted("1", "2"), counted("1", "2")).differences_from(given) == []
    for found, text in (
        (Found(2, 1, counted("1", "2"), counted("1", "2")), "settlements: 2 records and not 3"),
        (Found(3, 0, counted("1", "2"), counted("1", "2")), "settlements-rejected: 0 records and not 1"),
        (Found(3, 1, counted("1"), counted("1", "2")), "refunds-emitted: 1 refunds and not 2"),
        (Found(3, 1, counted("1", "2"), counted("1", "3")), "refund-audit: an amount of 4 and not 3"),
    ):
        assert text in found.differences_from(given)


@pytest.mark.parametrize(
    ("url", "program"),
    [
        ("sqlite:////tmp/a b.db", "sqlite3 '/tmp/a b.db' "),
        ("postgresql://ann:sesame@host:5433/shop?sslmode=require", "psql "),
    ],
)
def test_the_next_steps_have_no_password(url, program, tmp_path):
    steps = next_steps(url, tmp_path)
    assert steps[0].startswith(program)
    assert "sesame" not in str(steps)
    assert sum("--url" in step for step in steps) == 2


def test_the_first_step_works(sql_program, sqlite_demo_url):
    """As it is printed, but for the program."""
    command = next_steps(sqlite_demo_url, Path("/tmp"))[0]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=300)
    if "not found" in done.stderr:
        pytest.skip("needs the program sqlite3")
    assert (done.returncode, done.stdout) == (0, "0|customer|refund\n")


@pytest.fixture
def sqlite_demo_url(txnstore_sqlite_url):
    with Producer({"bootstrap.servers": txnstore_sqlite_url}) as producer:
        producer.produce(EMITTED, "refund", key="customer")
    return txnstore_sqlite_url


@pytest.mark.slow
@pytest.mark.usefixtures("_needs_spark")
def test_who_ends_the_demonstration_ends_its_query(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "scripts/demo.py"), "--rows", "300", "--no-crash"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stdout or ():
            if "a transaction each" in line:
                break
        [log] = tmp_path.glob("txnstore-demo-*")
        while not (log / "spark.log").exists() and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert [line for line in command_lines() if "refunds.py" in line and str(tmp_path) in line] == []


class LockWithSignal:
    """A lock that a signal follows: it comes once, where the next statement would begin a `try`."""

    def __init__(self, number):
        self._lock = threading.Lock()
        self._number = number

    def acquire(self, blocking=True, timeout=-1):
        is_taken = self._lock.acquire(blocking, timeout)
        number, self._number = self._number, None
        if number is not None:
            signal.raise_signal(number)
        return is_taken

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class NothingHappens:
    """The progress of a query that has not begun."""

    def offsets(self):
        return 0


def test_a_signal_while_the_query_is_looked_at_ends_it(tmp_path, monkeypatch):
    def end(number, _):
        sys.exit(128 + number)

    def watch(driver):
        with driver:
            driver._process._waitpid_lock = LockWithSignal(signal.SIGTERM)
            driver.run(NothingHappens(), None, lambda offsets: None)

    job = tmp_path / "job.py"
    job.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(demo_query, "_JOB", job)
    monkeypatch.setattr(demo_query, "_SILENCE_SECONDS", 10)
    monkeypatch.setattr(demo_query, "_END_SECONDS", 5)
    usual = signal.signal(signal.SIGTERM, end)
    try:
        driver = Driver("sqlite://", tmp_path, 1, environment={}, log=tmp_path / "spark.log")
        with pytest.raises(SystemExit) as ended:
            watch(driver)
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert (ended.value.code, driver._process.returncode) == (128 + signal.SIGTERM, -signal.SIGKILL)


def test_the_header_of_the_columns_is_what_the_readme_says():
    assert ",".join(COLUMNS) == "InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"
