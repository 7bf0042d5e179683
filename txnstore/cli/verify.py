"""The command that reads a whole store and says what is wrong with it, where, and what to do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

import typer

from txnstore.cli.maintenance import stop_at_signals
from txnstore.cli.options import (
    Json,
    Participants,
    Schema,
    UrlArgument,
    UrlBesideArgument,
    examples,
    one_url,
    opened,
    patient_limits,
)
from txnstore.cli.output import FAILED, TRY_AGAIN_LATER, error_text, exit_code, hint, json_text, say, show_json
from txnstore.cli.progress import progress_bar
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.url import DatabaseUrl, parse_url
from txnstore.errors import TxnStoreError
from txnstore.verification import verify as verification
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.verify import WatchState

#: Of several databases the snapshots of the others wait while one is read.
_WAITING_SNAPSHOT_MS: Final = 3_600_000

EXAMPLES: Final = examples(
    "txnstore verify sqlite:///shop.db",
    "txnstore verify --json | jq -r '.[].remedy'",
    "txnstore verify --watch --interval 600",
)

#: Between two looks, unless the call says otherwise.
_INTERVAL_SECONDS: Final = 60.0


def verify(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again until Ctrl-C, and print what is new.")
    ] = False,
    interval_seconds: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            show_default=False,
            help="With --watch: how long to wait between looks; default: 60.",
        ),
    ] = None,
    participants: Participants = None,
    as_json: Json = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Read the whole store, and say what is wrong with it: where, what was seen, and what to do.

    Clients may be at work meanwhile. It changes nothing and exits with 1 if anything is wrong. With --watch, JSON is a
    line for each finding, and records that were read and found right are read again once a day.
    """
    if interval_seconds is not None and not watch:
        raise typer.BadParameter("goes with --watch alone: without it there is one look", param_hint="'--interval'")
    urls = [parse_url(participant) for participant in participants or ()]
    limits = replace(patient_limits(), idle_timeout_ms=_WAITING_SNAPSHOT_MS)
    with opened(one_url(context, url, url_option), schema, limits=limits) as cluster:
        if watch:
            look = partial(_look, cluster, urls, WatchState())
            was_sound = _watch(look, cluster, interval_seconds or _INTERVAL_SECONDS, as_json=as_json)
        else:
            found = _look(cluster, urls, WatchState())
            was_sound = not found
            if as_json:
                show_json([_facts(violation) for violation in found])
            else:
                for violation in found:
                    _show(violation)
                _conclude(cluster, found)
    raise typer.Exit(0 if was_sound else FAILED)


def _watch(look: Callable[[], list[Violation]], cluster: Cluster, interval_seconds: float, *, as_json: bool) -> bool:
    """Look until a signal comes; return whether nothing was ever wrong."""
    stop = threading.Event()
    stop_at_signals(stop)
    known: set[tuple[Invariant, Place]] = set()
    was_sound = True
    is_first = True
    while not stop.is_set():
        try:
            found = look()
        except TxnStoreError as error:
            if exit_code(error) != TRY_AGAIN_LATER:
                raise
            hint(f"txnstore: {error_text(error)}; trying again")
        else:
            # What was seen there may change with every record that is written.
            places = {(violation.invariant, violation.place) for violation in found}
            for violation in found:
                if (violation.invariant, violation.place) not in known:
                    _show_line(violation) if as_json else _show(violation)
            was_sound &= not found
            if is_first or places != known:
                _conclude(cluster, found)
            known, is_first = places, False
        # What was printed may be read by a pipe.
        sys.stdout.flush()
        stop.wait(interval_seconds)
    return was_sound


def _look(cluster: Cluster, participants: Sequence[DatabaseUrl], watch: WatchState) -> list[Violation]:
    with progress_bar("reading partitions") as bar:
        return verification.verify(cluster, participants=participants, watch=watch, told=bar.show)


def _show(violation: Violation) -> None:
    say(f"{violation.place}: {violation.seen}")
    say(f"  broken: {violation.invariant.holds} ({violation.invariant.name})")
    say(f"  remedy: {violation.invariant.remedy}")


def _show_line(violation: Violation) -> None:
    sys.stdout.write(json_text(_facts(violation)) + "\n")


def _conclude(cluster: Cluster, found: Collection[Violation]) -> None:
    count = {0: "nothing is", 1: "1 thing is"}.get(len(found), f"{len(found)} things are")
    hint(f"{', '.join(member.label for member in cluster.databases)}: {count} wrong")


def _facts(violation: Violation) -> dict[str, Any]:
    place, invariant = violation.place, violation.invariant
    return {
        "invariant": invariant.name,
        "holds": invariant.holds,
        "database": place.database,
        "topic": place.topic,
        "partition": place.partition,
        "partition_id": place.partition_id,
        "offset": place.offset,
        "transactional_id": place.transactional_id,
        "group": place.group_id,
        "gid": place.gid,
        "seen": violation.seen,
        "remedy": invariant.remedy,
    }
