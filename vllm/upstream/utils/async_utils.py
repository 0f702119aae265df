"""Coroutines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import ParamSpec

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")


def make_async(func: Callable[P, T], executor: Executor | None = None) -> Callable[P, Awaitable[T]]:
    """A function that runs `func` in a thread, of `executor` or of the event loop, and can be awaited."""

    def awaitable(*args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        import asyncio
        import functools

        return asyncio.get_running_loop().run_in_executor(executor, functools.partial(func, *args, **kwargs))

    return awaitable


def run_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Call a function in the loop's thread: at once where this is it."""
    if in_loop(loop):
        function(*args)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def in_loop(event_loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is called from the loop."""
    import asyncio

    try:
        return asyncio.get_running_loop() is event_loop
    except RuntimeError:
        return False


async def merge_async_iterators(*iterators: AsyncGenerator[T, None]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the generator, what it gave), as they come. All of them are closed when this one ends or is closed."""
    import asyncio

    waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in iterators:
            await each.aclose()


async def collect_from_async_generator(iterator: AsyncGenerator[T, None]) -> list[T]:
    """All that it gives."""
    return [item async for item in iterator]
