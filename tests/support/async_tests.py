"""Makes tests that pytest can run out of async ones, some of which want a bench as an argument."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

AsyncTest = Callable[..., Awaitable[None]]
Test = Callable[..., None]


def on_a_loop(test: AsyncTest) -> Test:
    """Run an async test on an event loop of its own."""

    @functools.wraps(test)
    def call(**arguments: object) -> None:
        asyncio.run(test(**arguments))  # type: ignore[arg-type]

    return call


def with_bench(
    *names: str, run: Callable[[AsyncTest, Path], None]
) -> Callable[[AsyncTest], Test]:
    """`run` gets a folder and something to await, which it calls with a value for each of `names`.

    The test gets those of them that it has as arguments. Its other arguments are fixtures or
    parameters, which pytest fills in.
    """

    def decorate(test: AsyncTest) -> Test:
        arguments = inspect.signature(test).parameters

        def call(*, tmp_path: Path, **others: object) -> None:
            async def use(*values: object) -> None:
                given = dict(zip(names, values, strict=True))
                await test(
                    **others,
                    **{name: given[name] for name in names if name in arguments},
                )

            run(use, tmp_path)

        wanted = [name for name in arguments if name not in names]
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in (*wanted, "tmp_path")
            ]
        )
        call.__name__ = test.__name__
        call.__doc__ = test.__doc__
        call.__module__ = test.__module__
        return call

    return decorate
