"""Tokens of one sequence to text as they arrive, with its stop strings.

`Text.detokenizer` makes one per choice; whoever forwards the tokens of that choice pushes them.
The deltas joined are the text of all tokens, cut at the first stop, however the tokens were
grouped into pushes. Never blocks; a few microseconds a token.
"""

from collections.abc import Sequence

import msgspec

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.text.stop_strings import StopAutomaton, StopScanner
from baton.router.text.token_text import TextStream


class Delta(msgspec.Struct, frozen=True):
    """What a push adds.

    `token_ids` ends with the token that completed a stop string, if one did. `stop_reason` is
    that stop string, or the id from `stop_token_ids` that ended the sequence; None for all other
    ends, the model's own end of sequence included.
    """

    text: str
    token_ids: Sequence[int]
    stop_reason: str | int | None = None


class Detokenizer:
    """The text state of one choice. After a stop string, `stopped` is True and it stays silent."""

    __slots__ = ("_num_tokens", "_params", "_scanner", "_stop_token_ids", "_stream", "stopped")

    def __init__(
        self, stream: TextStream, params: SamplingParams, automaton: StopAutomaton | None
    ) -> None:
        self._stream = stream
        self._params = params
        self._scanner = StopScanner(automaton) if automaton is not None else None
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._num_tokens = 0
        self.stopped = False

    def push(self, token_ids: Sequence[int], final: FinishReason | None = None) -> Delta:
        """The text that `token_ids` add; `final` says that the sequence ends with them, and why.

        "stop" means that the last of them is the model's end or one of `stop_token_ids`: such a
        token is counted and reported but has no text, unless stops were asked to be included.
        """
        if self.stopped:
            return Delta("", ())
        visible, stop_reason = token_ids, None
        if final == "stop" and token_ids:
            if token_ids[-1] in self._stop_token_ids:
                stop_reason = token_ids[-1]
            if not self._params.include_stop_str_in_output:
                visible = token_ids[:-1]
        if self._scanner is not None:
            return self._scan(self._scanner, token_ids, len(visible), final, stop_reason)
        feed = self._stream.feed
        if final is None and len(token_ids) == 1:
            return Delta(feed(token_ids[0]), token_ids)
        text = "".join([feed(token_id) for token_id in visible])
        if final is not None:
            text += self._stream.flush()
        return Delta(text, token_ids, stop_reason)

    def _scan(
        self,
        scanner: StopScanner,
        token_ids: Sequence[int],
        num_visible: int,
        final: FinishReason | None,
        stop_reason: int | None,
    ) -> Delta:
        """One token at a time: those after a stop string are neither kept nor counted."""
        shown = []
        for index in range(num_visible):
            self._num_tokens += 1
            shown.append(self._show(scanner, self._stream.feed(token_ids[index])))
            if scanner.matched is not None:
                self.stopped = True
                return Delta("".join(shown), token_ids[: index + 1], scanner.matched)
        if final is not None:
            shown.append(self._show(scanner, self._stream.flush()))
            if scanner.matched is not None:
                stop_reason = scanner.matched  # type: ignore[assignment]
            shown.append(scanner.flush())
        return Delta("".join(shown), token_ids, stop_reason)

    def _show(self, scanner: StopScanner, text: str) -> str:
        return scanner.push(
            text,
            # min_tokens holds off stop strings as it holds off the model's own end.
            may_match=self._num_tokens >= self._params.min_tokens,
            include_match=self._params.include_stop_str_in_output,
        )
