"""The sink's two halves without a Spark between them: tasks on the executors, the decision on the driver."""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest
from sqlalchemy import select

from tests.spark.sink_schemas import schema_of
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import transactions
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidConfiguration,
    InvalidRequest,
    InvalidTransactionTimeout,
    OutcomeUnknown,
    ProducerFenced,
    RecordTooLarge,
    StoreUnavailable,
    UnknownTopicOrPartition,
)
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, find_topics
from txnstore.model import IsolationLevel
from txnstore.spark import sink_task, sink_writer, stores
from txnstore.spark.sink_coordination import decide
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import run_of_query
from txnstore.spark.sink_writer import batch_writer, stream_writer
from txnstore.transactions import writers

SCHEMA = schema_of("key string, value string, topic string")
ARROW = pa.schema([("key", pa.string()), ("value", pa.string()), ("topic", pa.string())])


def rows(*values, topic="out", key=None):
    """Arrow batches as Spark hands them to a task, one for each argument or list of values."""
    for cells in values:
        texts = cells if isinstance(cells, list) else [cells]
        yield pa.RecordBatch.from_pydict(
            {"key": [key] * len(texts), "value": texts, "topic": [topic] * len(texts)}, schema=ARROW
        )


def visible(store, topic="out"):
    """What a read_committed reader sees of a topic, sorted."""
    return sorted(_read(store, topic, IsolationLevel.READ_COMMITTED))


def written(store, topic="out"):
    """What was ever written to a topic, sorted."""
    return sorted(_read(store, topic, IsolationLevel.READ_UNCOMMITTED))


def _read(store, topic, isolation):
    def work(connection):
        (found,) = find_topics(connection, [topic])
        pages = fetch(connection, dict.fromkeys(found.partition_ids, 0), isolation=isolation)
        return [
            (record.value or b"").decode()
            for page in pages.values()
            for batch in page.batches
            for record in batch.records()
        ]

    return store.read(work)


@dataclass
class Query:
    """A streaming query as Spark runs it, for a sink: tasks and driver share nothing but messages."""

    url: str
    query_id: str = "query-1"
    run_id: str = "run-1"
    options: dict[str, str] = field(default_factory=dict)
    patch: pytest.MonkeyPatch | None = None

    def writer(self):
        given = {"url": self.url, **self.options}
        return pickle.loads(pickle.dumps(stream_writer(given, SCHEMA, overwrite=False)))

    def task(self, batch_id, batches):
        properties = {
            "sql.streaming.queryId": self.query_id,
            "spark.jobGroup.id": self.run_id,
            "streaming.sql.batchId": str(batch_id),
        }
        context = SimpleNamespace(getLocalProperty=properties.get)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sink_writer, "TaskContext", SimpleNamespace(get=lambda: context))
            return pickle.loads(pickle.dumps(self.writer().write(iter(batches))))

    def commit(self, batch_id, messages):
        self.writer().commit(messages, batch_id)

    def abort(self, batch_id, messages):
        self.writer().abort(messages, batch_id)

    def run(self, batch_id, *tasks):
        self.commit(batch_id, [self.task(batch_id, task) for task in tasks])


@pytest.fixture
def opened_stores():
    """Stores that the sink opens are closed with the test."""
    yield
    while stores._stores:
        stores._stores.popitem()[1].close()


@pytest.fixture
def query(url, opened_stores):
    return Query(url)


@pytest.fixture
def out(url):
    """A store for looking, with the topic `out` of two partitions; by the server's clock, as Spark's processes."""
    from txnstore.db.opening import open_store

    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "out", partition_count=2))
        yield store


def test_records_of_all_tasks_are_there_once_the_driver_has_decided_and_not_before(query, out):
    messages = [query.task(0, rows("a", ["b", "c"])), query.task(0, rows("d"))]
    assert visible(out) == []
    query.commit(0, messages)
    assert visible(out) == ["a", "b", "c", "d"]
    query.run(1, rows("e"))
    assert visible(out) == ["a", "b", "c", "d", "e"]


def test_a_failed_attempt_leaves_nothing_and_its_repetition_counts(query, out, monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 1)

    def failing():
        yield from rows("a", "b", "c")
        raise RuntimeError("the task's own error")

    with pytest.raises(RuntimeError, match="the task's own error"):
        query.task(0, failing())
    assert written(out) != []
    query.run(0, rows("a", "b", "c"))
    assert visible(out) == ["a", "b", "c"]


