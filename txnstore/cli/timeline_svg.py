"""This file is the drawing of a partition as SVG: it needs no program but a browser, and no fonts of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from txnstore.cli.terminal import printable
from txnstore.cli.timeline_facts import Lane, Mark, Pointer, Timeline

_CELL: Final = 14
_LINE: Final = 22
_LEFT: Final = 260
_TOP: Final = 60
_MARGIN: Final = 20
_TICK: Final = 10
_NAME_LENGTH_MAX: Final = 36
_COLOURS: Final = {
    Mark.RECORD: "#6b7280",
    Mark.COMMITTED: "#16a34a",
    Mark.ABORTED: "#dc2626",
    Mark.OPEN: "#f59e0b",
    Mark.COMMIT: "#166534",
    Mark.ABORT: "#7f1d1d",
}
_LETTERS: Final = {Mark.COMMIT: "C", Mark.ABORT: "A"}


def svg(timeline: Timeline) -> str:
    """Return the drawing as the text of an SVG file."""
    columns = timeline.end_offset - timeline.first_offset
    lines = len(timeline.lanes) + len(timeline.pointers)
    width = _LEFT + max(columns, 1) * _CELL + 120
    height = _TOP + lines * _LINE + _LINE * 2
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_MARGIN, 24, f"{timeline.topic}-{timeline.partition}", extra=' font-weight="bold" font-size="14"'),
        *_ruler(timeline),
    ]
    y = _TOP
    for lane in timeline.lanes:
        parts += _lane(timeline, lane, y)
        y += _LINE
    for pointer in timeline.pointers:
        parts += _pointer(timeline, pointer, y)
        y += _LINE
    parts += [*_legend(y + _LINE), "</svg>"]
    return "\n".join(parts) + "\n"


def _x(timeline: Timeline, offset: int) -> int:
    return _LEFT + (offset - timeline.first_offset) * _CELL


def _ruler(timeline: Timeline) -> Iterator[str]:
    for offset in range(timeline.first_offset, timeline.end_offset + 1):
        if offset % _TICK == 0:
            x = _x(timeline, offset)
            yield _text(x, _TOP - 16, str(offset), extra=' fill="#6b7280"')
            yield f'<line x1="{x}" y1="{_TOP - 12}" x2="{x}" y2="{_TOP - 4}" stroke="#9ca3af"/>'


def _lane(timeline: Timeline, lane: Lane, y: int) -> Iterator[str]:
    yield _text(_MARGIN, y + 12, f"{_short(lane.name)} {lane.outcome}".rstrip())
    for offset, mark in sorted(lane.marks.items()):
        x = _x(timeline, offset)
        colour = _COLOURS[mark]
        fill = "none" if mark is Mark.OPEN else colour
        yield (
            f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" fill="{fill}" stroke="{colour}">'
            f"<title>offset {offset}: {mark.value}</title></rect>"
        )
        if mark in _LETTERS:
            yield _text(x + 4, y + 12, _LETTERS[mark], extra=' fill="white" font-size="10" pointer-events="none"')


def _pointer(timeline: Timeline, pointer: Pointer, y: int) -> Iterator[str]:
    yield _text(_MARGIN, y + 12, _short(pointer.name))
    shown = min(max(pointer.offset, timeline.first_offset), timeline.end_offset)
    x = _x(timeline, shown)
    yield f'<line x1="{x}" y1="{_TOP - 4}" x2="{x}" y2="{y + 2}" stroke="#0891b2" stroke-dasharray="2 3"/>'
    yield f'<path d="M{x} {y + 2} l5 9 l-10 0 z" fill="#0891b2"/>'
    yield _text(x + 9, y + 12, str(pointer.offset), extra=' fill="#0891b2"')


def _legend(y: int) -> Iterator[str]:
    x = _MARGIN
    for mark, colour in _COLOURS.items():
        fill = "none" if mark is Mark.OPEN else colour
        yield f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{fill}" stroke="{colour}"/>'
        yield _text(x + 15, y, mark.value)
        x += 30 + 8 * len(mark.value)


def _text(x: int, y: int, text: str, *, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}"{extra}>{escape(printable(text))}</text>'


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH_MAX else name[: _NAME_LENGTH_MAX - 1] + "~"
