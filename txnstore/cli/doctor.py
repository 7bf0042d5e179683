"""The command that says what would bite a store in a database, before it bites."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from txnstore.cli.options import URL_VARIABLE, Json, Schema, examples
from txnstore.cli.output import FAILED, hint, say, show_json
from txnstore.db.cluster.membership import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.doctor.checks import Finding, Grade
from txnstore.doctor.examination import Examination, examine

EXAMPLES: Final = examples(
    "txnstore doctor sqlite:///shop.db",
    "txnstore doctor postgresql://app@db1/shop postgresql://app@db2/bank",
    "txnstore doctor --json | jq -r '.[] | select(.grade == \"problem\") | .remedy'",
)


def doctor(
    context: typer.Context,
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            show_default=False,
            help=f"The databases; default: --url or {URL_VARIABLE}. Put passwords into PGPASSWORD or ~/.pgpass.",
        ),
    ] = None,
    *,
    url_option: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", show_default=False, help="The same; several with commas."),
    ] = None,
    as_json: Json = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Say what would bite in a database, before it bites: what was seen, what comes of it, and what to do.

    It changes nothing, and needs no store there. It exits with 1 if there is a problem. Advice alone does not fail.
    As a role of `roles grant` it looks for the rights of that kind of role; what the kind is meant to lack is no
    problem.
    """
    examinations = [examine(url, schema=schema) for url in _wanted(context, urls, url_option)]
    if as_json:
        show_json([_facts(each, finding) for each in examinations for finding in each.findings])
    else:
        for each in examinations:
            _show(each)
    raise typer.Exit(FAILED if any(each.count(Grade.PROBLEM) for each in examinations) else 0)


def _wanted(context: typer.Context, urls: list[str] | None, url_option: str | None) -> list[str]:
    if urls and url_option:
        raise typer.BadParameter("the databases were given twice: as arguments and as --url")
    given = urls or [url_option if url_option is not None else context.find_root().params.get("url") or ""]
    found = [url for each in given for url in split_urls(each) if url]
    if not found:
        raise typer.BadParameter(f"which database? Give its URL, or set {URL_VARIABLE}")
    return found


def _show(examination: Examination) -> None:
    unseen: dict[str, list[str]] = {}
    for finding in examination.findings:
        if finding.grade is Grade.UNKNOWN:
            unseen.setdefault(finding.seen, []).append(finding.check)
            continue
        say(f"{finding.grade.value}: {finding.seen} ({finding.check})")
        say(f"  consequence: {finding.consequence}")
        say(f"  remedy: {finding.remedy}")
    for why, checks in unseen.items():
        say(f"{Grade.UNKNOWN.value}: {', '.join(checks)} could not look: {why}")
    counts = [
        _count(examination.count(Grade.PROBLEM), "problem", "problems"),
        _count(examination.count(Grade.ADVICE), "piece of advice", "pieces of advice"),
    ]
    if count := examination.count(Grade.UNKNOWN):
        counts.append(_count(count, "check could not look", "checks could not look"))
    where = {True: "a store", False: "no store yet", None: "a store or none"}[examination.has_store]
    who = f", seen as {examination.role}" if examination.role else ""
    hint(f"{examination.url}, {where}{who}: {', '.join(counts)}")


def _count(count: int, one: str, several: str) -> str:
    return f"{count or 'no'} {one if count == 1 else several}"


def _facts(examination: Examination, finding: Finding) -> dict[str, Any]:
    return {
        "database": str(examination.url),
        "check": finding.check,
        "grade": finding.grade.value,
        "seen": finding.seen,
        "consequence": finding.consequence or None,
        "remedy": finding.remedy or None,
    }
