"""The commands about branches: the shares of transactions in other databases, listed, ended and given up."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import typer

from txnstore.cli.options import (
    PARTICIPANTS_VARIABLE,
    Json,
    Participants,
    Schema,
    Url,
    about,
    examples,
    opened,
    reached,
)
from txnstore.cli.output import Column, CommandFailed, hint, say, show_json, show_rows, tell_and_exit, time_text
from txnstore.db.cluster.cluster import LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.errors import TxnStoreError
from txnstore.participants.recovery import RecoveredBranches, forget_branch, recover_branches
from txnstore.transactions.branch_rows import RegisteredBranch, all_branches, branches_by_gid

#: Without a name: its commands are those of `transactions`.
app: Final = typer.Typer()

_BRANCH_COLUMNS: Final = (
    Column("gid", "GID"),
    Column("transactional_id", "TRANSACTIONAL ID"),
    Column("database", "DATABASE"),
    Column("outcome", "OUTCOME"),
    Column("registered_ms", "REGISTERED", time_text),
)


@app.command(
    name="branches", epilog=examples("txnstore transactions branches", "txnstore transactions branches --json")
)
def branches(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the parts of transactions in other databases that are not known to have ended.

    One that is `missing` was to commit, and its database did not know of one.
    """
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        found = [branch for _, branches in cluster.read_all(all_branches, left_out) for branch in branches]
    show_rows([_branch_row(branch) for branch in found], _BRANCH_COLUMNS, as_json=as_json)
    tell_and_exit(left_out.values())


@app.command(name="recover", epilog=examples("txnstore transactions recover --participant postgresql://bank@db2/bank"))
def recover(
    *,
    participants: Participants = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Commit or roll back what is prepared in other databases, as decided; exit with 75 if some of it is left.

    Exit with 1 if some of it was ended otherwise by somebody else, or trying again will not end it.
    """
    if not participants:
        raise typer.BadParameter(f"which database? Give --participant, or set {PARTICIPANTS_VARIABLE}")
    found: list[RecoveredBranches] = []
    refused: list[TxnStoreError] = []
    with opened(url, schema) as cluster:
        for store in reached(cluster, refused):
            for participant in participants:
                try:
                    with about(participant, participants):
                        found.append(recover_branches(store, participant, cluster))
                except TxnStoreError as refusal:
                    # What the others say is shown all the same.
                    refused.append(refusal)
    if as_json:
        show_json([_recovered(each) for each in found])
    else:
        for each in found:
            say(
                f"{each.database_label}: {len(each.committed)} committed, {len(each.rolled_back)} rolled back,"
                f" {len(each.forgotten)} ended before, {len(each.open)} still open"
            )
    # What has ended otherwise is told of once: a user who tries again would take the next 0 for the end of it all.
    tell_and_exit([error for each in found for error in each.failed] + refused)


@app.command(
    name="forget",
    epilog=examples(
        "txnstore transactions forget GID --url sqlite:///shop.db",
        "... forget GID --force --participant postgresql://bank@db2/bank",
    ),
)
def forget(
    gid: Annotated[str, typer.Argument(metavar="GID", help="The part, as `branches` shows it.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Forget it even if it was to commit: what it wrote was put right by hand.")
    ] = False,
    participants: Participants = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Forget a part of a transaction in another database that is gone for good, or has lost it.

    Refused while it is prepared on the store's own server or on one of --participant, or one of these does not answer:
    name all that are left, and leave out the one that is gone. Wherever else it is prepared, recovery will roll it
    back, although its transaction was to commit.
    """
    refused: list[TxnStoreError] = []
    with opened(url, schema) as cluster:
        for store in reached(cluster, refused):
            if gid in store.read(partial(branches_by_gid, gids=[gid])):
                for error in forget_branch(store, gid, participants or (), cluster, force=force):
                    hint(f"could not ask whether it is prepared there: {error}")
                say(f"the branch {gid} is forgotten")
                return
    # Perhaps it is known there.
    tell_and_exit(refused)
    raise CommandFailed(f"no branch {gid} is known")


def _recovered(each: RecoveredBranches) -> dict[str, Any]:
    return {
        "database": each.database_label,
        "committed": each.committed,
        "rolled_back": each.rolled_back,
        "ended_before": each.forgotten,
        "open": each.open,
        "failed": [str(error) for error in each.failed],
    }


def _branch_row(branch: RegisteredBranch) -> dict[str, Any]:
    return {
        "gid": branch.gid,
        "transactional_id": branch.transactional_id,
        "database": branch.database_label,
        "outcome": "missing" if branch.is_missing else {None: "open", True: "commit", False: "abort"}[branch.commit],
        "registered_ms": branch.registered_ms,
    }
