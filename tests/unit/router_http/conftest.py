"""Fixtures of the tests that run a router as a process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.protocol.config import ClusterConfig, LogConfig, ModelConfig, RouterConfig
from tests.support.router_process import Router, StartRouter
from tests.support.small_tokenizers import write_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    path = write_tokenizer(tmp_path / "tiny")
    return ClusterConfig(
        model=ModelConfig(path=path),
        router=RouterConfig(
            port=0, control=f"ipc://{tmp_path}/control", local_prefill="never"
        ),
        log=LogConfig(stats_s=0.2),
    )


@pytest.fixture
def start() -> Iterator[StartRouter]:
    """Starts routers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start_one(
            config: ClusterConfig, files: tuple[int, int] | None = None
        ) -> Router:
            router = Router(config, files)
            stack.callback(router.close)
            return router

        yield start_one
