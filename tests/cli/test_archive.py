"""`txnstore export` and `txnstore load`: what they say, take and refuse; what they do is tested in tests/moving."""

from __future__ import annotations

import errno
import os
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from txnstore import KafkaError, KafkaException, Producer, moving
from txnstore.moving import loading


@pytest.fixture
def filled(done, url):
    done("topics", "create", "orders", "--partitions", "2")
    done("produce", "orders", "-p", "0", stdin=b"a\nb\nc\n")
    return url


@pytest.mark.slow
def test_a_topic_goes_into_a_file_and_back(run, filled, tmp_path):
    path = tmp_path / "orders.parquet"
    ended = run("export", "orders", "--parquet", path, "--from", 1, "--until", 3, "--compression", "none")
    assert ended == (0, "orders-0: offsets 1 to 2\norders-1: nothing\n", f"2 records were written to {path}\n")
    assert pq.read_table(path).column("value").to_pylist() == [b"b", b"c"]
    ended = run("export", "orders", "--parquet", path)
    assert (ended.code, ended.err) == (1, f"txnstore: {path}: this file is there already; --force replaces it\n")
    assert run("export", "orders", "--parquet", path, "--force", "-p", "0", "--since", "1d").code == 0
    assert run("load", path, "--topic", "again").err == "3 records were written to again\n"
    assert run("load", path, "--topic", "again").err == "0 records were written to again; 3 by earlier calls\n"
    assert run("consume", "again").out == "a\nb\nc\n"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "folder"])
def test_what_is_no_regular_file_is_not_replaced(run, filled, tmp_path, kind):
    path, target = tmp_path / "there", tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
        if kind == "link":
            target.write_text("mine")
    before = path.lstat()
    for force in ["--force"], []:
        ended = run("export", "orders", "--parquet", path, *force)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err == f"txnstore: {path}: this is there, and not a regular file\n"
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert not target.exists() or target.read_text() == "mine"
    assert list(tmp_path.glob(".*.part")) == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_a_file_that_appears_meanwhile_is_replaced_only_if_that_was_asked_for(
    run, filled, tmp_path, monkeypatch, has_links, force
):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no links here")

    class Noticing(pq.ParquetWriter):
        def close(self):
            super().close()
            path.write_text("mine")

    path = tmp_path / "orders.parquet"
    if not has_links:
        monkeypatch.setattr("pathlib.Path.hardlink_to", refuse)
        assert run("export", "orders", "--parquet", tmp_path / "other.parquet").code == 0
        assert pq.read_table(tmp_path / "other.parquet").num_rows == 3
    monkeypatch.setattr(pq, "ParquetWriter", Noticing)
    ended = run("export", "orders", "--parquet", path, *(["--force"] if force else []))
    assert ended.code == (0 if force else 1)
    if not force:
        assert ended.err == f"txnstore: {path}: this file is there already; --force replaces it\n"
        assert path.read_text() == "mine"
    assert list(tmp_path.glob(".*.part")) == []


@pytest.mark.slow
def test_a_new_topic_that_keeps_old_records_for_ever_is_told_of(run, filled, tmp_path):
    path = tmp_path / "old.parquet"
    with Producer({"bootstrap.servers": filled}) as producer:
        producer.produce("old", b"v", timestamp=1)
    run("export", "old", "--parquet", path)
    told = "again was made with retention.ms=-1: some records are older than 7 d, the retention.ms of the archive\n"
    assert run("load", path, "--topic", "again") == (0, "", f"1 record was written to again\n{told}")
    assert run("load", path, "--topic", "again").err == "0 records were written to again; 1 by earlier calls\n"
    ended = run("load", path)
    assert (ended.code, "txnstore topics alter old --config retention.ms=-1" in ended.err) == (1, True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [KeyboardInterrupt(), KafkaException(KafkaError(KafkaError._TRANSPORT))])
def test_a_load_that_is_broken_off_says_as_well_what_its_new_topic_keeps(run, filled, tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    path = tmp_path / "old.parquet"
    with Producer({"bootstrap.servers": filled}) as producer:
        producer.produce("old", b"v", timestamp=1)
    run("export", "old", "--parquet", path)
    monkeypatch.setattr(loading._Loading, "load", fail)
    ended = run("load", path, "--topic", "again")
    assert ended.code != 0
    assert "again was made with retention.ms=-1: some records are older than 7 d" in ended.err


@pytest.mark.slow
def test_a_new_topic_whose_size_is_not_limited_any_more_is_told_of(run, done, filled, tmp_path):
    path = tmp_path / "sized.parquet"
    done("topics", "create", "sized", "--config", "retention.bytes=1000")
    done("produce", "sized", stdin=b"a\n")
    done("export", "sized", "--parquet", path)
    told = "its records may take more than 1000 bytes, the retention.bytes of the archive"
    ended = run("load", path, "--topic", "again")
    assert ended == (0, "", f"1 record was written to again\nagain was made with retention.bytes=-1: {told}\n")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("limit", "is_old"), [("before", True), ("after", False)])
