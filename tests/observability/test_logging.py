"""Log records: each from INFO on says by fields what has happened, and to what; the README knows all of them."""

from __future__ import annotations

import ast
import logging
import re

import pytest
from sqlalchemy import make_url

from tests.tools.log_records import records_of_this_thread
from tests.tools.readmes import TOP
from tests.transactions.bench import Producer
from txnstore.db.opening import open_store
from txnstore.errors import StoreUnavailable
from txnstore.maintenance.duties import ABORT_INTERVAL
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import MaintenanceDuty
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.recovery import abort_by_administrator, abort_timed_out

TOLD = {"info", "warning", "error", "exception", "critical", "log"}
IS_LOGGER = re.compile(r"(^|[._])log(ger)?$")
#: Most files have no such call, and need not be parsed.
MAY_CALL = re.compile(rf"log(ger)?\s*\.\s*({'|'.join(sorted(TOLD))})\b")
FILES = sorted((TOP / "txnstore").rglob("*.py"))
ROWS = re.findall(
    r"^\| (`\w+`(?:, `\w+`)*) \| [A-Z, ]+ \|([^|]*)\|",
    (TOP / "txnstore/observability/README.md").read_text(encoding="utf-8").partition("## Logs")[2],
    re.MULTILINE,
)


def calls(file):
    """Return the calls of a logger in a file, from INFO on, each with the function around it."""
    text = file.read_text(encoding="utf-8")
    if not MAY_CALL.search(text):
        return
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=logger, attr=name)) if name in TOLD and IS_LOGGER.search(
                ast.unparse(logger)
            ):
                around = [each for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
                yield node, max(around, key=lambda each: each.lineno)


def fields_of(call, function):
    """Return the literal dict that the call gets as `extra`, there or by a name that the function gives it."""
    (extra,) = (keyword.value for keyword in call.keywords if keyword.arg == "extra")
    if isinstance(extra, ast.Name):
        extra = next(
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == extra.id
        )
    assert isinstance(extra, ast.Dict)
    return {ast.literal_eval(key): value for key, value in zip(extra.keys, extra.values, strict=True) if key}


@pytest.fixture(scope="module")
def fields_of_calls():
    """The fields of each call, by where it stands."""
    return {
        f"{file.relative_to(TOP)}:{call.lineno}": fields_of(call, function)
        for file in FILES
        for call, function in calls(file)
    }


def test_the_calls_are_found(fields_of_calls):
    assert len(fields_of_calls) > 35


@pytest.mark.slow
def test_each_call_has_an_event_and_no_field_that_logging_has(fields_of_calls):
    taken = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
    for place, fields in fields_of_calls.items():
        assert next(iter(fields)) == "event", place
        assert isinstance(fields["event"], ast.Constant), place
        assert not fields.keys() & taken, place


def test_the_readme_knows_every_event_and_its_fields(fields_of_calls):
    found: dict[str, set[str]] = {}
    for each in fields_of_calls.values():
        fields = dict(each)
        found.setdefault(ast.literal_eval(fields.pop("event")), set()).update(fields)
    told: dict[str, set[str]] = {}
    for names, fields in ROWS:
        for name in re.findall(r"\w+", names):
            told[name] = set(re.findall(r"\w+", fields)) - {"or"}
    assert told.keys() == found.keys()
    # A row of several events names the fields of all of them.
    assert {name: fields - told[name] for name, fields in found.items() if fields - told[name]} == {}
    assert set.union(*told.values()) == set.union(*found.values())


def test_loggers_are_named_like_their_modules():
    named = {
        match
        for file in FILES
        for match in re.findall(r"getLogger\(([^)]*)\)", file.read_text(encoding="utf-8"))
        if "migrating" not in file.name
    }
    # The command line keeps away what the driver's own says behind an error.
    others = {"__name__", '"psycopg"'}
    assert {name for name in named - others if not name.startswith('"txnstore')} == set()


def test_who_was_aborted_and_why_stands_in_fields(shared_store, shared_clock, caplog):
    late, unwanted = (Producer(TransactionCoordinator(shared_store), f"logged-{name}") for name in ("late", "unwanted"))
    for producer, timeout_ms in ((late, 1_000), (unwanted, 600_000)):
        producer.start(timeout_ms)
        producer.send_offsets(f"group-{producer.transactional_id}", {})
    shared_clock.advance(2_000)
    with caplog.at_level(logging.INFO, "txnstore"):
        abort_timed_out(shared_store)
        assert abort_by_administrator(shared_store, "logged-unwanted")
    told = {
        (record.event, record.transactional_id)
        for record in caplog.records
        if getattr(record, "transactional_id", "").startswith("logged-")
    }
    assert told == {("transaction_timed_out", "logged-late"), ("transaction_aborted", "logged-unwanted")}


def test_no_field_holds_a_password(txnstore_postgresql_url, caplog):
    password = make_url(txnstore_postgresql_url).password
    assert password

    def fail(*_):
        raise StoreUnavailable("away")

    failing = MaintenanceDuty("failing", ABORT_INTERVAL, lambda: fail)
    working = MaintenanceDuty("working", ABORT_INTERVAL, lambda: lambda _: 1)
    with open_store(txnstore_postgresql_url) as store, caplog.at_level(logging.INFO, "txnstore"):
        Maintenance(store, duties=[failing, working]).run_once()
    assert [(vars(record)["event"], vars(record)["duty"]) for record in records_of_this_thread(caplog)] == [
        ("duty_failed", "failing"),
        ("duty_done", "working"),
    ]
    assert password not in str([vars(record) for record in caplog.records])
