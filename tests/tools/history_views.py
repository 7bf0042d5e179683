"""This file is what the checks look up in a history: what was read, by whom, and what could have been."""

from __future__ import annotations

from collections.abc import Iterator

from tests.tools.histories import History, Page, Poll


def reads(history: History) -> Iterator[tuple[Poll, Page, int, str]]:
    """Return every record that was read, with its poll, its page and its offset."""
    for poll in history.polls:
        for page in poll.pages:
            for offset, value in page.records:
                yield poll, page, offset, value


def final_reads(history: History, *, committed: bool) -> dict[tuple[str, str], int] | None:
    """Return what could be read when all was quiet, with offsets; None if nobody looked."""
    finals = [poll for poll in history.polls if poll.is_final and poll.is_committed == committed]
    if not finals:
        return None
    return {(page.partition, value): offset for poll in finals for page in poll.pages for offset, value in page.records}


def visible_offsets(history: History) -> dict[bool, dict[str, list[int]]]:
    """Return the offsets with records, ascending: False for all of them, True for committed ones."""
    visible: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
    for partition, values_at in history.log.items():
        visible[False][partition] = sorted(values_at)
        visible[True][partition] = sorted(
            offset
            for offset, values in values_at.items()
            if any(history.is_committed(partition, value) for value in values)
        )
    return visible


def offset_of(history: History, partition: str, value: str) -> int | None:
    """Return where the value stands, if anybody was told."""
    return min(history.offsets.get((partition, value), ()), default=None)


def where(poll: Poll, page: Page) -> str:
    """Return which poll, and where it began."""
    return f"{poll.operation.process} at {page.partition}@{page.from_offset}"
