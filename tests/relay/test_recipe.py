"""The README's recipe, as it is printed, against a real Kafka."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
README = (TOP / "README.md").read_text(encoding="utf-8")
RECIPE = re.search(r"### Relay to Kafka\n.*?```sh\n(.*?)```", README, re.DOTALL)


def test_the_recipe_copies_an_order_there_and_back(bootstrap, tmp_path):
    assert RECIPE is not None
    program = tmp_path / "bin" / "txnstore"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from txnstore.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TXNSTORE_URL"},
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(TOP),
        "BOOTSTRAP": bootstrap,
    }
    done = subprocess.run(
        ["bash", "-e", "-c", RECIPE[1]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 records were shipped" in done.stdout
    assert "1 records were copied" in done.stdout
    assert done.stdout.endswith("42 EUR\n")
