"""This file is the command that draws a partition: a line a transaction, a column an offset."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from txnstore.cli.completion import complete_topic
from txnstore.cli.options import Json, Schema, Url, examples, opened
from txnstore.cli.output import show_json
from txnstore.cli.terminal import CommandFailed, printable, say
from txnstore.cli.timeline_facts import OFFSETS_MAX, Lane, Mark, Pointer, Timeline, read_timeline
from txnstore.cli.timeline_svg import svg
from txnstore.clients.brokers import at_leader_of
from txnstore.db.names import DEFAULT_SCHEMA

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
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="Which one of the topic.")] = 0,
    from_offset: Annotated[
        int | None,
        typer.Option("--from", metavar="OFFSET", min=0, max=2**63 - 1, help="Begin there; default: the last ones."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "-c", min=1, max=OFFSETS_MAX, help="How many offsets; default: what fits the screen."),
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw into this file instead of the terminal.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Draw a partition: its records by transaction, markers, last stable offset, high watermark, groups' positions."""
    if count is None:
        count = _SVG_COUNT if svg_file is not None else _screen_columns()
    with opened(url, schema) as cluster:
        found = at_leader_of(
            cluster,
            topic,
            partition,
            lambda home: home.read(
                lambda connection: read_timeline(connection, topic, partition, from_offset=from_offset, count=count)
            ),
        )
    if svg_file is not None:
        try:
            svg_file.write_text(svg(found), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "this is no path"
            raise CommandFailed(f"{svg_file}: {reason}") from None
        say(f"{svg_file} shows the offsets {found.first_offset} to {found.end_offset - 1} of {topic}-{partition}")
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


def _lane_line(timeline: Timeline, lane: Lane, width: int, plain: int) -> Text:
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
