"""Programs that are forked: they get what Python would have got, and end as they would have ended. No database."""

from __future__ import annotations

import subprocess

import pytest

from tests.tools.program_forks import forks

PROGRAM = """
import atexit, os, signal, sys, threading
print(sys.argv[1:], sys.stdin.read(), os.environ["WORD"], os.getcwd(), "textwrap" in sys.modules)
print("all goes wrong", file=sys.stderr)
threading.Thread(target=lambda: print("its thread ends", flush=True)).start()
atexit.register(print, "it ends")
match sys.argv[1]:
    case "end":
        sys.exit(3)
    case "break":
        raise ValueError("broken")
    case "die":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def forked():
    with forks(["textwrap"]) as command:
        yield command


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("way", "code"), [("end", 3), ("break", 1), ("die", 1), ("return", 0)])
def test_a_forked_program_has_arguments_files_variables_and_a_folder_and_its_exit_code_is_told(
    forked, tmp_path, way, code
):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        ["sh", "-c", f'{forked} -m program "$@"', "sh", way, "a b"],
        input="given",
        env={"WORD": "word"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == code
    if way != "die":
        own, *others = done.stdout.splitlines()
        assert own == f"['{way}', 'a b'] given word {tmp_path} True"
        assert sorted(others) == ["it ends", "its thread ends"]
        assert done.stderr.startswith("all goes wrong\n")
        assert ("ValueError: broken" in done.stderr) == (way == "break")
