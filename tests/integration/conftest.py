"""One cluster of real processes for the tests that kill nothing of it, in each session and worker.

Tests compare what its counters and records gain, and use prompts of a salt of their own: others
have used it before.
"""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.oracle import prompt

NUM_BLOCKS = 500  # 192 tokens less than the model takes


class Collector(ThreadingHTTPServer):
    """Takes the spans that a router sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def of(self, trace: str) -> list[Span]:
        """The spans of a trace in the order of their starts."""
        spans = [span for span in self.spans if span.trace_id.hex() == trace]
        return sorted(
            spans, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano)
        )


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        assert isinstance(self.server, Collector)
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
        pass


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Cluster]:
    config = tiny_cluster(
        model_folder("llama", eos_token_id=2),
        cache={"num_blocks": NUM_BLOCKS},
        engine={
            "max_num_batched_tokens": 64,
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
        },
        router={"local_prefill": "never", "otlp_traces_endpoint": collector.url},
        node={"http": "127.0.0.1:0"},
    )
    with Cluster(tmp_path_factory.mktemp("cluster"), config) as cluster:
        # The second finds the first one's blocks in the prefix caches.
        for _ in range(2):
            cluster.complete(
                prompt=prompt(65), max_tokens=8, temperature=0, ignore_eos=True
            )
        yield cluster
