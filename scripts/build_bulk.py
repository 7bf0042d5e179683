"""The build of the bulk paths in C, where there are a C compiler and Python's headers; no failure where not.

Hatchling calls it for each wheel and each editable install (`pyproject.toml`): it runs the compiler that this Python
was built with, or $CC, once.  With TXNSTORE_PURE_PYTHON=1 nothing is compiled.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE: Final = Path(__file__).resolve().parent.parent / "txnstore"
SOURCES: Final = sorted(PACKAGE.glob("_bulk*.c"))
#: Of all that is compiled, headers as well: `txnstore/bulk.py` compares it.
FINGERPRINT: Final = zlib.crc32(b"".join(path.read_bytes() for path in sorted(PACKAGE.glob("_bulk*.[ch]"))))
#: Of what the Python files know of it, which lies beside them in an installation, too.
INTERFACE: Final = zlib.crc32((PACKAGE / "_bulk.pyi").read_bytes())
BUILT: Final = f"_bulk{sysconfig.get_config_var('EXT_SUFFIX')}"

_PREFIX: Final = ".bulk-"
#: No compiler takes so long: who has made a folder before that was killed.
_LEFT_SECONDS: Final = 3_600


def compile_to(target: Path) -> str | None:
    """Compile to this file; without success there is none afterwards. Return why, in one line, or None."""
    try:
        reason = _compile(target)
    except (OSError, ValueError) as error:
        reason = str(error)
    if reason is not None:
        # What was built of an older source; where it cannot be removed, `txnstore/bulk.py` sees that.
        with suppress(OSError):
            target.unlink(missing_ok=True)
    return reason


def _compile(target: Path) -> str | None:
    if os.environ.get("TXNSTORE_PURE_PYTHON", "0") not in {"", "0"}:
        return "TXNSTORE_PURE_PYTHON is set"
    has_no_lock, *variables = sysconfig.get_config_vars("Py_GIL_DISABLED", "LDSHARED", "CFLAGS", "CCSHARED")
    if has_no_lock:
        return "they need the lock of the interpreter, which this Python does without"
    words = shlex.split(" ".join(str(variable or "") for variable in variables))
    if not words:
        return "this Python does not know by what it was compiled"
    compiler = shlex.split(os.environ.get("CC", "")) or words[:1]
    known = [f"-DTXNSTORE_SOURCES={FINGERPRINT}UL", f"-DTXNSTORE_INTERFACE={INTERFACE}UL"]
    command = [*compiler, *words[1:], f"-I{sysconfig.get_path('include')}", *known]
    _remove_left(target.parent)
    # Elsewhere first: a process that uses the file must not see it change, nor another build what is half written.
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as folder:
        unfinished = Path(folder, target.name)
        built = subprocess.run(
            [*command, *map(str, SOURCES), "-o", str(unfinished)],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if built.returncode != 0:
            return next((line for line in built.stderr.splitlines() if "error" in line), "the compiler failed")
        unfinished.replace(target)
    return None


def _remove_left(folder: Path) -> None:
    """Remove what builds have left there that were killed."""
    for left in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if left.lstat().st_mtime < time.time() - _LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


class BulkBuild(BuildHookInterface[Any]):
    """Adds what was compiled to a wheel, and puts it beside its source for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without success the wheel is one for every platform."""
        if self.target_name != "wheel":
            return
        is_editable = version == "editable"
        self._folder = tempfile.TemporaryDirectory()
        target = PACKAGE / BUILT if is_editable else Path(self._folder.name, BUILT)
        reason = compile_to(target)
        if reason is not None:
            self.app.display_warning(f"txnstore runs without its bulk paths in C: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if not is_editable:
            build_data["force_include"][str(target)] = f"txnstore/{BUILT}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel by now."""
        if self.target_name == "wheel":
            self._folder.cleanup()
