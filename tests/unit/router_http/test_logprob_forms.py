"""Log probabilities in OpenAI's form."""

from baton.router.http.api.openai_chunks import LogprobForms
from baton.router.outputs import Logprob

FIRST = b"\xf0\x9f"
SECOND = b"\x90\x88"
UNKNOWN = "\ufffd".encode()
WORD = b" word"


def found(*tokens: bytes) -> dict[int, Logprob]:
    """Return the log probabilities of tokens with the ids 0, 1, 2, ..., of falling rank."""
    return {
        token_id: Logprob(
            -float(token_id), token_id + 1, token.decode(errors="replace"), token
        )
        for token_id, token in enumerate(tokens)
    }


ROWS = [(0, found(FIRST, SECOND, UNKNOWN, WORD))]


def test_each_token_of_a_chat_has_its_own_bytes():
    (row,) = LogprobForms(4).of_chat(ROWS)["content"]
    assert bytes(row["bytes"]) == FIRST
    assert [bytes(one["bytes"]) for one in row["top_logprobs"]] == [
        FIRST,
        SECOND,
        UNKNOWN,
        WORD,
    ]


def test_parts_of_characters_have_names_of_their_own_in_a_completion():
    columns = LogprobForms(4).columns(ROWS)
    assert columns.tokens == [r"bytes:\xf0\x9f"]
    expected = {
        r"bytes:\xf0\x9f": 0.0,
        r"bytes:\x90\x88": -1.0,
        "\ufffd": -2.0,
        " word": -3.0,
    }
    assert columns.top_logprobs == [expected]
