"""What the tests of the checkout itself look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
