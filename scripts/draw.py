"""The parts of the READMEs that follow from the code: tables, states, errors, settings, files and who imports whom.

`scripts/draw` writes them between their markers; `scripts/draw --check` changes nothing and fails if they are stale.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from scripts.draw_folders import draw_files, draw_imports
from scripts.table_growth import GROWTH
from txnstore.clients.configuration.keys import KEYS
from txnstore.clients.model.errors import ERROR_ROWS, error_code
from txnstore.clients.producer.state import ALLOWED_IN, RESUMABLE, TransactionCall, TransactionStage
from txnstore.config import STORE_SETTINGS, TOPIC_SETTINGS, Setting
from txnstore.db.open_transactions_view import OPEN_TRANSACTIONS_COLUMNS, PENDING_OFFSETS_COLUMNS
from txnstore.db.schema import metadata
from txnstore.doctor.postgresql import POSTGRESQL_CHECKS
from txnstore.doctor.sqlite import SQLITE_CHECKS
from txnstore.errors import ERRORS
from txnstore.observability.metric_table import CLIENT_METRICS, MAINTENANCE_METRICS, STORE_METRICS
from txnstore.transactions.protocol import (
    END_TRANSACTION,
    PREVIOUS_STATES,
    STORED,
    EndAction,
    TransactionState,
)

TOP: Final = Path(__file__).resolve().parent.parent

#: The folders with a README at their door, or below them.
FOLDERS: Final = ("txnstore", "scripts", "tests")


def draw_tables() -> Iterator[str]:
    """Draw the table reference from the comments in the schema."""
    for table in metadata.tables.values():
        yield f"**`{table.name}`** {table.comment}"
        yield f"*What goes:* {GROWTH[str(table.name)]}"
        yield ""
        yield "| column | holds |"
        yield "| --- | --- |"
        for column in table.columns:
            key = " (key)" if column.primary_key else ""
            yield f"| `{column.name}`{key} | {_cell(column.comment or '')} |"
        yield ""


def draw_views() -> Iterator[str]:
    """Draw the columns of the views of what is open."""
    for view, columns in (
        ("open_transactions", OPEN_TRANSACTIONS_COLUMNS),
        ("pending_offsets", PENDING_OFFSETS_COLUMNS),
    ):
        yield f"| column of `{view}` | holds |"
        yield "| --- | --- |"
        for name, holds in columns.items():
            yield f"| `{name}` | {_cell(holds)} |"
        yield ""


def draw_checks() -> Iterator[str]:
    """Draw the checks of the doctor, for each kind of database."""
    for kind, checks in (("SQLite", SQLITE_CHECKS), ("PostgreSQL", POSTGRESQL_CHECKS)):
        yield f"| {kind} | grade | looks at | what comes of it | remedy |"
        yield "| --- | --- | --- | --- | --- |"
        for check in checks:
            cells = (check.looks_at, check.consequence, check.remedy)
            yield f"| `{check.name}` | {check.grade.value} | {' | '.join(map(_cell, cells))} |"
        yield ""


def draw_states() -> Iterator[str]:
    """Draw the state diagram of a transaction from the table of moves."""
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield "    [*] --> Empty"
    for after, befores in PREVIOUS_STATES.items():
        for before in sorted(befores):
            yield f"    {before.kafka_name} --> {after.kafka_name}"
    yield "    Dead --> [*]"
    yield "```"
    yield ""
    passing = ", ".join(state.kafka_name for state in TransactionState if state not in STORED)
    yield f"Never stored, only passed through: {passing}."


def draw_end_transaction() -> Iterator[str]:
    """Draw what an EndTxn does in each state."""
    yield "| state | abort, repeated | abort, current | commit, repeated | commit, current |"
    yield "| --- | --- | --- | --- | --- |"
    for state, actions in END_TRANSACTION.items():
        cells = " | ".join(_ACTIONS[action] for action in actions)
        yield f"| {state.kafka_name} | {cells} |"


_ACTIONS: Final = {
    EndAction.DECIDE: "decide, epoch + 1",
    EndAction.ABORT_EMPTY: "epoch + 1",
    EndAction.ANSWER: "answer again",
    EndAction.FENCED: "PRODUCER_FENCED",
    EndAction.WRONG_STATE: "INVALID_TXN_STATE",
    EndAction.WAIT: "complete it, answer again",
}


def draw_errors() -> Iterator[str]:
    """Draw the list of errors from the error table."""
    yield "| error | `code()` | `retriable()` | way out | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for _, error in sorted(ERRORS.items()):
        meaning = (error.__doc__ or "").splitlines()[0]
        row = ERROR_ROWS[error]
        code = f"{row.code} `{error_code(row.code).name}`"
        retriable = "yes" if row.retriable else ""
        yield f"| `{error.__name__}` | {code} | {retriable} | {error.recovery.value} | {_cell(meaning)} |"


def draw_settings() -> Iterator[str]:
    """Draw the settings of stores and topics."""
    yield from _settings("Of a store", STORE_SETTINGS)
    yield ""
    yield from _settings("Of a topic", TOPIC_SETTINGS)


def draw_client_states() -> Iterator[str]:
    """Draw which call of the transactional API may begin in which state."""
    yield "| state | " + " | ".join(f"`{call.value}`" for call in TransactionCall) + " |"
    yield "| --- |" + " --- |" * len(TransactionCall)
    for state in TransactionStage:
        cells = " | ".join("yes" if state in ALLOWED_IN[call] else "" for call in TransactionCall)
        yield f"| {state.value} | {cells} |"
    yield ""
    resumable = ", ".join(f"`{call.value}`" for call in TransactionCall if call in RESUMABLE)
    yield f"A call that timed out goes on, and is made again to take its answer: {resumable}."


def draw_configuration() -> Iterator[str]:
    """Draw the configuration keys that mean something."""
    yield "| key | for | default |"
    yield "| --- | --- | --- |"
    for key in sorted(KEYS.values(), key=lambda key: key.name):
        if not key.ignored:
            names = ", ".join(f"`{name}`" for name in (key.name, *key.aliases))
            default = "" if key.default is None else str(key.default)
            yield f"| {names} | {key.user.value} | {_cell(default)} |"


def draw_metrics() -> Iterator[str]:
    """Draw the metrics, and where each comes from."""
    for title, metrics in (
        ("Of a store", STORE_METRICS),
        ("Of the maintenance in this process", MAINTENANCE_METRICS),
        ("Of the clients in this process", CLIENT_METRICS),
    ):
        yield f"| {title} | labels | |"
        yield "| --- | --- | --- |"
        for metric in metrics:
            labels = ", ".join(metric.labels)
            yield f"| `{metric.name}` ({metric.kind.value}) | {labels} | {_cell(metric.about)} |"
        yield ""


def _settings(title: str, settings: Mapping[str, Setting]) -> Iterator[str]:
    yield f"| {title} | default | meaning |"
    yield "| --- | --- | --- |"
    for setting in settings.values():
        if setting.about:
            yield f"| `{setting.name}` | {setting.default_text} | {_cell(setting.about)} |"
    kept = [f"`{setting.name}`" for setting in settings.values() if not setting.about]
    if kept:
        yield ""
        yield from textwrap.wrap(f"Kept, described and without effect: {', '.join(kept)}.", 120, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


#: Each of them stands in one README.
PARTS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "tables": draw_tables,
    "metrics": draw_metrics,
    "views": draw_views,
    "checks": draw_checks,
    "states": draw_states,
    "end transaction": draw_end_transaction,
    "errors": draw_errors,
    "settings": draw_settings,
    "client states": draw_client_states,
    "configuration": draw_configuration,
}

#: Each of them stands in the README of every folder of the package, and is about that folder.
FOLDER_PARTS: Final[Mapping[str, Callable[[Path], Iterator[str]]]] = {"files": draw_files, "imports": draw_imports}

_PART: Final = re.compile(
    r"(?P<begin><!-- begin (?P<name>[^:>]+): written by scripts/draw -->\n).*?(?P<end><!-- end (?P=name) -->)",
    re.DOTALL,
)


def readmes() -> list[Path]:
    """Return every README of the checkout, the one at the top first."""
    return [TOP / "README.md", *sorted(readme for name in FOLDERS for readme in (TOP / name).rglob("README.md"))]


def drawn(readme: Path, text: str) -> str:
    """Return the text of a README with every part between its markers drawn anew; a part that is unknown stays."""

    def draw(part: re.Match[str]) -> str:
        name = part["name"]
        if name in FOLDER_PARTS:
            lines = FOLDER_PARTS[name](readme.parent)
        elif name in PARTS:
            lines = PARTS[name]()
        else:
            return part[0]
        return part["begin"] + "\n" + "\n".join(lines).rstrip() + "\n\n" + part["end"]

    return _PART.sub(draw, text)


def misplaced(texts: Mapping[str, str]) -> Iterator[str]:
    """Say what is wrong with the markers in the texts of the READMEs."""
    found = [(readme, part["name"]) for readme, text in texts.items() for part in _PART.finditer(text)]
    for readme, text in texts.items():
        known = sum(name in PARTS or name in FOLDER_PARTS for place, name in found if place == readme)
        if known < max(text.count("written by scripts/draw"), text.count("<!-- end ")):
            yield f"{readme} has a marker that nothing is drawn for, or one without the other"
    for name in PARTS:
        if (count := [part for _, part in found].count(name)) != 1:
            yield f"{count} READMEs have a place for {name}, not one"
    for readme, name in {place for place in found if found.count(place) > 1}:
        yield f"{readme} has several places for {name}"


def main() -> None:
    """Write the parts, or check that they are current."""
    texts = {readme: readme.read_text(encoding="utf-8") for readme in readmes()}
    if wrong := list(misplaced({str(readme.relative_to(TOP)): text for readme, text in texts.items()})):
        sys.exit("\n".join(wrong))
    new = {readme: drawn(readme, text) for readme, text in texts.items()}
    stale = [readme for readme in texts if new[readme] != texts[readme]]
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(f"stale, run scripts/draw: {', '.join(str(readme.relative_to(TOP)) for readme in stale)}")
        return
    for readme in stale:
        readme.write_text(new[readme], encoding="utf-8")


if __name__ == "__main__":
    main()
