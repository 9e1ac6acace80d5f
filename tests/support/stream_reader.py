"""A client that reads streams of a cluster on a thread, and keeps what it was told."""

import threading
from http.client import HTTPException

from tests.support.cluster import Cluster

DEADLINE_S = 240.0


class StreamReader:
    """Reads one stream. With `again`, it asks for the next one until `join`."""

    def __init__(
        self, cluster: Cluster, body: dict[str, object], *, again: bool = False
    ) -> None:
        self.texts: list[str] = []  # of each stream
        self.token_ids: list[int] = []  # of all streams
        self._end: BaseException | None = None
        self._cluster = cluster
        self._body = body
        self._again = again
        self._num_events = 0
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for_more(self, num_events: int) -> None:
        """Wait for so many more events. Raises the error with which the stream broke."""
        with self._moved:
            goal = self._num_events + num_events
            moved = self._moved.wait_for(
                lambda: self._end or self._num_events >= goal, DEADLINE_S
            )
        assert moved, "the stream stands still"
        if self._end is not None:
            raise self._end

    def join(self) -> BaseException | None:
        """Wait for the end of the stream that runs. Return its error, if it broke."""
        self._again = False
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the stream stands still"
        return self._end

    def _read(self) -> None:
        end: BaseException | None = None
        try:
            self._read_one()
            while self._again:
                self._read_one()
        except (AssertionError, OSError, HTTPException, ValueError) as error:
            end = error
        with self._moved:
            self._end = end
            self._moved.notify_all()

    def _read_one(self) -> None:
        self.texts.append("")
        for event in self._cluster.stream(**self._body):
            assert "error" not in event, event
            with self._moved:
                for choice in event.get("choices") or []:  # type: ignore[attr-defined]
                    self.texts[-1] += choice["text"]
                    self.token_ids += choice.get("token_ids", ())
                self._num_events += 1
                self._moved.notify_all()