def test_of_two_attempts_that_finish_the_one_that_spark_names_counts(query, out):
    query.task(0, rows("a"))
    named = query.task(0, rows("a"))
    query.task(0, rows("a"))
    query.commit(0, [named])
    assert visible(out) == ["a"]
    assert written(out) == ["a", "a", "a"]


def test_a_decided_batch_that_comes_again_is_drained_and_dropped(query, out, monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 1)
    query.run(0, rows("a"), rows("b"))
    for run_id in ("run-1", "run-2"):
        query.run_id = run_id
        again = rows("a", "b", "c", "d", "e")
        message = query.task(0, again)
        assert next(again, None) is None, "a stateful query needs its tasks to read everything"
        assert message.writer_id is None
        query.commit(0, [message, query.task(0, rows("b"))])
    assert written(out) == ["a", "b"]
    query.run(1, rows("c"))
    assert visible(out) == ["a", "b", "c"]


def test_a_batch_is_not_committed_without_a_task_that_was_told_that_it_is_decided(query, out):
    (topic,) = out.read(lambda connection: find_topics(connection, ["out"]))

    def note(begin, end):
        """Say what the batch reads, as one of its sources does."""
        note_inputs(out, [SinkInput(query.query_id, query.run_id, 0, "group", topic.partition_ids[0], begin, end)])

    note(0, 1)
    query.run(0, rows("a"))
    query.run_id = "run of an older checkpoint"
    of_another_source = query.task(0, rows("b"))
    note(1, 2)
    with pytest.raises(ProducerFenced, match="a task of batch 0 wrote nothing"):
        query.commit(0, [of_another_source, query.task(0, rows("c"))])
    assert visible(out) == ["a"]


def test_what_is_dropped_of_a_copied_checkpoint_is_a_warning_and_the_replay_of_a_restart_is_none(query, out, caplog):
    topic = out.write(lambda connection: create_topic(connection, "in"))

    def run(batch_id):
        (source,) = topic.partition_ids
        reads = SinkInput(query.query_id, query.run_id, batch_id, "group", source, batch_id, batch_id + 1)
        note_inputs(out, [reads])
        query.run(batch_id, rows(str(batch_id)))

    for batch_id in range(4):
        run(batch_id)
    query.run_id = "restarted"
    run(3)
    assert caplog.text == ""
    query.run_id = "another query, with a copy"
    run(1)
    (warning,) = caplog.messages
    told = r"batch 1 of query:query-1 is dropped as written already: batch 3 was decided at 20\d\d-.*'spark-query-"
    assert re.search(told, warning)
    assert "A restart repeats only the last batch, so its checkpoint is an older copy" in warning
    assert "a copied checkpoint is the same query" in warning
    assert visible(out) == ["0", "1", "2", "3"]


def test_a_new_run_takes_over_from_a_dead_one_that_had_not_decided(query, out):
    query.run(0, rows("a"))
    query.task(1, rows("b"))
    restarted = Query(query.url, run_id="run-2")
    restarted.run(1, rows("b"))
    assert visible(out) == ["a", "b"]
    assert written(out) == ["a", "b", "b"]


def test_two_runs_of_one_query_fence_each_other(query, out, monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 1)
    messages = [query.task(0, rows("a"))]
    newer = Query(query.url, run_id="run-2")

    def interrupted():
        yield from rows("b", "c")
        # Another driver has started meanwhile, and one of its tasks writes.
        newer.task(0, rows("a"))
        yield from rows("d", "e", "f")

    with pytest.raises(ProducerFenced):
        query.task(0, interrupted())
    with pytest.raises(ProducerFenced):
        query.commit(0, messages)
    with pytest.raises(ProducerFenced):
        query.task(0, rows("a"))
    query.abort(0, messages)
    assert visible(out) == []
    newer.run(0, rows("a"))
    assert visible(out) == ["a"]
    # The older driver wakes after the decision: its batch is recognised or its run refused; nothing is written.
    with contextlib.suppress(ProducerFenced):
        query.commit(0, messages)
    assert visible(out) == ["a"]


def test_abort_after_the_decision_harms_nothing(query, out):
    messages = [query.task(0, rows("a")), query.task(0, rows())]
    query.commit(0, messages)
    query.abort(0, messages)
    query.abort(0, [None, None])
    assert visible(out) == ["a"]
    Query(query.url, run_id="run-2").run(1, rows("b"))
    assert visible(out) == ["a", "b"]


