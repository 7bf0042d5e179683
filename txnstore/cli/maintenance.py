"""The command that looks after a store all the time."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Final

import typer

from txnstore.cli import EndedBySignal
from txnstore.cli.options import (
    Participants,
    Schema,
    UrlArgument,
    UrlBesideArgument,
    about,
    examples,
    one_url,
    reached,
)
from txnstore.cli.output import FAILED, CommandFailed, exit_code, report, say
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.store import Store
from txnstore.errors import MissingMember, StoreMoved, StoreUnavailable, TxnStoreError
from txnstore.maintenance.duties import DUTIES, LONG_DUTIES, branch_duties
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import MaintenanceDuty, MaintenanceObserver, level_of
from txnstore.trouble import RepeatedTrouble, kind_of

_log = logging.getLogger(__name__)

_ObserverOf = Callable[[Cluster, int], MaintenanceObserver | None]

#: How often it looks whether databases have joined, or can be reached by now.
_LOOK_AGAIN_SECONDS: Final = 10.0

EXAMPLES: Final = examples(
    "txnstore maintain sqlite:///shop.db",
    "txnstore maintain --once",
    "txnstore maintain --participant postgresql://bank@db2/bank",
    "txnstore maintain --metrics 9187",
)


def maintain(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Do everything once, then exit: with 75 if some of it can be done later, 1 if it cannot."
        ),
    ] = False,
    participants: Participants = None,
    metrics: Annotated[
        int | None,
        typer.Option(
            "--metrics", metavar="PORT", min=0, max=65535, help="Serve Prometheus metrics on this port; 0: a free one."
        ),
    ] = None,
    metrics_address: Annotated[
        str, typer.Option("--metrics-address", metavar="ADDRESS", help="The address on which they are served.")
    ] = "127.0.0.1",
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Complete decided transactions, abort timed-out ones and delete what has expired, until stopped by Ctrl-C.

    It also ends, with an error, once `txnstore copy` has moved the store to another database.
    """
    if once and metrics is not None:
        raise typer.BadParameter("leave out --once: only a process that stays serves metrics", param_hint="--metrics")
    url = one_url(context, url, url_option)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    duties = (*DUTIES, *branch_duties(participants or ()))
    with open_cluster(url, schema=schema, create=False) as cluster:
        if once:
            raise typer.Exit(_run_once(cluster, (*duties, *LONG_DUTIES)))
        stop = threading.Event()
        stop_at_signals(stop)
        if metrics is None:
            _run_all(cluster, duties, stop)
            return
        with _serving_metrics(url, schema, metrics, metrics_address) as observer_of:
            _run_all(cluster, duties, stop, observer_of)


@contextmanager
def _serving_metrics(url: str, schema: str, port: int, address: str) -> Iterator[_ObserverOf]:
    """Serve the metrics of the store and of what is observed here."""
    try:
        from txnstore.observability.metrics import MetricsServer

        server = MetricsServer(url, schema=schema, port=port, address=address)
    except (ModuleNotFoundError, OSError) as error:
        where = f"port {port} of {address} cannot be listened on: " if isinstance(error, OSError) else ""
        raise CommandFailed(f"{where}{error}") from None
    host = f"[{address}]" if ":" in address else address
    _log.info("metrics: http://%s:%d/metrics", host, server.port, extra={"event": "metrics_served"})
    try:
        yield server.observer_of
    finally:
        server.close()


def _run_once(cluster: Cluster, duties: Sequence[MaintenanceDuty]) -> int:
    """Do everything once in each database; return what the program exits with."""
    total: dict[str, int] = {}
    labels = [member.label for member in cluster.databases]
    refused: list[TxnStoreError] = []
    codes = {0}
    for store in reached(cluster, refused):
        maintenance = Maintenance(store, cluster, duties=duties)
        try:
            with about(str(store.url), labels):
                done = maintenance.run_once()
        except TxnStoreError as error:
            # The next database is looked after all the same.
            refused.append(error)
            continue
        codes |= {exit_code(error) for error in maintenance.failed.values()}
        for name, count in done.items():
            total[name] = total.get(name, 0) + count
    for refusal in refused:
        report(refusal)
        codes.add(exit_code(refusal))
    for name, count in total.items():
        say(f"{count} {name}")
    return FAILED if FAILED in codes else max(codes)


