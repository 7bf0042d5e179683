"""Calls of a blocking client from an asyncio program: calls run in threads, callbacks run on the loop.

A callback, of a rebalance for example, comes while its call blocks a thread, and it may call the client again.  That
inner call is run by the very thread that waits for the callback: whatever the client holds is held by that thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

#: How often a thread that waits for a callback looks whether the loop is still there to finish it.
_LOOP_CHECK_SECONDS: Final = 1.0

#: The configuration's callbacks that every client has.
_COMMON_CALLBACKS: Final = ("error_cb", "stats_cb", "throttle_cb", "oauth_cb")


class _RunningCallback:
    """A callback that runs on the loop while a thread waits for it and runs the calls that it makes."""

    __slots__ = ("finished", "jobs", "owner")

    def __init__(self, owner: AsyncCalls) -> None:
        self.owner = owner
        self.finished = False
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


_running_callback: Final[contextvars.ContextVar[_RunningCallback | None]] = contextvars.ContextVar(
    "txnstore_running_callback", default=None
)


class AsyncCalls:
    """The calls of one client.

    Args:
        max_workers: how many threads the calls may have.
        executor: where to run them instead; it stays the caller's.  Its futures that run must not be cancellable.
        name: what the threads are called.
        one_at_a_time: whether a call waits until the one before it has ended.

    Raises:
        ValueError: there is to be no thread.
        RuntimeError: no loop is running.
    """

    def __init__(self, max_workers: int, executor: Executor | None, *, name: str, one_at_a_time: bool) -> None:
        self.loop = asyncio.get_running_loop()
        if executor is None and max_workers < 1:
            raise ValueError("max_workers must be at least 1")
        self.executor: Executor = ThreadPoolExecutor(max_workers, name) if executor is None else executor
        """Where the calls run."""
        self._owns_executor = executor is None
        self._turn = asyncio.Lock() if one_at_a_time else None
        self.is_closed = False
        """Whether it has begun to close the client."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_in_callback(self) -> bool:
        """Whether the task that asks is, or comes from, a callback of the client that has not returned."""
        callback = _running_callback.get()
        return callback is not None and callback.owner is self and not callback.finished

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, where one waits for the other; one that has just been answered is not."""
        return self._turn is not None and self._turn.locked()

    def check(self, closed_text: str) -> None:
        """Refuse a call of a closed client, unless a callback makes it that its closing waits for, or of another loop.

        Raises:
            RuntimeError: it is refused; nothing has been done.
        """
        if self.is_closed and not self.is_in_callback:
            raise RuntimeError(closed_text)
        self._check_loop()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("the client belongs to another event loop: make one on each loop")

    async def run(
        self, work: Callable[_Parameters, _Result], *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        """Run a blocking call and return what it returns; a call from inside a callback does not wait for its turn.

        A call that has begun cannot be stopped: one that is cancelled goes on in its thread, and it keeps its turn
        until it has ended.  One that still waits for a thread is not made any more.
        """
        call = functools.partial(work, *arguments, **keywords)
        callback = _running_callback.get()
        if callback is not None and self.is_in_callback:
            return await self._run_inside(callback, call)
        turn = self._turn
        if turn is None:
            return await self._answer(*self._submit(call))
        await turn.acquire()
        try:
            submitted, running = self._submit(call)
        except BaseException:
            turn.release()
            raise
        try:
            return await self._answer(submitted, running)
        finally:
            # Not earlier: the caller has its result before the next call begins.
            if running.done():
                turn.release()
            else:
                running.add_done_callback(lambda _: turn.release())

    def _submit(self, call: Callable[[], _Result]) -> tuple[Future[_Result], asyncio.Future[_Result]]:
        submitted = self.executor.submit(call)
        return submitted, asyncio.wrap_future(submitted, loop=self.loop)

    async def _answer(self, submitted: Future[_Result], running: asyncio.Future[_Result]) -> _Result:
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # Closing goes on even if its loop ends.
            if asyncio.current_task() is not self._closing:
                submitted.cancel()
            raise

    def callback(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return what calls `function`, which may be a coroutine function, on the loop and waits for it."""
        if function is None:
            return None

        def call_on_loop(*arguments: Any) -> Any:
            callback, loop = _RunningCallback(self), self.loop
            waiting = asyncio.run_coroutine_threadsafe(_call(function, arguments, callback), loop)
            waiting.add_done_callback(lambda _: callback.jobs.put(None))
            while True:
                try:
                    job = callback.jobs.get(timeout=_LOOP_CHECK_SECONDS)
                except queue.Empty:
                    if loop.is_closed():
                        raise RuntimeError("the event loop was closed while a callback ran on it") from None
                    continue
                if job is None:
                    return waiting.result()
                job()

        return call_on_loop

    def with_callbacks(self, configuration: dict[str, Any], *names: str) -> dict[str, Any]:
        """Return a copy of the configuration whose callbacks, these and those of every client, run on the loop."""
        wrapped = dict(configuration)
        for name in (*_COMMON_CALLBACKS, *names):
            if wrapped.get(name) is not None:
                wrapped[name] = self.callback(wrapped[name])
        return wrapped

    async def close_once(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let `close` close the client, which goes on even if this call is cancelled; again: wait until that is done.

        Called again within a callback of the client it does not wait, because the closing may be waiting for that.  If
        the client's loop has been closed, it is done on the one that runs.

        Raises:
            RuntimeError: its loop is another one, which is not closed.
        """
        if self.loop.is_closed():
            done = self._closing
            if done is not None and done.done() and not done.cancelled() and done.exception() is None:
                return
            # What waits on that one, or for its turn there, waits for ever.
            self.loop, self._closing = asyncio.get_running_loop(), None
            self._turn = None if self._turn is None else asyncio.Lock()
        self._check_loop()
        self.is_closed = True
        if self._closing is None:
            self._closing = self.loop.create_task(close())
            await asyncio.shield(self._closing)
        elif not self.is_in_callback:
            await asyncio.wait([self._closing])

    async def close(self) -> None:
        """Wait for the threads to end, but not for one that waits for this; an executor of the caller's goes on."""
        if self._owns_executor:
            shutdown = functools.partial(self.executor.shutdown, wait=not self.is_in_callback)
            await self.loop.run_in_executor(None, shutdown)

    async def _run_inside(self, callback: _RunningCallback, call: Callable[[], _Result]) -> _Result:
        outcome: asyncio.Future[_Result] = self.loop.create_future()

        def job() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - whoever awaits it gets it
                self.loop.call_soon_threadsafe(_settle, outcome, None, error)
            else:
                self.loop.call_soon_threadsafe(_settle, outcome, result, None)

        callback.jobs.put(job)
        return await outcome


def forwarding(
    client: str, method: Callable[Concatenate[Any, _Parameters], _Result]
) -> Callable[Concatenate[Any, _Parameters], Coroutine[Any, Any, _Result]]:
    """Return a method of a client for asyncio that makes this call of the blocking one, which is its attribute."""

    async def call(self: Any, /, *arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        # As it is now: somebody may have wrapped it.
        bound: Callable[_Parameters, _Result] = getattr(getattr(self, client), method.__name__)
        result: _Result = await self._call(bound, *arguments, **keywords)
        return result

    functools.update_wrapper(call, method)
    call.__qualname__ = f"AIO{method.__qualname__}"
    return call


async def _call(function: Callable[..., Any], arguments: tuple[Any, ...], callback: _RunningCallback) -> Any:
    token = _running_callback.set(callback)
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    finally:
        callback.finished = True
        _running_callback.reset(token)


def _settle(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)
