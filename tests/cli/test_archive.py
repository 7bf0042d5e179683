"""`txnstore export` and `txnstore load`: what they say, take and refuse; what they do is tested in tests/moving."""

from __future__ import annotations

import sys

import pyarrow.parquet as pq
import pytest

from txnstore import moving


@pytest.fixture
def filled(done, url):
    done("topics", "create", "orders", "--partitions", "2")
    done("produce", "orders", "-p", "0", stdin=b"a\nb\nc\n")
    return url


def test_a_topic_goes_into_a_file_and_back(run, filled, tmp_path):
    path = tmp_path / "orders.parquet"
    ended = run("export", "orders", "--parquet", path, "--from", 1, "--until", 3, "--compression", "none")
    assert ended == (0, "orders-0: offsets 1 to 2\norders-1: nothing\n", f"2 records were written to {path}\n")
    assert pq.read_table(path).column("value").to_pylist() == [b"b", b"c"]
    ended = run("export", "orders", "--parquet", path)
    assert (ended.code, ended.err) == (1, f"txnstore: {path} is there already; --force replaces it\n")
    assert run("export", "orders", "--parquet", path, "--force", "-p", "0", "--since", "1d").code == 0
    assert run("load", path, "--topic", "again").err == "3 records were written to again\n"
    assert run("load", path, "--topic", "again").err == "0 records were written to again; 3 by earlier calls\n"
    assert run("consume", "again").out == "a\nb\nc\n"


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
    for name in ("archiving", "loading"):
        monkeypatch.setitem(sys.modules, f"txnstore.moving.{name}", None)
        monkeypatch.delattr(moving, name, raising=False)
    for arguments in (("export", "orders", "--parquet", path), ("load", path)):
        ended = run(*arguments)
        assert (ended.code, "pip install 'txnstore[parquet]'" in ended.err) == (1, True)