def test_what_is_aborted_holds_nobody_back_and_may_be_written_again(query, out):
    messages = [query.task(0, rows("a")), None]
    Query(query.url, query_id="query-2").run(0, rows("z"))
    query.abort(0, messages)
    assert visible(out) == ["z"]
    # Spark has given the batch up, and one of its tasks did not know yet.
    with pytest.raises(ProducerFenced, match="is over"):
        query.task(0, rows("a"))
    assert visible(out) == ["z"]
    Query(query.url, run_id="run-2").run(0, rows("a"))
    assert visible(out) == ["a", "z"]


def test_an_abort_that_cannot_reach_the_database_hides_no_other_error(query, out, monkeypatch, caplog):
    message = query.task(0, rows("a"))

    def unreachable(*arguments, **keywords):
        raise OutcomeUnknown("gone")

    monkeypatch.setattr(sink_writer, "abort", unreachable)
    query.abort(0, [message])
    assert "could not be aborted (gone)" in caplog.text


def test_a_task_without_rows_writes_nothing_and_its_batch_counts(query, out):
    message = query.task(0, rows())
    assert message.writer_id is None
    query.commit(0, [message, query.task(0, iter([next(rows("a")).slice(0, 0)]))])
    assert written(out) == []
    query.run(0, rows("late"))
    assert written(out) == [], "batch 0 is decided: it had no records"
    query.run(1, rows("b"))
    assert visible(out) == ["b"]


def test_a_new_checkpoint_under_a_transactional_id_begins_anew_and_fences_the_old_query(url, out, opened_stores):
    old = Query(url, options={"transactional.id": "refunds"})
    old.run(0, rows("a"))
    pending = old.task(1, rows("b"))
    new = Query(url, query_id="query-2", run_id="run-9", options={"transactional.id": "refunds"})
    new.run(0, rows("c"))
    assert visible(out) == ["a", "c"]
    with pytest.raises(ProducerFenced):
        old.commit(1, [pending])
    assert visible(out) == ["a", "c"]


def test_topics_by_column_are_made_as_a_producer_makes_them(query, out):
    query.run(0, [*rows("a", topic="out"), *rows("b", topic="made")])
    assert visible(out) == ["a"]
    assert visible(out, "made") == ["b"]


def test_topics_are_not_made_if_they_are_not_to_be(query, out):
    query.options = {"allow.auto.create.topics": "false"}
    with pytest.raises(UnknownTopicOrPartition, match="there is no topic 'made'"):
        query.task(0, rows("b", topic="made"))
    assert out.read(lambda connection: find_topics(connection, ["made"])) == []


def test_a_record_that_is_too_large_is_named_by_its_row_and_nothing_is_visible(query, out, monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 2)
    with pytest.raises(RecordTooLarge, match=r"row 3 of the task .* topic out, 1048588") as caught:
        query.task(0, rows("a", ["b", "c"], "secret" * 300_000))
    assert "secret" not in str(caught.value)
    assert visible(out) == []


def test_no_database_transaction_is_open_while_rows_are_pulled(query, out, monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 1)

    def reading_the_same_file():
        for number, batch in enumerate(rows("a", "b", "c")):
            # One writer at a time: on SQLite this would wait for the task's own database transaction.
            out.write(lambda connection, n=number: create_topic(connection, f"other-{n}"), retry_timeout_ms=200)
            yield batch

    query.run(0, reading_the_same_file())
    assert visible(out) == ["a", "b", "c"]


def test_lost_answers_change_nothing(query, out, monkeypatch):
    """Every step is done, its answer lost, and done again."""
    monkeypatch.setattr(stores, "_PAUSE_FIRST_SECONDS", 0.0)
    lost = []

    def losing(step):
        def twice(*arguments, **keywords):
            result = step(*arguments, **keywords)
            if step not in lost:
                lost.append(step)
                raise OutcomeUnknown
            lost.remove(step)
            return result

        return twice

    for module, name in ((sink_task, "open_writer"), (sink_task, "append_as_writer"), (sink_writer, "decide")):
        monkeypatch.setattr(module, name, losing(getattr(module, name)))
    query.run(0, rows("a"), rows("b"))
    query.run(1, rows("c"))
    assert visible(out) == ["a", "b", "c"]
    assert lost == []


