"""This file is one file of a Maven repository: asked for again if it was too busy, and given up in good time."""

from __future__ import annotations

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from functools import cached_property
from time import sleep
from typing import Final

#: How long nothing at all may come.
_SILENCE_SECONDS: Final = 10.0
_ATTEMPTS: Final = 4
_PAUSE_FIRST_SECONDS: Final = 0.5
_CHUNK_BYTES: Final = 64 * 1024
_TOO_MANY_REQUESTS: Final = 429
_SERVER_ERRORS: Final = 500


class MavenError(Exception):
    """A file is not to be had; the text is why, without the repository's address, which may hold a password."""


class MavenRepository:
    """A repository by its URL, with a slash at the end; safe to share between threads."""

    def __init__(self, url: str, deadline: float) -> None:
        """Connect to nothing yet; `deadline`, by `time.monotonic`, is for everything."""
        self._url = url
        self._deadline = deadline
        self._has_answered = False

    def get(self, path: str) -> bytes:
        """Return a file.

        Raises:
            MavenError: it is not there, or the repository is not reached, refuses, or is too slow.
        """
        name = path.rpartition("/")[2]
        pause_seconds = _PAUSE_FIRST_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._read(path)
            except urllib.error.HTTPError as error:
                error.close()
                self._has_answered = True
                reason = f"HTTP {error.code}"
                may_pass = error.code == _TOO_MANY_REQUESTS or error.code >= _SERVER_ERRORS
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = _kind(error)
                # Who has never answered is not asked again: he is not there.
                may_pass = self._has_answered
            if not may_pass or attempt == _ATTEMPTS or time.monotonic() + pause_seconds > self._deadline:
                break
            sleep(pause_seconds)
            pause_seconds *= 2
        raise MavenError(f"Maven Central does not give {name}: {reason}")

    def _read(self, path: str) -> bytes:
        left_seconds = self._deadline - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        timeout_seconds = min(left_seconds, _SILENCE_SECONDS)
        with urllib.request.urlopen(
            self._url + path, timeout=timeout_seconds, context=self._context
        ) as answer:  # https, or what the variable says
            self._has_answered = True
            chunks = []
            while chunk := answer.read1(_CHUNK_BYTES):
                chunks.append(chunk)
                if time.monotonic() > self._deadline:
                    raise TimeoutError
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return b"".join(chunks)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT"))


def _kind(error: Exception) -> str:
    """Return what it was, and nothing of the address."""
    cause = getattr(error, "reason", None)
    if not isinstance(cause, Exception):
        cause = error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return getattr(cause, "strerror", None) or type(cause).__name__
