"""This file is the commands about branches: shares of transactions in other databases, and how they are ended."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from txnstore.cli.options import Json, Schema, Url, examples, opened
from txnstore.cli.output import Column, show_json, show_rows, time_text
from txnstore.cli.terminal import TRY_AGAIN_LATER, report, say
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.participants.recovery import RecoveredBranches, recover_branches
from txnstore.transactions.branch_rows import RegisteredBranch, all_branches

PARTICIPANTS_VARIABLE: Final = "TXNSTORE_PARTICIPANTS"

Participants = Annotated[
    list[str] | None,
    typer.Option(
        "--participant",
        metavar="URL",
        envvar=PARTICIPANTS_VARIABLE,
        show_envvar=False,
        show_default=False,
        help=(
            "A PostgreSQL database that takes part in transactions, as the role that its applications use; repeatable,"
            f" or several in {PARTICIPANTS_VARIABLE}, with spaces."
        ),
    ),
]

RECOVER_EXAMPLES: Final = examples("txnstore transactions recover --participant postgresql://bank@db2/bank")
BRANCHES_EXAMPLES: Final = examples("txnstore transactions branches", "txnstore transactions branches --json")

_COLUMNS: Final = (
    Column("gid", "GID"),
    Column("transactional_id", "TRANSACTIONAL ID"),
    Column("database", "DATABASE"),
    Column("outcome", "OUTCOME"),
    Column("registered_ms", "REGISTERED", time_text),
)


def recover(
    *,
    participants: Participants = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """End what is prepared in other databases as their transactions were decided; the exit code 75 says: not all."""
    if not participants:
        raise typer.BadParameter(f"which database? Give --participant, or set {PARTICIPANTS_VARIABLE}")
    with opened(url, schema) as cluster:
        found = [
            recover_branches(store, participant, cluster) for participant in participants for store in cluster.stores()
        ]
    if as_json:
        show_json([_recovered(each) for each in found])
    for each in found:
        if not as_json:
            say(
                f"{each.database_label}: {len(each.committed)} committed, {len(each.rolled_back)} rolled back,"
                f" {len(each.forgotten)} ended before, {len(each.open)} still open"
            )
        for error in each.failed:
            report(error)
    if any(each.failed for each in found):
        raise typer.Exit(TRY_AGAIN_LATER)


def branches(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the shares of transactions in other databases that have not ended, or not been found to have."""
    with opened(url, schema) as cluster:
        found = [branch for store in cluster.stores() for branch in store.read(all_branches)]
    show_rows([_row(branch) for branch in found], _COLUMNS, as_json=as_json)


def _recovered(each: RecoveredBranches) -> dict[str, Any]:
    return {
        "database": each.database_label,
        "committed": each.committed,
        "rolled_back": each.rolled_back,
        "ended_before": each.forgotten,
        "open": each.open,
        "failed": [str(error) for error in each.failed],
    }


def _row(branch: RegisteredBranch) -> dict[str, Any]:
    return {
        "gid": branch.gid,
        "transactional_id": branch.transactional_id,
        "database": branch.database_label,
        "outcome": {None: "open", True: "commit", False: "abort"}[branch.commit],
        "registered_ms": branch.registered_ms,
    }