def _run_all(
    cluster: Cluster,
    duties: Sequence[MaintenanceDuty],
    stop: threading.Event,
    observer_of: _ObserverOf = lambda *_: None,
) -> None:
    """Look after every database in threads of its own, including those that join meanwhile.

    What takes long has one to itself: readers do not wait for it.

    Raises:
        StoreMoved: the store lives in another database by now.
    """
    threads: dict[int, list[threading.Thread]] = {}
    moved: list[StoreMoved] = []
    failures = RepeatedTrouble()
    while not stop.is_set():
        for member in cluster.databases:
            if member.database_id not in threads:
                observer = observer_of(cluster, member.database_id)
                threads[member.database_id] = [
                    threading.Thread(
                        target=_run_one,
                        args=(cluster, member.database_id, some, stop, told),
                        kwargs={"moved": moved},
                        name=f"{name}-{member.label}",
                        # They are waited for, unless the second signal says not to.
                        daemon=True,
                    )
                    for name, some, told in (("maintenance", duties, observer), ("long-maintenance", LONG_DUTIES, None))
                ]
                for thread in threads[member.database_id]:
                    thread.start()
        stop.wait(_LOOK_AGAIN_SECONDS)
        try:
            cluster.refresh()
        except TxnStoreError as error:
            _log.log(
                level_of(failures, "list", error),
                "the list of databases cannot be read at the moment: %s",
                error,
                extra={"event": "database_unavailable"},
            )
    for thread in chain.from_iterable(threads.values()):
        thread.join()
    if moved:
        raise moved[0]


def _run_one(
    cluster: Cluster,
    database_id: int,
    duties: Sequence[MaintenanceDuty],
    stop: threading.Event,
    observer: MaintenanceObserver | None,
    *,
    moved: list[StoreMoved],
) -> None:
    label, failures = cluster.label_of(database_id), RepeatedTrouble()
    while not stop.is_set():
        store: Store | None = None
        try:
            store = cluster.own(database_id)
            Maintenance(store, cluster, duties=duties, observer=observer).run(stop)
        except TxnStoreError as error:
            if isinstance(error, StoreMoved) and store is not None:
                # Nothing is left to do here, ever. One that cannot be opened may only be closed.
                moved.append(error)
                stop.set()
                return
            if isinstance(error, StoreUnavailable | MissingMember):
                _log.log(
                    level_of(failures, label, error),
                    "maintenance of %s: the database cannot be reached: %s",
                    label,
                    error,
                    extra={"event": "database_unavailable", "database": label},
                )
            else:
                _log.log(
                    level_of(failures, label, error),
                    "maintenance of %s: the database refuses: %s",
                    label,
                    error,
                    extra={"event": "database_refuses", "database": label},
                )
            stop.wait(_LOOK_AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001 - nobody starts another one while this process lives
            if failures.may_be_told(kind_of(error)):
                _log.exception(
                    "maintenance of %s failed; it goes on",
                    label,
                    extra={"event": "background_work_failed", "database": label},
                )
            stop.wait(_LOOK_AGAIN_SECONDS)


def stop_at_signals(stop: threading.Event) -> None:
    """Set `stop` when Ctrl-C or SIGTERM comes; the second Ctrl-C is as usual, the second SIGTERM ends it at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        _stop_at(number, stop)


def _stop_at(number: signal.Signals, stop: threading.Event) -> None:
    """Let the first signal end the loop after what runs, the second one do what it usually does."""
    usual = signal.getsignal(number)
    if isinstance(usual, EndedBySignal):
        # An order to end well was given by the first one.
        usual = signal.SIG_DFL

    def handle(*_: object) -> None:
        signal.signal(number, usual)
        # In a thread: the one that is interrupted here may hold the lock of `stop`, between two instructions of a wait.
        threading.Thread(target=stop.set, name="txnstore-stop").start()

    signal.signal(number, handle)
