"""The scripts: asked for help, each says what it does, and does nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tools import campaigns
from tests.tools.readmes import TOP, block_of

SCRIPTS = TOP / "scripts"
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


def test_the_commands_of_the_readme_run_campaigns_that_are_there():
    at_length, alone = block_of(__file__, "Campaigns", "sh").commands
    script, times, option, chosen = at_length
    assert (script, option) == ("scripts/campaigns", "-k")
    pattern = re.search(r"=~ (\^\S+\$) ", (TOP / script).read_text())
    assert pattern is not None
    assert re.fullmatch(pattern[1], times)
    assert [path for path in TOP.glob(f"tests/**/test_*{chosen}*.py") if "campaign" in path.read_text()]
    setting, script, file = alone
    name, _, length = setting.partition("=")
    assert name in Path(campaigns.__file__).read_text()
    assert float(length) > 1
    assert (TOP / script) in PROGRAMS
    assert "campaign" in (TOP / file).read_text()
