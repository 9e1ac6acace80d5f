"""Bodies become the token ids that a model gets."""

import json

import pytest
from tokenizers import processors

from baton.router.core.health import ServedModel
from baton.router.http.api.prepare import tokenized, unpacked
from baton.router.http.api.schema import parse_chat, parse_completion
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.detokenizer import decoding_of
from baton.router.text.tokenizer import Text
from tests.support.small_tokenizers import END, small_tokenizer

MODEL = ServedModel("tiny", "/tiny", "f", "l", 64, 400, 16)
PLAIN = ChatTemplate("{{ messages[0].content }}", {})


def text_that_begins_with_a_token() -> Text:
    tokenizer = small_tokenizer("byte_level")
    special = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", None, special)
    return Text(tokenizer, decoding_of(tokenizer))


@pytest.mark.parametrize(
    ("parse", "body", "adds_by_default"),
    [
        (parse_completion, {"prompt": "hello"}, True),
        (parse_chat, {"messages": [{"role": "user", "content": "hello"}]}, False),
    ],
    ids=["completion", "chat"],
)
def test_special_tokens_are_added_by_default_or_as_a_body_says(
    parse, body, adds_by_default
):
    text = text_that_begins_with_a_token()
    ids = text.encode_now("hello", False)
    first = text.encode_now("", True)
    for given, is_added in ((None, adds_by_default), (True, True), (False, False)):
        parsed = parse(json.dumps({**body, "add_special_tokens": given}).encode())
        (prompt,) = tokenized(parsed, MODEL, text, PLAIN).packed_prompts
        assert unpacked(prompt) == (first + ids if is_added else ids)


def test_a_prompt_that_is_cut_may_be_longer_than_the_model_takes():
    text = text_that_begins_with_a_token()
    long = "hello world " * 5000
    body = {"prompt": long, "truncate_prompt_tokens": 8}
    parsed = parse_completion(json.dumps(body).encode())
    (prompt,) = tokenized(parsed, MODEL, text, None).packed_prompts
    assert unpacked(prompt) == text.encode_now(long)[-8:]
