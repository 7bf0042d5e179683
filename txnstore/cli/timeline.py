"""The command that draws a partition: a line for each transaction, a column for each offset."""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from xml.sax.saxutils import escape

import typer
from rich.console import Console
from rich.text import Text
from sqlalchemy import Connection, bindparam, func, select, union

from txnstore.cli.options import Json, PartitionShown, Schema, Url, complete_topic, examples, opened, partition_shown
from txnstore.cli.output import CommandFailed, printable, say, show_json, tell_and_exit
from txnstore.clients.brokers import at_leader_of
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import finished_transactions, group_offsets, record_batches, transaction_log
from txnstore.db.statements import are_among
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import IN_RANGE
from txnstore.log.topics import get_topic
from txnstore.model import INTERNAL_GROUP_PREFIX, ControlType

#: More offsets than this do not make a drawing any more.
OFFSETS_MAX: Final = 2_000

_BATCHES: Final = (
    select(
        record_batches.c.base_offset,
        record_batches.c.last_offset,
        record_batches.c.producer_id,
        record_batches.c.producer_epoch,
        record_batches.c.is_transactional,
    )
    .where(IN_RANGE, record_batches.c.control_type.is_(None))
    .order_by(record_batches.c.last_offset)
)
_OF_PARTITION: Final = finished_transactions.c.partition_id == bindparam("of_partition_id")
# Those that end in the stretch, and those that the batches belong to, wherever they end.
_FINISHED: Final = union(
    select(finished_transactions).where(
        _OF_PARTITION, finished_transactions.c.marker_offset.between(bindparam("from_offset"), bindparam("end_offset"))
    ),
    select(finished_transactions).where(
        _OF_PARTITION,
        are_among("producers", finished_transactions.c.producer_id, finished_transactions.c.producer_epoch),
    ),
)
_GROUPS: Final = (
    select(group_offsets.c.group_id, group_offsets.c.committed_offset, group_offsets.c.offset_in_transaction)
    .where(group_offsets.c.partition_id == bindparam("of_partition_id"))
    .where(func.substr(group_offsets.c.group_id, 1, len(INTERNAL_GROUP_PREFIX)) != INTERNAL_GROUP_PREFIX)
    .order_by(group_offsets.c.group_id)
)
# The journal remembers which transactional id a producer id belonged to.
_NAMES: Final = (
    select(transaction_log.c.producer_id, transaction_log.c.transactional_id)
    .where(transaction_log.c.producer_id.in_(bindparam("producer_ids", expanding=True)))
    .distinct()
)


class Mark(enum.Enum):
    """What stands at an offset."""

    RECORD = "record"
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    COMMIT = "COMMIT marker"
    ABORT = "ABORT marker"


@dataclass(slots=True)
class TimelineLane:
    """The records of one transaction and its marker; or all those without one."""

    name: str
    outcome: str
    marks: dict[int, Mark] = field(default_factory=dict)
    producer_id: int | None = None


@dataclass(frozen=True, slots=True)
class Pointer:
    """A position that has a name."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A stretch of a partition's log."""

    topic: str
    partition: int
    partition_id: int
    first_offset: int
    end_offset: int
    """The offset after the last one that is shown."""

    lanes: list[TimelineLane]
    pointers: list[Pointer]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "first_offset": self.first_offset,
            "end_offset": self.end_offset,
            "lanes": [
                {
                    "name": lane.name,
                    "outcome": lane.outcome,
                    "marks": [{"offset": offset, "mark": mark.value} for offset, mark in sorted(lane.marks.items())],
                }
                for lane in self.lanes
            ],
            "pointers": [{"name": pointer.name, "offset": pointer.offset} for pointer in self.pointers],
        }


def read_timeline(
    connection: Connection, topic: str, partition: int, *, from_offset: int | None, count: int
) -> Timeline:
    """Return `count` offsets of the partition from `from_offset` on, or the last ones; `add_names` adds the rest.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
    """
    partition_id = get_topic(connection, topic).partition_id(partition)
    bounds = read_bounds(connection, [partition_id])[partition_id]
    high_watermark = bounds.high_watermark
    first = high_watermark - count if from_offset is None else min(from_offset, high_watermark)
    first = max(first, bounds.log_start_offset)
    end = min(first + count, high_watermark)
    pointers = [
        Pointer("log start", bounds.log_start_offset),
        Pointer("last stable offset", bounds.last_stable_offset),
        Pointer("high watermark", high_watermark),
    ]
    lanes = _lanes(connection, partition_id, first, end)
    return Timeline(topic, partition, partition_id, first, end, lanes, pointers)


