"""Chats: templates in their sandbox, and the endpoint over them."""

import json
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError, RequestError
from baton.router.text.tokenizer import ChatTemplate
from tests.support.http_bench import TEXT, hello, served
from tests.support.small_tokenizers import END

SOURCE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "[{{ m['role'] }}]{{ m['content'] }}" + END + "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)
TURNS: list[dict[str, object]] = [{"role": "user", "content": "hello <&>"}]


def folder_with(folder: Path, config: dict[str, object]) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_template_gets_turns_special_tokens_and_options():
    template = ChatTemplate(SOURCE, {"bos_token": "<s>"})
    expected = f"<s>\n[user]hello <&>{END}"
    assert template.render(TURNS).replace("<s>[", "<s>\n[") == f"{expected}[assistant]"
    said = template.render(TURNS, add_generation_prompt=False, options={"mood": "!"})
    assert said.replace("<s>[", "<s>\n[") == f"{expected}!"


def test_options_cannot_take_the_place_of_the_messages():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(TURNS, options={"messages": []}) == "hello <&>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content / 0 }}",
        "{% for a in range(10**9) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_the_request(source):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(TURNS)
    assert caught.value.param == "messages"


def test_templates_are_found_where_model_folders_keep_them(tmp_path):
    assert ChatTemplate.load(str(tmp_path)) is None
    token = {"content": "<s>", "lstrip": False}
    path = folder_with(tmp_path, {"chat_template": "{{ bos_token }}A", "bos_token": token})
    found = ChatTemplate.load(path)
    assert found.render(TURNS) == "<s>A"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    found = ChatTemplate.load(folder_with(tmp_path, {"chat_template": named}))
    assert found.render(TURNS) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    found = ChatTemplate.load(path)
    assert found.render(TURNS) == "J"


def test_named_tokens_are_those_of_the_files_that_transformers_reads(tmp_path):
    source = "{{ bos_token }}|{{ sep_token }}|{{ pad_token is defined }}"
    older = {"chat_template": source, "bos_token": "<old>"}
    map_file = tmp_path / "special_tokens_map.json"
    map_file.write_text('{"bos_token": "<s>", "sep_token": {"content": "<sep>"}}')
    assert ChatTemplate.load(folder_with(tmp_path, older)).render(TURNS) == "<s>|<sep>|False"
    newer = {**older, "added_tokens_decoder": {}, "pad_token": "<pad>"}
    assert ChatTemplate.load(folder_with(tmp_path, newer)).render(TURNS) == "<old>||True"


def test_json_in_a_template_takes_the_options_that_transformers_takes():
    source = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}"
    assert ChatTemplate(source, {}).render(TURNS) == '{"a": 1, "b": "\\u00e9"}'
    plain = ChatTemplate("{{ ['é', 1] | tojson(separators=(',', ':')) }}", {})
    assert plain.render(TURNS) == '["é",1]'


def test_a_chosen_file_takes_the_place_of_the_folders_template(tmp_path):
    path = folder_with(tmp_path, {"chat_template": "T", "bos_token": "<s>"})
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}M")
    found = ChatTemplate.load(path, str(tmp_path / "mine.jinja"))
    assert found.render(TURNS) == "<s>M"
    with pytest.raises(ConfigError, match=r"no chat template .*none\.jinja"):
        ChatTemplate.load(path, str(tmp_path / "none.jinja"))


def test_marks_for_training_change_nothing():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render(TURNS) == "hello <&>"


def test_a_refusal_of_a_template_repeats_little():
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}", {})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert len(caught.value.message) < 300


def test_a_template_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(ConfigError, match="template"):
        ChatTemplate.load(folder_with(tmp_path, {"chat_template": "{% for %}"}))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="template"):
        ChatTemplate.load(str(tmp_path))


CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + END + "{% endfor %}[assistant]"


@served(script=hello, chat_template=ChatTemplate(CHAT, {}))
async def test_a_chat_is_a_completion_of_its_rendered_template(bench, engine):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the end"}]}
    whole = (await bench.post({**body}, "/v1/chat/completions")).json
    expected = TEXT.encode_now(f"[user]the end{END}[assistant]")
    assert engine.streams[0].prompt_token_ids == expected
    assert engine.streams[0].params.max_tokens is None
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    reply = await bench.post({**body, "stream": True}, "/v1/chat/completions")
    chunks = [json.loads(data) for _, data in reply.events if data != "[DONE]"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    joined = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert joined == message["content"]
    assert joined
    assert chunks[-1]["object"] == "chat.completion.chunk"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@served()
async def test_a_model_without_a_template_says_so(bench):
    body: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]}
    reply = await bench.post(body, "/v1/chat/completions")
    assert (reply.status, reply.error["code"]) == (404, "no_chat_template")
