"""The scripts: asked for help, each says what it does, and does nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAMS = {path for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)}
HELPFUL = sorted(path for path in PROGRAMS if '/help"\n' in path.read_text())
#: Its options are read by `tests/processes/upkeep_campaign.py`.
ELSEWHERE = "soak-maintenance"


@pytest.mark.parametrize("script", HELPFUL, ids=lambda script: script.name)
def test_help_is_what_stands_at_the_top(script, tmp_path):
    ended = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    _, first, *_ = script.read_text().splitlines()
    assert ended.stdout.startswith(first.removeprefix("# "))
    assert "set -euo" not in ended.stdout
    assert ended.stderr == ""


def test_every_other_script_hands_its_arguments_to_a_program_with_options_of_its_own():
    parsing = {path.stem.replace("_", "-") for path in SCRIPTS.glob("*.py") if "argparse" in path.read_text()}
    assert {path.name for path in PROGRAMS.difference(HELPFUL)} <= {*parsing, ELSEWHERE}