def add_names(cluster: Cluster, timeline: Timeline, left_out: LeftOut) -> None:
    """Add what each database knows of the groups and transactional ids that it coordinates.

    Of a database that is left out nothing is said.

    Raises:
        TxnStoreError: the only database is away, or refuses.
    """
    producer_ids = {lane.producer_id for lane in timeline.lanes if lane.producer_id is not None}
    groups: list[Any] = []
    names: dict[int, str] = {}

    def read(connection: Connection) -> tuple[Sequence[Any], dict[int, str]]:
        return connection.execute(_GROUPS, _of(timeline.partition_id)).all(), _names(connection, producer_ids)

    for _, (groups_there, names_there) in cluster.read_all(read, left_out):
        groups += groups_there
        names |= names_there
    timeline.pointers.extend(_group_pointer(*row) for row in sorted(groups))
    for lane in timeline.lanes:
        if lane.producer_id in names:
            lane.name = f"{names[lane.producer_id]} {lane.name}"


def _group_pointer(group_id: str, offset: int, offset_in_transaction: int | None) -> Pointer:
    """Return where the group is: in commit order at a place, and where in the transaction there."""
    within = f" from {offset_in_transaction} on" if offset_in_transaction else ""
    return Pointer(f"group {group_id}{within}", offset)


def _of(partition_id: int) -> dict[str, int]:
    return {"of_partition_id": partition_id}


def _lanes(connection: Connection, partition_id: int, first: int, end: int) -> list[TimelineLane]:
    stretch = {**_of(partition_id), "from_offset": first, "end_offset": end}
    batches = connection.execute(_BATCHES, stretch).all()
    producers = sorted({(row.producer_id, row.producer_epoch) for row in batches if row.is_transactional})
    rows = connection.execute(_FINISHED, {**stretch, "producers": producers}).all()
    finished = {(row.producer_id, row.producer_epoch): row for row in rows}
    plain = TimelineLane("no transaction", "")
    lanes: dict[tuple[int, int], TimelineLane] = {}
    for row in batches:
        offsets = range(max(row.base_offset, first), min(row.last_offset + 1, end))
        if not row.is_transactional:
            plain.marks.update(dict.fromkeys(offsets, Mark.RECORD))
            continue
        key = (row.producer_id, row.producer_epoch)
        ended = finished.get(key)
        lane = _lane_of(lanes, key, None if ended is None else ControlType(ended.outcome))
        lane.marks.update(dict.fromkeys(offsets, Mark(lane.outcome)))
    for key, row in finished.items():
        if first <= row.marker_offset < end:
            outcome = ControlType(row.outcome)
            mark = Mark.COMMIT if outcome is ControlType.COMMIT else Mark.ABORT
            _lane_of(lanes, key, outcome).marks[row.marker_offset] = mark
    ordered = sorted(lanes.values(), key=lambda lane: min(lane.marks))
    return [*([plain] if plain.marks else []), *ordered]


def _lane_of(
    lanes: dict[tuple[int, int], TimelineLane], key: tuple[int, int], outcome: ControlType | None
) -> TimelineLane:
    if key not in lanes:
        marks = {ControlType.COMMIT: Mark.COMMITTED, ControlType.ABORT: Mark.ABORTED, None: Mark.OPEN}
        lanes[key] = TimelineLane(f"{key[0]}:{key[1]}", marks[outcome].value, producer_id=key[0])
    return lanes[key]


def _names(connection: Connection, producer_ids: set[int]) -> dict[int, str]:
    if not producer_ids:
        return {}
    return {row[0]: row[1] for row in connection.execute(_NAMES, {"producer_ids": sorted(producer_ids)})}


EXAMPLES: Final = examples(
    "txnstore timeline orders",
    "txnstore timeline orders --partition 2 --from 100 --count 40",
    "txnstore timeline orders --count 200 --svg orders.svg",
)

_SIGNS: Final = {
    Mark.RECORD: ("■", "#"),
    Mark.COMMITTED: ("■", "#"),
    Mark.ABORTED: ("▒", "x"),
    Mark.OPEN: ("□", "o"),
    Mark.COMMIT: ("C", "C"),
    Mark.ABORT: ("A", "A"),
}
_STYLES: Final = {
    Mark.RECORD: "",
    Mark.COMMITTED: "green",
    Mark.ABORTED: "red",
    Mark.OPEN: "yellow",
    Mark.COMMIT: "bold green",
    Mark.ABORT: "bold red",
}
_POINTERS: Final = ("▲", "^")
_BEFORE: Final = ("◀", "<")
_AFTER: Final = ("▶", ">")
_LEGEND: Final = (
    (Mark.RECORD, "record"),
    (Mark.ABORTED, "aborted"),
    (Mark.OPEN, "open"),
    (Mark.COMMIT, "COMMIT marker"),
    (Mark.ABORT, "ABORT marker"),
)
#: Between the numbers above the columns.
_TICK: Final = 10
_NAME_WIDTH_MAX: Final = 40
_COLUMNS_MIN: Final = 20
#: What stands to the right of a pointer: its offset.
_NUMBER_WIDTH: Final = 12
_SVG_COUNT: Final = 200


