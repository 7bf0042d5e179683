"""The build of the bulk paths in C, where there are a C compiler and Python's headers; no failure where not.

Hatchling calls it for each wheel and each editable install (`pyproject.toml`): it runs the compiler that this Python
was built with, or $CC, once.  With TXNSTORE_PURE_PYTHON=1 nothing is compiled.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE: Final = Path(__file__).resolve().parent.parent / "txnstore"
SOURCES: Final = sorted(PACKAGE.glob("_bulk*.c"))
#: Of all that is compiled, headers as well: `txnstore/bulk.py` compares it.
FINGERPRINT: Final = zlib.crc32(b"".join(path.read_bytes() for path in sorted(PACKAGE.glob("_bulk*.[ch]"))))
BUILT: Final = f"_bulk{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_to(target: Path) -> str | None:
    """Compile to this file; without success there is none afterwards. Return why, in one line, or None."""
    reason = _compile(target)
    if reason is not None:
        # What was built of an older source.
        target.unlink(missing_ok=True)
    return reason


def _compile(target: Path) -> str | None:
    if os.environ.get("TXNSTORE_PURE_PYTHON", "0") not in {"", "0"}:
        return "TXNSTORE_PURE_PYTHON is set"
    variables = sysconfig.get_config_vars("LDSHARED", "CFLAGS", "CCSHARED")
    linker, *flags = shlex.split(" ".join(str(variable or "") for variable in variables))
    command = [*shlex.split(os.environ.get("CC", linker)), *flags, f"-I{sysconfig.get_path('include')}"]
    command.append(f"-DTXNSTORE_SOURCES={FINGERPRINT}UL")
    # Under another name first: a process that uses the file must not see it change.
    unfinished = target.with_suffix(".unfinished")
    try:
        subprocess.run(
            [*command, *map(str, SOURCES), "-o", str(unfinished)], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        unfinished.unlink(missing_ok=True)
        return next((line for line in error.stderr.splitlines() if "error" in line), "the compiler failed")
    except OSError as error:
        return str(error)
    unfinished.replace(target)
    return None


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