def test_an_append_of_many_batches_is_recognised_when_it_is_repeated(query, out, monkeypatch):
    """The log remembers the last five batches of a writer in each partition, and no more."""
    monkeypatch.setattr(stores, "_PAUSE_FIRST_SECONDS", 0.0)
    append = writers.append_as_writer

    def twice(*arguments, **keywords):
        append(*arguments, **keywords)
        return append(*arguments, **keywords)

    monkeypatch.setattr(sink_task, "append_as_writer", twice)
    query.options = {"batch.num.messages": "1"}
    texts = [f"{number:02}" for number in range(23)]
    query.run(0, rows(texts), rows(texts, key="k"))
    assert visible(out) == sorted(texts * 2)


def test_a_step_whose_outcome_stays_unknown_is_given_up_in_time(monkeypatch):
    tries = []

    def unknown(left_ms):
        tries.append(left_ms)
        raise OutcomeUnknown

    # Time passes in the pauses alone.
    pauses: list[float] = []
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    with pytest.raises(OutcomeUnknown):
        stores.repeat_while_unknown(unknown, 300)
    assert 2 <= len(tries) <= 3
    assert tries == sorted(tries, reverse=True)
    assert tries[0] <= 300


def test_a_process_that_has_nothing_open_yet_tries_the_database_for_as_long_as_each_step(monkeypatch):
    tried = []

    def away(*_, limits, **__):
        tried.append(limits.retry_timeout_ms)
        raise StoreUnavailable

    monkeypatch.setattr(stores, "open_store", away)
    url = "postgresql://u@127.0.0.1:1/nothing"
    query, job = Query(url, options={"message.timeout.ms": "200000"}), Job(url)
    message = sink_writer.SinkMessage(run_of_query("query", "run"), 0)
    for step in (lambda: query.task(0, rows("a")), lambda: query.commit(0, [message]), lambda: job.task(rows("a"))):
        with pytest.raises(StoreUnavailable):
            step()
    # Somebody waits for the error that led to it.
    query.abort(0, [message])
    job.copy().abort([])
    for found, wanted in zip(tried, (200_000, 200_000, 300_000, 5_000, 5_000), strict=True):
        assert wanted - 1_000 < found <= wanted


def test_a_store_that_was_opened_in_time_has_the_limits_of_all(query, out):
    query.run(0, rows("a"))
    (store,) = stores._stores.values()
    assert store.limits == out.limits


def test_messages_that_do_not_belong_together_decide_nothing(query, out):
    mine, other = query.task(0, rows("a")), query.task(1, rows("b"))
    for messages in ([], [mine, None], [mine, other]):
        with pytest.raises(InvalidRequest, match="nothing was decided"):
            query.commit(0, messages)
    assert visible(out) == []


def test_what_a_task_has_written_to_a_file_of_another_host_is_not_taken_for_written(tmp_path, opened_stores):
    here, there = (Query(f"sqlite:///{tmp_path / name}") for name in ("here.db", "there.db"))
    mine, other = here.task(0, rows("a")), there.task(0, rows("b"))
    assert mine.writer_id == other.writer_id, "as small numbers, given out in turn, often are"
    with pytest.raises(InvalidConfiguration, match="SQLite file serves one host"):
        here.commit(0, [mine, other])
    assert visible(stores.store_at(here.writer()._options.address)) == []
    here.commit(0, [mine, there.task(0, rows())])
    assert visible(stores.store_at(here.writer()._options.address)) == ["a"]


def test_a_task_of_nobody_is_refused(query):
    with pytest.raises(InvalidRequest, match="which query and which batch"):
        query.writer().write(rows("a"))


def test_rows_go_in_portions_that_one_database_transaction_takes(monkeypatch):
    monkeypatch.setattr(sink_task, "APPEND_BYTES", 1000)
    monkeypatch.setattr(sink_task, "APPEND_ROWS", 5)
    batches = list(rows(["x" * 300] * 40, [], ["y"] * 3, "z", "z", ["w" * 5000], "z"))
    chunks = list(sink_task._chunks(batches))
    assert pa.Table.from_batches(chunks) == pa.Table.from_batches(batches)
    assert all(chunk.num_rows > 0 for chunk in chunks)
    for chunk in chunks:
        assert chunk.num_rows == 1 or (chunk.num_rows <= 5 and chunk.nbytes <= 1100)
    assert len(chunks) <= 20