def test_who_loads_timestamps_that_the_topic_refuses_is_told_what_lets_them_in(
    run, done, filled, tmp_path, limit, is_old
):
    path, name = tmp_path / "times.parquet", f"message.timestamp.{limit}.max.ms"
    done(
        "topics", "create", "times", "--config", "retention.ms=-1", "--config", "message.timestamp.after.max.ms=7200000"
    )
    at_ms = int(time.time() * 1000) + (-3_600_000 if is_old else 3_600_000)
    with Producer({"bootstrap.servers": filled}) as producer:
        producer.produce("times", b"v", timestamp=at_ms)
    done("topics", "alter", "times", "--config", f"{name}=1000")
    done("export", "times", "--parquet", path)
    ended = run("load", path, "--topic", "again")
    _, command = ended.err.split("; after `")
    command, way_on = command.split("` ")
    assert (ended.code, way_on) == (1, "the same command goes on\n")
    done(*command.split()[1:])
    assert run("load", path, "--topic", "again").err == "1 record was written to again\n"


def test_who_loads_what_is_too_large_for_its_topic_is_told_what_lets_it_in(run, done, filled, tmp_path):
    path = tmp_path / "large.parquet"
    done("topics", "create", "large", "--config", "retention.ms=-1")
    done("produce", "large", stdin=b"a" * 2_000 + b"\n")
    done("export", "large", "--parquet", path)
    done("topics", "alter", "large", "--config", "max.message.bytes=1000")
    ended = run("load", path)
    told = "; after `txnstore topics alter large --config max.message.bytes=2147483647` the same command goes on\n"
    assert (ended.code, ended.err.endswith(told)) == (1, True), ended
    done("topics", "alter", "large", "--config", "max.message.bytes=2147483647")
    assert run("load", path).err == "1 record was written to large\n"


def test_the_same_command_goes_on_at_once_only_if_it_may_get_further(run, done, filled, tmp_path, monkeypatch):
    path = tmp_path / "orders.parquet"
    done("export", "orders", "--parquet", path)
    done("topics", "create", "keyed", "--partitions", "2", "--config", "cleanup.policy=compact")
    ended = run("load", path, "--topic", "keyed")
    assert (ended.code, ended.err.endswith("; once that is put right, the same command goes on\n")) == (1, True)

    def fail(*_, **__):
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, "no server", retriable=True))

    monkeypatch.setattr(loading, "load", fail)
    ended = run("load", path, "--topic", "again")
    assert (ended.code, ended.err) == (75, "txnstore: no server; the same command goes on\n")


def test_what_cannot_be_done_is_said_in_one_line(run, filled, tmp_path, monkeypatch):
    path = tmp_path / "orders.parquet"
    for arguments, code, told in (
        (("export", "none", "--parquet", path), 1, "none"),
        (("export", "orders", "--parquet", tmp_path / "no" / "such"), 1, "No such file"),
        (("export", "orders", "--parquet", path, "--compression", "rar"), 2, "--compression"),
        (("export", "orders", "--parquet", path, "--since", "soon"), 2, "not a time"),
        (("export", "orders", "--parquet", path, "--from", 3, "--until", 2), 2, "2 is before --from 3"),
        (
            ("export", "orders", "--parquet", path, "--since", "2026-02-01", "--before", "2026-01-01"),
            2,
            "2026-01-01 is before --since 2026-02-01",
        ),
        (("load", path), 1, "No such file"),
    ):
        ended = run(*arguments)
        assert (ended.code, told in ended.err) == (code, True), ended
    assert list(tmp_path.glob("*.parquet")) == []


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("pyarrow", "pip install 'txnstore[parquet]'"),
        ("pyarrow.parquet", "it cannot be used: import of pyarrow.parquet"),
    ],
)
def test_why_there_are_no_archives_is_told(run, filled, tmp_path, monkeypatch, missing, told):
    path = tmp_path / "orders.parquet"
    for name in ("archive_files", "archiving", "loading"):
        monkeypatch.delitem(sys.modules, f"txnstore.moving.{name}", raising=False)
        monkeypatch.delattr(moving, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing != "pyarrow":
        monkeypatch.delattr(pa, "parquet")
    for arguments in (("export", "orders", "--parquet", path), ("load", path)):
        ended = run(*arguments)
        assert (ended.code, told in ended.err, ended.err.count("\n")) == (1, True, 1), ended
