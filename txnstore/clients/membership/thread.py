"""This file is the thread that keeps a consumer's place in its group, whatever the application and the reader do."""

from __future__ import annotations

import logging
import threading
from typing import Final

from txnstore.clients.membership.member import GroupMember

#: After a fault of our own the thread goes on, but not in a hot loop.
_FAULT_PAUSE_SECONDS: Final = 1.0


class GroupThread:
    """Does what its member finds to do, when it is due; starts with the first subscription."""

    def __init__(self, name: str, *, stirred: threading.Condition, member: GroupMember, logger: logging.Logger) -> None:
        """Be woken by `stirred`, whose lock guards the member."""
        self._name = name
        self._stirred = stirred
        self._member = member
        self._logger = logger
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread if it does not run yet."""
        with self._stirred:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Let the thread end as soon as it can."""
        with self._stirred:
            self._closing = True
            self._stirred.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Let the thread end, and wait for it; return whether it has ended."""
        self.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0, timeout_seconds))
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._stirred:
                if self._closing:
                    return
                work, wait_seconds = self._member.next_work()
                if work is None:
                    self._stirred.wait(min(wait_seconds, threading.TIMEOUT_MAX))
                    continue
            try:
                work()
            except Exception:
                # Requests have their own handling; a thread that died would lose the place without a word.
                self._logger.exception("keeping the place in the group failed")
                with self._stirred:
                    if not self._closing:
                        self._stirred.wait(_FAULT_PAUSE_SECONDS)
