"""A part of the tests on each older version of PostgreSQL: the program behind scripts/postgres-versions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools.postgres_jars import NoProgramsError, fetch_programs

#: EX_UNAVAILABLE, EX_TEMPFAIL (a version was not done in time) and EX_USAGE of sysexits.h.
UNAVAILABLE, LATE, USAGE = 69, 75, 64
TIMEOUT_SECONDS = 600
#: Of the random histories that are tried on the newest version; the cases that are written down are the same. A version
#: between others has fewer: what the ones on both sides of it do alike it hardly does otherwise.
CAMPAIGN_LENGTH = 0.5
CAMPAIGN_LENGTH_BETWEEN = 0.25
#: What differs between versions, and what clients do with it.
PART = (
    "tests/migrations/test_catalogue.py",
    "tests/db/test_records_view.py",
    "tests/db/roles/test_attacks.py",
    "tests/log/test_append_at_once.py",
    "tests/transactions/test_whole.py",
    "tests/transactions/test_whole_within.py",
    "tests/faults/test_sessions.py",
    "tests/moving/test_closing.py::test_no_segment_of_the_log_is_written_to_by_its_own_name",
    "tests/moving/test_closing.py::test_tools_that_turn_triggers_off_are_refused_too",
    "tests/participants/test_branches.py",
    "tests/clients/producer/test_transactions.py",
    # They come with amcheck, and the newest one here does not.
    "tests/verification/test_indexes.py",
)
#: What differs between C and Python alone, which one version is enough for: one that has less to do otherwise.
PART_OF_ONE = (
    "tests/clients/model/test_message.py",
    "tests/clients/consumer/test_subscription.py",
    "tests/clients/consumer/test_consumer_reading.py",
)
#: Not what is about SQLite. A commit of several statements in one message is that of every version: of the cases that
#: are written down here are those of the function; random histories, and what has begun before, run all the statements.
CHOSEN = "not sqlite and (function or not statements or both_ways or begun_before or cannot_wait or not test_whole.py)"
#: Of the commit by one statement a version between others has the random histories, which run all its ways: the cases
#: that are written down are those of the versions on both sides; so are the changes that the comparison of tables sees.
CHOSEN_BETWEEN = f"({CHOSEN}) and (both_ways or not test_whole) and not comparison_sees"


def run(programs: Path, tests: Sequence[str], chosen: str, campaign_length: float) -> tuple[int, str, float]:
    """Run the tests on the programs in this folder; return the exit code, what was printed, and the seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", chosen, *tests]
    environment = {
        **os.environ,
        "TXNSTORE_TEST_POSTGRES_PROGRAMS": str(programs),
        "TXNSTORE_CAMPAIGN_LENGTH": str(campaign_length),
        # All other tests run with what is in C, where it was built.
        "TXNSTORE_PURE_PYTHON": "1",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return LATE, f"{printed}\nnot done in {TIMEOUT_SECONDS} seconds", time.monotonic() - began
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def main(arguments: Sequence[str]) -> int:
    """Run the part on the versions that are named, or all; return the exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, tests = arguments[:split], arguments[split + 1 :]
    try:
        found = fetch_programs()
    except NoProgramsError as error:
        print(f"No older PostgreSQL: {' '.join(str(error).split())}")
        return UNAVAILABLE
    versions = [int(name) for name in wanted if name.isdecimal()] if wanted else sorted(found)
    if len(versions) != len(wanted or found) or not set(versions) <= found.keys():
        print(f"there are the versions {', '.join(map(str, sorted(found)))}", file=sys.stderr)
        return USAGE
    codes = set()
    # A third of the time a test waits.
    with ThreadPoolExecutor((os.cpu_count() or 1) + 2) as pool:
        runs = {}
        for number, version in enumerate(versions):
            is_between = 0 < number < len(versions) - 1
            part = PART + PART_OF_ONE if number == min(1, len(versions) - 1) else PART
            runs[version] = pool.submit(
                run,
                found[version],
                tests or part,
                CHOSEN_BETWEEN if is_between and not tests else CHOSEN,
                CAMPAIGN_LENGTH_BETWEEN if is_between else CAMPAIGN_LENGTH,
            )
        for version, future in runs.items():
            code, printed, seconds = future.result()
            last = printed.strip().splitlines()[-1] if printed.strip() else ""
            print(f"PostgreSQL {version}: {last if code == 0 else printed} ({seconds:.0f} s)", flush=True)
            codes.add(code)
    return LATE if codes <= {0, LATE} and LATE in codes else int(codes != {0})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
