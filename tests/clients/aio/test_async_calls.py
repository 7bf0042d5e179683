"""Calls of a blocking client from a loop: in turn, callbacks on the loop, and their own calls in the same thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from txnstore.clients.aio.calls import AsyncCalls

WAIT_SECONDS = 60


def make_calls(max_workers=2, executor=None, *, one_at_a_time=True):
    return AsyncCalls(max_workers, executor, name="calls", one_at_a_time=one_at_a_time)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS))


def test_a_call_runs_in_another_thread_and_its_result_comes_back():
    async def scenario():
        calls = make_calls()
        thread = await calls.run(threading.current_thread)
        await calls.close()
        assert thread is not threading.current_thread()
        assert not thread.is_alive()

    run(scenario())


def test_an_error_comes_back():
    async def scenario():
        calls = make_calls()
        with pytest.raises(ZeroDivisionError):
            await calls.run(lambda: 1 / 0)
        # The turn was given back.
        assert await calls.run(lambda: 1) == 1
        await calls.close()

    run(scenario())


def test_calls_wait_for_their_turn():
    async def scenario():
        calls = make_calls()
        running = threading.Lock()

        def alone():
            assert running.acquire(blocking=False)
            running.release()

        await asyncio.gather(*(calls.run(alone) for _ in range(50)))
        await calls.close()

    run(scenario())


def test_a_caller_has_its_result_before_the_next_call_begins():
    async def scenario():
        calls = make_calls()
        order: list[int] = []

        async def call(number):
            begun_after = await calls.run(lambda: list(order))
            order.append(number)
            return begun_after

        seen = await asyncio.gather(*(call(number) for number in range(50)))
        assert seen == [list(range(number)) for number in range(50)]
        await calls.close()

    run(scenario())


def test_calls_may_run_side_by_side():
    async def scenario():
        calls = make_calls(2, one_at_a_time=False)
        both = threading.Barrier(2)
        await asyncio.gather(*(calls.run(both.wait, WAIT_SECONDS) for _ in range(2)))
        await calls.close()

    run(scenario())


def test_a_cancelled_call_keeps_its_turn_until_it_has_ended():
    async def scenario():
        calls = make_calls()
        begun, end, ended = threading.Event(), threading.Event(), threading.Event()

        def long_call():
            begun.set()
            assert end.wait(WAIT_SECONDS)
            ended.set()

        call = asyncio.create_task(calls.run(long_call))
        await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        following = asyncio.create_task(calls.run(ended.is_set))
        await asyncio.sleep(0)
        assert not following.done()
        end.set()
        assert await following is True
        await calls.close()

    run(scenario())


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_is_not_made(one_at_a_time):
    async def scenario():
        calls = make_calls(1, one_at_a_time=one_at_a_time)
        end = threading.Event()
        busy = calls.executor.submit(end.wait, WAIT_SECONDS)
        made: list[int] = []
        call = asyncio.create_task(calls.run(made.append, 1))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        end.set()
        await asyncio.wrap_future(busy)
        # It has given its turn back.
        await calls.run(made.append, 2)
        assert made == [2]
        await calls.close()

    run(scenario())


def test_a_callback_runs_on_the_loop_whether_it_is_a_coroutine_function_or_not():
    async def scenario():
        calls = make_calls()
        threads = []

        def plain(value):
            threads.append(threading.current_thread())
            return value + 1

        async def coroutine(value):
            threads.append(threading.current_thread())
            await asyncio.sleep(0)
            return value + 1

        assert await calls.run(calls.callback(plain), 1) == 2
        assert await calls.run(calls.callback(coroutine), 1) == 2
        assert threads == [threading.current_thread()] * 2
        await calls.close()

    run(scenario())


def test_the_error_of_a_callback_comes_out_of_the_call():
    async def failing():
        raise ValueError("why")

    async def scenario():
        calls = make_calls()
        with pytest.raises(ValueError, match="why"):
            await calls.run(calls.callback(failing))
        await calls.close()

    run(scenario())


def test_a_callback_calls_the_client_again_in_the_thread_that_waits_for_it():
    async def scenario():
        # One thread is enough: the inner call takes no other.
        calls = make_calls(1)
        holds = threading.RLock()

        def inner():
            assert holds.acquire(blocking=False)
            holds.release()
            return threading.current_thread()

        async def callback():
            return [await calls.run(inner) for _ in range(2)]

        def outer():
            with holds:
                return [threading.current_thread(), *calls.callback(callback)()]

        threads = await calls.run(outer)
        assert len(threads) == 3
        assert len(set(threads)) == 1
        await calls.close()

    run(scenario())


def test_calls_that_a_callback_makes_at_once_are_made_one_after_the_other():
    async def scenario():
        calls = make_calls()
        order: list[int] = []

        async def callback():
            await asyncio.gather(*(calls.run(order.append, number) for number in range(10)))

        await calls.run(calls.callback(callback))
        assert order == list(range(10))
        await calls.close()

    run(scenario())


def test_the_error_of_an_inner_call_comes_to_the_callback():
    async def scenario():
        calls = make_calls()

        async def callback():
            with pytest.raises(ZeroDivisionError):
                await calls.run(lambda: 1 / 0)
            return "caught"

        assert await calls.run(calls.callback(callback)) == "caught"
        await calls.close()

    run(scenario())


def test_a_task_that_outlives_its_callback_waits_for_its_turn():
    async def scenario():
        calls = make_calls()
        finish = asyncio.Event()
        tasks = []

        async def later():
            await finish.wait()
            return await calls.run(lambda: "done")

        async def callback():
            tasks.append(asyncio.create_task(later()))

        await calls.run(calls.callback(callback))
        finish.set()
        assert await tasks[0] == "done"
        await calls.close()

    run(scenario())


def test_a_callback_of_one_client_calls_another_one_the_usual_way():
    async def scenario():
        one, other = make_calls(1), make_calls(1)

        async def callback():
            return await other.run(threading.current_thread)

        def outer():
            return threading.current_thread(), one.callback(callback)()

        mine, others = await one.run(outer)
        assert mine is not others
        await one.close()
        await other.close()

    run(scenario())


def test_a_callback_does_not_wait_for_a_loop_that_is_gone():
    loop = asyncio.new_event_loop()

    async def make():
        return make_calls()

    calls = loop.run_until_complete(make())
    failures: list[str] = []
    thread = threading.Thread(target=call_and_note, args=(calls.callback(nothing), failures))
    # The loop stands still: the callback is accepted and never run.
    with pytest.warns(RuntimeWarning, match="never awaited"):
        close_while_waiting(loop, thread)
    assert failures == ["the event loop was closed while a callback ran on it"]
    calls.executor.shutdown()


def nothing():
    """Stand for a callback."""


def call_and_note(callback, failures):
    try:
        callback()
    except RuntimeError as error:
        failures.append(str(error))


def close_while_waiting(loop, thread):
    thread.start()
    for _ in range(WAIT_SECONDS * 1000):
        if loop._ready:
            break
        thread.join(0.001)
    loop.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_an_executor_of_the_callers_is_used_and_left_running():
    async def scenario(executor):
        calls = make_calls(executor=executor)
        assert calls.executor is executor
        assert (await calls.run(threading.current_thread)).name.startswith("mine")
        await calls.close()

    with ThreadPoolExecutor(1, "mine") as executor:
        run(scenario(executor))
        assert executor.submit(lambda: 1).result(WAIT_SECONDS) == 1


def test_without_threads_there_are_no_calls():
    async def scenario():
        with pytest.raises(ValueError, match="max_workers must be at least 1"):
            make_calls(0)

    run(scenario())


def test_a_loop_has_to_run():
    with pytest.raises(RuntimeError, match="no running event loop"):
        make_calls()


def test_the_callbacks_of_a_configuration_are_wrapped_in_a_copy():
    async def scenario():
        calls = make_calls()

        def function():
            """Stand for a callback."""

        given = {"error_cb": function, "on_commit": function, "stats_cb": None, "group.id": "g"}
        before = dict(given)
        wrapped = calls.with_callbacks(given, "on_commit")
        assert given == before
        assert wrapped["error_cb"] is not function
        assert wrapped["on_commit"] is not function
        assert (wrapped["stats_cb"], wrapped["group.id"]) == (None, "g")
        await calls.close()

    run(scenario())
