"""The process that the tests' children are forked from: it has imported what they need, and has one thread.

Each process that runs tests has one, and what that imports is settled when its first child starts, whoever that is.
What it lacks every child imports anew, for ten times as long as a fork takes; so it imports the same for all tests.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext
from typing import Final

#: Where functions stand that children run.
_MODULES: Final = (
    "alembic.command",
    "scripts.bench_growth",
    "scripts.bench_open",
    "scripts.comparison.bulk",
    "scripts.comparison.groups",
    "scripts.comparison.small",
    "scripts.comparison.waiting",
    "tests.clients.interrupted",
    "tests.clients.producer.enlist_children",
    "tests.clients.producer.two_phase_recipe",
    "tests.crash.children",
    "tests.outbox.children",
    "tests.participants.children",
    "tests.participants.tellers",
    "tests.processes.group_ordering",
    "tests.processes.group_transforming",
    "tests.processes.idle_member",
    "tests.processes.ordering",
    "tests.processes.placing",
    "tests.processes.remote_member",
    "tests.processes.transforming",
    "tests.processes.upkeep_programs",
    "tests.tools.killed_children",
    "tests.tools.later_versions",
    "tests.tools.workload",
    "txnstore.transactions.recovery",
)


def fork_server(*modules: str) -> ForkServerContext:
    """Return where children come from; `modules` are imported, too, if no child was started before."""
    context = multiprocessing.get_context("forkserver")
    # A child looks at the main module of its parent as well, which for tests is pytest: slow to import.
    main = [name for name in ("pytest",) if name in sys.modules]
    context.set_forkserver_preload(["__main__", *_MODULES, *modules, *main, "tests.tools.frozen"])
    return context