class Job:
    """A batch write as Spark runs it: one writer, copied to tasks and driver."""

    def __init__(self, url, **options):
        self.writer = batch_writer({"url": url, **options}, SCHEMA, overwrite=False)

    def copy(self):
        return pickle.loads(pickle.dumps(self.writer))

    def task(self, batches, query_id=None):
        """Write as a task does; `query_id`: within foreachBatch of a query."""
        context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": query_id}.get)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sink_writer, "TaskContext", SimpleNamespace(get=lambda: context))
            return pickle.loads(pickle.dumps(self.copy().write(iter(batches))))

    def run(self, *tasks, query_id=None):
        self.copy().commit([self.task(task, query_id) for task in tasks])


def test_a_batch_write_is_there_all_at_once_or_not_at_all(url, out, opened_stores):
    job = Job(url)
    messages = [job.task(rows("a")), job.task(rows("b"))]
    assert visible(out) == []
    job.copy().commit(messages)
    assert visible(out) == ["a", "b"]
    job.copy().abort(messages)
    assert visible(out) == ["a", "b"]

    failing = Job(url)
    failing.task(rows("c"))
    # No task has told anything; the job's own name is enough.
    failing.copy().abort([None, None])
    assert visible(out) == ["a", "b"]
    Job(url).run(rows("c"))
    assert visible(out) == ["a", "b", "c"]
    for late in (failing, job):
        with pytest.raises(ProducerFenced, match="is over"):
            late.task(rows("d"))
    Job(url).run(rows("e"))
    assert visible(out) == ["a", "b", "c", "e"]


@pytest.mark.parametrize("options", [{}, {"txnAppId": "load", "txnVersion": "1"}], ids=["unnamed", "named"])
def test_a_task_that_comes_after_its_job_was_given_up_holds_nobody_back(url, out, opened_stores, options):
    failed = Job(url, **options)
    failed.copy().abort([None, None])
    with pytest.raises(ProducerFenced, match="is over"):
        failed.task(rows("late"))
    Job(url, **options).run(rows("a"))
    assert visible(out) == ["a"]


def test_batch_writes_are_different_ones_unless_they_have_a_name(url, out, opened_stores):
    Job(url).run(rows("a"))
    Job(url).run(rows("a"))
    assert visible(out) == ["a", "a"]


def test_a_batch_write_with_a_version_happens_once(url, out, opened_stores):
    def job(version, app_id="app"):
        return Job(url, txnAppId=app_id, txnVersion=str(version))

    job(3).run(rows("a"))
    job(3).run(rows("a"))
    job(2).run(rows("late"))
    job(4).run(rows("b"))
    job(3, "other").run(rows("c"))
    assert visible(out) == written(out) == ["a", "b", "c"]


@pytest.mark.parametrize(("allowed_ms", "used_ms"), [(60_000, 60_000), (3_600_000, 900_000)])
def test_a_write_that_says_nothing_of_its_time_takes_no_more_than_the_store_allows(
    url, out, opened_stores, allowed_ms, used_ms
):
    longest = {"transaction.max.timeout.ms": str(allowed_ms)}
    out.write(lambda connection: change_store_settings(connection, longest))
    Job(url).run(rows("a"))
    assert visible(out) == ["a"]
    used = select(transactions.c.timeout_ms).distinct()
    assert out.read(lambda connection: connection.execute(used).scalars().all()) == [used_ms]
    with pytest.raises(InvalidTransactionTimeout):
        Job(url, **{"transaction.timeout.ms": str(allowed_ms + 1)}).task(rows("b"))


def test_an_older_version_is_dropped_with_a_warning_and_the_last_one_without(url, out, opened_stores, caplog):
    for version in (3, 4, 4):
        Job(url, txnAppId="app", txnVersion=str(version)).run(rows(str(version)))
    assert caplog.text == ""
    Job(url, txnAppId="app", txnVersion="3").run(rows("late"))
    assert visible(out) == ["3", "4"]
    (warning,) = caplog.messages
    told = r"batch 3 of app::app is dropped as written already: batch 4 was decided at 20\d\d-.*'spark-app-:app'"
    assert re.search(told, warning)
    assert "restart" not in warning


