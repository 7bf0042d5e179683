"""Growth and delays: curves have all their points on both databases, and drawings change only with the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import bench_growth, bench_open
from scripts.comparison.figures import Figure, rows_of
from scripts.comparison.sides import KAFKA, OURS, POSTGRESQL, SQLITE, Side


def side_of(url: str) -> Side:
    return Side(SQLITE if url.startswith("sqlite:") else POSTGRESQL, OURS, url)


@pytest.mark.slow
def test_each_thing_that_grows_has_all_figures_at_all_sizes(url: str, tmp_path: Path) -> None:
    tiny = "--records 50 100 --partitions 1 2 --open 1 2 --records-measured 20 --seconds 0.01"
    points = bench_growth.grow([side_of(url)], bench_growth.arguments().parse_args(tiny.split()))
    whats = (bench_growth.PRODUCE, bench_growth.POLL, bench_growth.TRANSACT)
    assert [(point.grows, point.size, point.what) for point in points] == [
        (grows, size, what)
        for grows, sizes in (
            ("records in the store", (50, 100)),
            ("partitions of the topic", (1, 2)),
            ("open transactions", (1, 2)),
        )
        for size in sizes
        for what in whats
    ]
    bench_growth.draw(points, tmp_path / "drawings")
    assert sorted(file.name for file in (tmp_path / "drawings").iterdir()) == [
        "growth-open.svg",
        "growth-partitions.svg",
        "growth-records.svg",
    ]


@pytest.mark.slow
def test_records_beside_an_open_transaction_wait_for_it_in_offset_order(url: str, tmp_path: Path) -> None:
    found = bench_open.run([side_of(url)], bench_open.arguments().parse_args(["--seconds", "0.3"]))
    assert [(each.order, each.is_open) for each in found] == [
        (order, is_open) for order in (bench_open.OFFSET, bench_open.COMMIT) for is_open in (False, True)
    ]
    assert all(each.by_seconds for each in found)
    _, waited_ms = found[1].by_seconds[0]
    assert waited_ms >= 300
    bench_open.draw(found, tmp_path)
    assert [file.name for file in tmp_path.glob("*.svg")] == ["open.svg"]


@pytest.mark.slow
def test_drawings_change_only_with_the_figures(tmp_path: Path) -> None:
    # Brings matplotlib along, which each process of the tests would import.
    from scripts.comparison.plots import draw_rows

    def figure(value: float, floors: dict[str, float]) -> Figure:
        return Figure("work", "things/s", value, floors=floors, subject="small")

    def drawn(value: float) -> bytes:
        ours = [figure(value, {"raw": 300}), figure(120, {"raw": 310})]
        rounds = {"work": {KAFKA: [figure(100, {})], SQLITE: ours}}
        [file] = draw_rows(rows_of(rounds), tmp_path)
        return file.read_bytes()

    first = drawn(110)
    assert (first == drawn(110), first == drawn(130)) == (True, False)
    assert b"floor" in first