def timeline(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic.")],
    *,
    partition: PartitionShown = None,
    from_offset: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="OFFSET", min=0, max=2**63 - 1, help="The first offset; default: the last ones are shown."
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", "-c", min=1, max=OFFSETS_MAX, help="How many offsets; default: as many as fit on the screen."
        ),
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw into this file instead of the terminal.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Draw a partition: records by transaction, markers, last stable offset, high watermark and positions of groups."""
    if count is None:
        count = _SVG_COUNT if svg_file is not None else _screen_columns()
    with opened(url, schema) as cluster:
        number = partition_shown(cluster, topic, partition)
        found = at_leader_of(
            cluster,
            topic,
            number,
            lambda leader: leader.read(
                lambda connection: read_timeline(connection, topic, number, from_offset=from_offset, count=count)
            ),
        )
        left_out: LeftOut = {}
        add_names(cluster, found, left_out)
    _show(found, svg_file, as_json=as_json)
    tell_and_exit(left_out.values())


def _show(found: Timeline, svg_file: Path | None, *, as_json: bool) -> None:
    if svg_file is not None:
        try:
            svg_file.write_text(svg(found), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "this is not a path"
            raise CommandFailed(f"{svg_file}: {reason}") from None
        name = f"{found.topic}-{found.partition}"
        if found.first_offset == found.end_offset:
            say(f"{svg_file} shows no offsets of {name}: it has none there")
            return
        say(f"{svg_file} shows the offsets {found.first_offset} to {found.end_offset - 1} of {name}")
        return
    if as_json:
        show_json(found.as_json())
        return
    _draw(found)


def _screen_columns() -> int:
    return max(_COLUMNS_MIN, shutil.get_terminal_size().columns - _NAME_WIDTH_MAX - _NUMBER_WIDTH)


def _draw(timeline: Timeline) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    plain = int((getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8")
    names = [f"{lane.name}  {lane.outcome}".rstrip() for lane in timeline.lanes]
    names += [pointer.name for pointer in timeline.pointers]
    width = min(_NAME_WIDTH_MAX, max(map(len, names)))
    console.print(Text(f"{timeline.topic}-{timeline.partition}", style="bold"))
    for line in _ruler(timeline):
        console.print(Text((" " * width + "  " + line).rstrip(), style="dim"))
    for lane in timeline.lanes:
        console.print(_lane_line(timeline, lane, width, plain))
    for pointer in timeline.pointers:
        console.print(_pointer_line(timeline, pointer, width, plain))
    legend = Text(" " * width + " ")
    for mark, meaning in _LEGEND:
        legend.append(" ")
        legend.append(_SIGNS[mark][plain], style=_STYLES[mark])
        legend.append(f" {meaning} ")
    legend.rstrip()
    console.print(legend)


def _ruler(timeline: Timeline) -> tuple[str, str]:
    """Return the numbers of the offsets, and a tick under each."""
    numbers = ticks = ""
    for offset in range(timeline.first_offset, timeline.end_offset + 1):
        column = offset - timeline.first_offset
        if offset % _TICK == 0 or offset == timeline.first_offset:
            if len(numbers) <= column and (not numbers or len(numbers) < column):
                numbers = numbers.ljust(column) + str(offset)
            ticks = ticks.ljust(column) + "|"
    return numbers, ticks


def _label(name: str, width: int) -> str:
    name = printable(name)
    return (name if len(name) <= width else name[: width - 1] + "~").ljust(width) + "  "


def _lane_line(timeline: Timeline, lane: TimelineLane, width: int, plain: int) -> Text:
    room = width - len(lane.outcome) - 2 if lane.outcome else width
    name = printable(lane.name)
    name = name if len(name) <= room else name[: room - 1] + "~"
    line = Text(f"{name.ljust(room)}  {lane.outcome}  " if lane.outcome else _label(name, width))
    for offset in range(timeline.first_offset, timeline.end_offset):
        mark = lane.marks.get(offset)
        line.append(" " if mark is None else _SIGNS[mark][plain], style="" if mark is None else _STYLES[mark])
    line.rstrip()
    return line


def _pointer_line(timeline: Timeline, pointer: Pointer, width: int, plain: int) -> Text:
    line = Text(_label(pointer.name, width))
    if pointer.offset < timeline.first_offset:
        line.append(f"{_BEFORE[plain]} {pointer.offset}", style="cyan")
    elif pointer.offset > timeline.end_offset:
        columns = timeline.end_offset - timeline.first_offset
        line.append(" " * columns + f"{_AFTER[plain]} {pointer.offset}", style="cyan")
    else:
        column = pointer.offset - timeline.first_offset
        line.append(" " * column + f"{_POINTERS[plain]} {pointer.offset}", style="cyan")
    return line


_SVG_CELL: Final = 14
_SVG_LINE: Final = 22
_SVG_LEFT: Final = 260
_SVG_TOP: Final = 60
_SVG_MARGIN: Final = 20
_SVG_TICK: Final = 10
_SVG_NAME_LENGTH_MAX: Final = 36
_SVG_COLOURS: Final = {
    Mark.RECORD: "#6b7280",
    Mark.COMMITTED: "#16a34a",
    Mark.ABORTED: "#dc2626",
    Mark.OPEN: "#f59e0b",
    Mark.COMMIT: "#166534",
    Mark.ABORT: "#7f1d1d",
}
_SVG_LETTERS: Final = {Mark.COMMIT: "C", Mark.ABORT: "A"}


def svg(timeline: Timeline) -> str:
    """Return the drawing as the text of an SVG file."""
    columns = timeline.end_offset - timeline.first_offset
    lines = len(timeline.lanes) + len(timeline.pointers)
    width = _SVG_LEFT + max(columns, 1) * _SVG_CELL + 120
    height = _SVG_TOP + lines * _SVG_LINE + _SVG_LINE * 2
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _svg_text(
            _SVG_MARGIN, 24, f"{timeline.topic}-{timeline.partition}", extra=' font-weight="bold" font-size="14"'
        ),
        *_svg_ruler(timeline),
    ]
    y = _SVG_TOP
    for lane in timeline.lanes:
        parts += _svg_lane(timeline, lane, y)
        y += _SVG_LINE
    for pointer in timeline.pointers:
        parts += _svg_pointer(timeline, pointer, y)
        y += _SVG_LINE
    parts += [*_svg_legend(y + _SVG_LINE), "</svg>"]
    return "\n".join(parts) + "\n"


def _svg_x(timeline: Timeline, offset: int) -> int:
    return _SVG_LEFT + (offset - timeline.first_offset) * _SVG_CELL


def _svg_ruler(timeline: Timeline) -> Iterator[str]:
    for offset in range(timeline.first_offset, timeline.end_offset + 1):
        if offset % _SVG_TICK == 0:
            x = _svg_x(timeline, offset)
            yield _svg_text(x, _SVG_TOP - 16, str(offset), extra=' fill="#6b7280"')
            yield f'<line x1="{x}" y1="{_SVG_TOP - 12}" x2="{x}" y2="{_SVG_TOP - 4}" stroke="#9ca3af"/>'


def _svg_lane(timeline: Timeline, lane: TimelineLane, y: int) -> Iterator[str]:
    yield _svg_text(_SVG_MARGIN, y + 12, f"{_svg_name(lane.name)} {lane.outcome}".rstrip())
    for offset, mark in sorted(lane.marks.items()):
        x = _svg_x(timeline, offset)
        colour = _SVG_COLOURS[mark]
        fill = "none" if mark is Mark.OPEN else colour
        side = _SVG_CELL - 2
        yield (
            f'<rect x="{x + 1}" y="{y + 1}" width="{side}" height="{side}" fill="{fill}" stroke="{colour}">'
            f"<title>offset {offset}: {mark.value}</title></rect>"
        )
        if mark in _SVG_LETTERS:
            yield _svg_text(
                x + 4, y + 12, _SVG_LETTERS[mark], extra=' fill="white" font-size="10" pointer-events="none"'
            )


def _svg_pointer(timeline: Timeline, pointer: Pointer, y: int) -> Iterator[str]:
    yield _svg_text(_SVG_MARGIN, y + 12, _svg_name(pointer.name))
    shown = min(max(pointer.offset, timeline.first_offset), timeline.end_offset)
    x = _svg_x(timeline, shown)
    yield f'<line x1="{x}" y1="{_SVG_TOP - 4}" x2="{x}" y2="{y + 2}" stroke="#0891b2" stroke-dasharray="2 3"/>'
    yield f'<path d="M{x} {y + 2} l5 9 l-10 0 z" fill="#0891b2"/>'
    yield _svg_text(x + 9, y + 12, str(pointer.offset), extra=' fill="#0891b2"')


def _svg_legend(y: int) -> Iterator[str]:
    x = _SVG_MARGIN
    for mark, colour in _SVG_COLOURS.items():
        fill = "none" if mark is Mark.OPEN else colour
        yield f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{fill}" stroke="{colour}"/>'
        yield _svg_text(x + 15, y, mark.value)
        x += 30 + 8 * len(mark.value)


def _svg_text(x: int, y: int, text: str, *, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}"{extra}>{escape(printable(text))}</text>'


def _svg_name(name: str) -> str:
    return name if len(name) <= _SVG_NAME_LENGTH_MAX else name[: _SVG_NAME_LENGTH_MAX - 1] + "~"