def test_a_batch_that_is_over_does_not_wait_long_for_what_is_told_of_it(url, out, opened_stores, monkeypatch, caplog):
    given = []

    def away(store, work, *, retry_timeout_ms=None):
        given.append(retry_timeout_ms)
        raise StoreUnavailable("the database is away")

    def decide_and_lose(*arguments, **options):
        decided = decide(*arguments, **options)
        monkeypatch.setattr(Store, "read", away)
        return decided

    Job(url, txnAppId="app", txnVersion="3").run(rows("a"))
    Job(url, txnAppId="app", txnVersion="4").run(rows("b"))
    replay = Job(url, txnAppId="app", txnVersion="3")
    message = replay.task(rows("a"))
    monkeypatch.setattr(sink_writer, "decide", decide_and_lose)
    replay.copy().commit([message])
    assert given == [5_000]
    assert caplog.text == ""


def test_an_older_version_of_another_query_is_neither_written_nor_dropped(url, out, opened_stores, caplog):
    """With a new checkpoint the batches of foreachBatch are numbered from 0 again."""

    def write(query_id, version, value):
        Job(url, txnAppId="app", txnVersion=str(version)).run(rows(value), query_id=query_id)

    for version in (0, 1, 2, 2):
        write("one", version, str(version))
    assert caplog.text == ""
    write("one", 1, "1")
    assert "batch 1 of app::app is dropped" in caplog.text
    for version in (0, 2):
        with pytest.raises(ProducerFenced, match=r"whether this query wrote it is not known .* a txnAppId of its own"):
            write("two", version, "new")
    write("two", 3, "3")
    write("two", 3, "3")
    # By hand it is one sequence of versions.
    write(None, 2, "2")
    with pytest.raises(ProducerFenced, match="version 3 of 'app::app' is not newer than 3"):
        write("one", 3, "new")
    assert visible(out) == written(out) == ["0", "1", "2", "3"]


def test_what_another_query_has_written_meanwhile_is_not_dropped_by_the_decision(url, out, opened_stores):
    late, first = (Job(url, txnAppId="app", txnVersion="0") for _ in range(2))
    # An empty task asks nothing.
    message = late.task([], "two")
    first.run(rows("a"), query_id="one")
    with pytest.raises(ProducerFenced, match="whether this query wrote it is not known"):
        late.copy().commit([message])
    assert visible(out) == ["a"]


def test_a_query_whose_version_is_no_longer_remembered_is_not_told_that_it_is_new(url, out, opened_stores):
    """Its checkpoint may be an older copy: under another txnAppId it would write everything again."""
    for version in (0, 50, 51, 150):
        Job(url, txnAppId="app", txnVersion=str(version)).run(rows(str(version)), query_id="one")
    Job(url, txnAppId="app", txnVersion="51").run(rows("again"), query_id="one")
    for version in (0, 50):
        with pytest.raises(ProducerFenced, match=r"\(the last 100 numbers are .* older copy .* do not change txnAppId"):
            Job(url, txnAppId="app", txnVersion=str(version)).run(rows("again"), query_id="one")
    assert visible(out) == written(out) == sorted(["0", "50", "51", "150"])


def test_a_version_that_was_written_by_hand_is_refused_to_the_query_that_comes_to_it(url, out, opened_stores):
    Job(url, txnAppId="app", txnVersion="6").run(rows("6"), query_id="one")
    Job(url, txnAppId="app", txnVersion="7").run(rows("7"))
    with pytest.raises(ProducerFenced, match=r"version 7 .* written by hand is skipped by hand"):
        Job(url, txnAppId="app", txnVersion="7").run(rows("7"), query_id="one")
    # Skipped by hand it goes on.
    Job(url, txnAppId="app", txnVersion="8").run(rows("8"), query_id="one")
    assert visible(out) == written(out) == ["6", "7", "8"]


def test_a_version_is_written_once_to_each_topic(url, out, opened_stores):
    for topic in ("left", "right", "left"):
        Job(url, topic=topic, txnAppId="app", txnVersion="3").run(rows(topic))
    longest = {"topic": "t" * 249, "txnAppId": "a" * 700}
    Job(url, **longest, txnVersion="3").run(rows("long"))
    assert [visible(out, topic) for topic in ("left", "right", "t" * 249)] == [["left"], ["right"], ["long"]]


def test_of_two_jobs_that_write_the_same_version_one_wins(url, out, opened_stores):
    first, second = (Job(url, txnAppId="app", txnVersion="1") for _ in range(2))
    message = first.task(rows("a"))
    second.run(rows("a"))
    with pytest.raises(ProducerFenced):
        first.task(rows("a")) and first.copy().commit([message])
    with contextlib.suppress(ProducerFenced):
        first.copy().commit([message])
    assert visible(out) == ["a"]
