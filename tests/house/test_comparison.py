"""The comparison with Kafka: every subject has its figures and floors on both databases; their size is not tested."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scripts import bench_kafka
from scripts.bench_kafka import SUBJECTS, arguments, measure
from scripts.comparison import floors as raw
from scripts.comparison.figures import Figure, Row, markdown, rows_of
from scripts.comparison.raw_clients import Member, Reader, sender
from scripts.comparison.sides import ANSWER_TIMEOUT_SECONDS, KAFKA, OURS, POSTGRESQL, SQLITE, Side, checked
from scripts.comparison.wakeups import wakeups
from tests.tools.readmes import TOP, block_of

TINY = (
    "--rounds 1 --records 1500 --seconds 0.05 --processes 2 --idle 1 --members 2 --delays 2 --transactions 20"
    " --starts 1"
)
#: How many figures a subject has with these options, and floors of some that both databases have.
FIGURES = {
    "bulk": (5, {"produce() with delivery reports": {"the same batches by the raw driver", "a list in Python"}}),
    "partition": (3, {}),
    "small": (6, {"one record and an offset a transaction, 2 at once": {"plain statements"}}),
    "pipelined": (4, {"one record a transaction, not waited for, 2 at once": {"plain statements"}}),
    "server": (6, {}),
    "delay": (
        2,
        {f"produce() to poll() elsewhere{how}, median": set[str]() for how in ("", ", in a transaction")},
    ),
    "idle": (
        2,
        {
            "a producer beside 1 idle consumers of another topic": {"the same by the raw driver"},
            "each of 1 idle consumers": {"the same by the raw driver"},
        },
    ),
    "group": (
        3,
        {
            f"2 members of a group: {what}": {"the same by the raw driver"}
            for what in ("until all are assigned", "each, idle", "until all are closed")
        },
    ),
    "start": (1, {"start of a process to its first record": {"a row by the raw driver"}}),
}


def side_of(url: str) -> Side:
    return Side(SQLITE if url.startswith("sqlite:") else POSTGRESQL, OURS, url)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_subject_has_its_figures_and_floors(url: str, subject: str) -> None:
    side = side_of(url)
    rows, failed = measure([side], arguments().parse_args([*TINY.split(), "--only", subject]))
    assert not failed
    count, floors = FIGURES[subject]
    if subject == "server" and side.name == SQLITE:
        count = 0
    if subject == "start" and side.name == SQLITE:
        count += 1
    assert len({row.what for row in rows}) == count
    assert all(row.median >= 0 and row.subject == subject for row in rows)
    for what, names in floors.items():
        wanted = names if subject != "delay" else set(wakeups(side))
        assert wanted <= {row.floor for row in rows if row.what == what}
        [own] = [row for row in rows if row.what == what and not row.floor]
        # Idle members of a group may not have been given a core at all in the short time that they are watched.
        assert own.share is not None or (subject == "group" and own.median == 0)
    if subject == "server" and side.name == POSTGRESQL:
        check_costs_of_transactions({row.what: row.median for row in rows if not row.floor})


def check_costs_of_transactions(found: dict[str, float]) -> None:
    for offset in ("", " and an offset", " and a member's offset"):
        assert found[f"one record{offset} a transaction: write-ahead log"] > 500
        # Sessions tell of theirs late, and others work in the same server: as many as asked for, roughly.
        assert found[f"one record{offset} a transaction: database transactions"] > 0.5


@pytest.mark.parametrize("in_transactions", [False, True])
def test_a_raw_reader_hears_of_each_record_by_every_wakeup(url: str, in_transactions: bool) -> None:
    side = side_of(url)
    for way in wakeups(side):
        raw.make_tables(side)
        sending = sender(side, way, in_transactions=in_transactions)
        with closing(Reader(side, 0, way)) as reader, closing(Reader(side, 1, way)) as idle, sending as send:
            found = []
            for values in ("1", "2", "34"):
                for value in values:
                    send(value)
                found += [checked(reader.poll(ANSWER_TIMEOUT_SECONDS)).decode() for _ in values]
            assert found == ["1", "2", "3", "4"]
            send("5")
            # What wakes it may come with the answer to a statement.
            reader._connection.execute("SELECT 1").fetchall()
            assert checked(reader.poll(ANSWER_TIMEOUT_SECONDS)) == b"5"
            assert idle.poll(0) is None


def test_a_raw_reader_that_is_woken_for_nothing_all_the_time_returns_when_its_time_is_over(url: str) -> None:
    class OthersCommit:
        woken_count = 0

        def wait(self, seconds: float) -> bool:
            self.woken_count += 1
            assert self.woken_count < 20, "it does not look at the time"
            return True

        def close(self) -> None: ...

    side = side_of(url)
    raw.make_tables(side)
    with closing(Reader(side, 0, next(iter(wakeups(side))))) as reader:
        reader._wakeup.close()
        reader._wakeup = OthersCommit()
        assert reader.poll(0.002) is None


def test_raw_members_have_what_they_wait_for_when_all_have_joined(url: str) -> None:
    side = side_of(url)
    raw.make_tables(side)
    raw.make_group(side, "group")
    first, second = Member(side, "group", 2), Member(side, "group", 2)
    first.subscribe([])
    first.poll(0)
    assert not first.assignment()
    second.subscribe([])
    first.poll(ANSWER_TIMEOUT_SECONDS)
    assert first.assignment() == second.assignment() == ["group"]
    first.close()
    second.poll(ANSWER_TIMEOUT_SECONDS)
    assert not second.assignment()
    second.close()


@pytest.mark.parametrize("fails", [True, False])
def test_what_fails_is_named_and_the_rest_is_measured(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Needs no database: the subjects are made up."""

    def first(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
        yield Figure("before", "things/s", 1)
        if fails and rounds.pop():
            raise OSError("the disk is full")
        yield Figure("behind", "things/s", 2)

    def second(side: Side, options: argparse.Namespace) -> Iterator[Figure]:
        yield Figure("beside", "things/s", 3)

    rounds = [False, True]
    monkeypatch.setattr(bench_kafka, "SUBJECTS", {"first": first, "second": second})
    monkeypatch.setattr("sys.argv", ["bench-kafka", "--without-kafka", "--database", "sqlite", "--rounds", "2"])
    assert bench_kafka.main() == int(fails)
    output = capsys.readouterr()
    told = [line for line in output.err.splitlines() if line.startswith("failed:")]
    assert told == (["failed: round 1 of 2: first, SQLite"] if fails else [])
    assert all(what in output.out for what in ("before", "behind", "beside"))


def figures(*values: float, floor: float = 0) -> list[Figure]:
    return [
        Figure("work", "things/s", value, reach=2.0, floors={"raw": floor} if floor else {}, share=0.5)
        for value in values
    ]


def test_medians_are_compared_with_kafkas_and_with_the_floor() -> None:
    rows = rows_of({"work": {KAFKA: figures(100, 90, 500), SQLITE: figures(250, 200, 10, floor=300)}})
    kafka, own, floor = rows
    assert (kafka.median, kafka.smallest, kafka.largest, kafka.ratio) == (100, 90, 500, None)
    assert (own.median, own.ratio, own.reached) == (200, 2.0, True)
    assert own.share == pytest.approx(2 / 3)
    assert (floor.floor, floor.median, floor.ratio) == ("raw", 300, None)


@pytest.mark.parametrize(("value", "floor"), [(190, 300), (250, 600)])
def test_what_is_below_kafkas_or_too_far_from_its_floor_is_not_reached(value: float, floor: float) -> None:
    rows = rows_of({"work": {KAFKA: figures(100), POSTGRESQL: figures(value, floor=floor)}})
    assert [row.reached for row in rows] == [True, False, True]
    assert "**no**" in markdown(rows, [KAFKA, POSTGRESQL])


def test_less_is_better_where_it_is_no_rate() -> None:
    def taken(value: float) -> list[Figure]:
        return [Figure("work", "s", value, is_rate=False, reach=0.3, is_compared=False, floors={"raw": 0.1})]

    rows = rows_of({"work": {SQLITE: taken(0.2), POSTGRESQL: taken(0.4)}})
    assert [(row.side, row.share, row.reached) for row in rows if not row.floor] == [
        (SQLITE, 0.5, True),
        (POSTGRESQL, 0.25, False),
    ]


def test_a_figure_is_measured_by_the_best_floor_or_by_the_one_that_it_names() -> None:
    def rows(floor: str) -> list[Row]:
        return rows_of({"work": {SQLITE: [Figure("work", "things/s", 50, floors={"a": 100, "b": 200}, floor=floor)]}})

    assert [row.share for row in rows("")] == [0.25, None, None]
    assert [row.share for row in rows("a")] == [0.5, None, None]
    assert [[row.counts for row in rows(floor)] for floor in ("", "a")] == [[True, False, True], [True, True, False]]


def test_the_command_of_the_readme_is_one_that_it_takes() -> None:
    (words,) = block_of(__file__, "Beside Kafka", "sh").commands
    options = arguments().parse_args(words[1:])
    assert (words[0], options.rounds, options.plot) == ("scripts/bench-kafka", 3, Path("scripts/figures"))
    assert (TOP / options.plot).is_dir()


def test_the_table_has_a_line_for_a_figure_and_one_for_each_floor() -> None:
    rows = rows_of({"work": {KAFKA: figures(100), SQLITE: figures(150, 250, floor=300)}})
    lines = markdown(rows, [KAFKA, SQLITE]).splitlines()
    assert lines[2:] == [
        "| work, things/s | 100 | 200 [150 to 250] (2.00 x, 0.67 of floor) | >= 2 x Kafka, >= 0.5 of its floor |",
        "| - floor: raw |  | 300 [300 to 300] |  |",
    ]
