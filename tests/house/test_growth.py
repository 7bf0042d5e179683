"""Growth: the curves have all their points on both databases, and drawings change only with the figures."""

from __future__ import annotations

from pathlib import Path

from scripts import bench_growth
from scripts.comparison.figures import Figure, rows_of
from scripts.comparison.plots import draw_rows
from scripts.comparison.sides import KAFKA, OURS, POSTGRESQL, SQLITE, Side


def side_of(url: str) -> Side:
    return Side(SQLITE if url.startswith("sqlite:") else POSTGRESQL, OURS, url)


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


def test_drawings_change_only_with_the_figures(tmp_path: Path) -> None:
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
