"""Turn the tokens of one choice into text as they arrive, and cut it at the first stop string.

`Text.detokenizer` makes one per choice, and the request's stream pushes the choice's tokens. The
deltas join to the text of all tokens up to the first stop, for any grouping of tokens into pushes.
It never blocks, and costs about a microsecond per token.
"""

from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, StopReason
from baton.router.text.stop_strings import StopAutomaton, StopScanner
from baton.router.text.token_text import TextStream


class Detokenizer:
    """The state of the text of the choice with number `index`."""

    __slots__ = ("_index", "_is_stopped", "_num_tokens", "_params", "_scanner", "_stream")

    def __init__(
        self, index: int, stream: TextStream, params: SamplingParams, stops: StopAutomaton | None
    ) -> None:
        self._index = index
        self._stream = stream
        self._params = params
        self._scanner = StopScanner(stops) if stops is not None else None
        self._num_tokens = 0
        self._is_stopped = False

    def push(
        self, token_ids: list[int], final: FinishReason | None = None
    ) -> CompletionOutput | None:
        """Return the text of `token_ids`, or None after a stop string. `final` says why they end.

        "stop" means that the last token is the model's end or one of `stop_token_ids`. That token
        is counted and reported, but has no text unless the request asks to include stops.
        """
        if final is None and self._scanner is None and len(token_ids) == 1:
            return CompletionOutput(self._index, self._stream.feed(token_ids[0]), token_ids)
        if self._is_stopped:
            return None
        num_visible, stop_reason = len(token_ids), None
        if final == "stop" and token_ids:
            if token_ids[-1] in (self._params.stop_token_ids or ()):
                stop_reason = token_ids[-1]
            if not self._params.include_stop_str_in_output:
                num_visible -= 1
        if self._scanner is not None:
            return self._scan(self._scanner, token_ids, num_visible, final, stop_reason)
        text = "".join([self._stream.feed(token_id) for token_id in token_ids[:num_visible]])
        if final is not None:
            text += self._stream.flush()
        return CompletionOutput(self._index, text, token_ids, None, final, stop_reason)

    def _scan(
        self,
        scanner: StopScanner,
        token_ids: list[int],
        num_visible: int,
        final: FinishReason | None,
        stop_reason: StopReason,
    ) -> CompletionOutput:
        """Do the same token by token: tokens after a stop string are neither kept nor counted."""
        shown = []
        for index in range(num_visible):
            self._num_tokens += 1
            shown.append(self._show(scanner, self._stream.feed(token_ids[index])))
            if scanner.matched is not None:
                token_ids = token_ids[: index + 1]
                break
        else:
            if final is not None:
                shown.append(self._show(scanner, self._stream.flush()))
                if scanner.matched is None:
                    shown.append(scanner.flush())
        if scanner.matched is not None:
            self._is_stopped = True
            final, stop_reason = "stop", scanner.matched
        return CompletionOutput(self._index, "".join(shown), token_ids, None, final, stop_reason)

    def _show(self, scanner: StopScanner, text: str) -> str:
        return scanner.push(
            text,
            # min_tokens delays stop strings just as it delays the model's own end.
            may_match=self._num_tokens >= self._params.min_tokens,
            include_match=self._params.include_stop_str_in_output,
        )
