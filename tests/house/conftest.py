"""What the tests of the checkout itself look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.fork_server import fork_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _processes_of_measures_are_forked() -> None:
    """They come from the server that there is one of in a process: it has imported what they need."""
    fork_server()


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Every file that git tracks, or would track if it were added."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs git, to tell which files are tracked")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs a git checkout, to tell which files are tracked: {error.stderr.strip()}")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    # A tracked file that was just removed is still listed.
    return [file for file in files if file.is_file()]
