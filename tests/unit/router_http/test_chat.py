"""Chats: templates in their sandbox, and the endpoint over them."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.protocol.errors import ConfigError, RequestError
from baton.router.text.chat_template import ChatTemplate
from tests.support.http_bench import TEXT, hello, served
from tests.support.refusals import raises
from tests.support.small_tokenizers import END

SOURCE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "  {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "[{{ m['role'] }}]{{ m['content'] }}" + END + "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)


def shown(
    template: ChatTemplate, messages: list[dict[str, object]], **options: Any
) -> str:
    """Return a prompt that has all that was sent."""
    prompt = template.render(messages, **options)
    template.check_shown(prompt, messages, **options)
    return prompt


TURNS: list[dict[str, object]] = [{"role": "user", "content": "hello <&>"}]
BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
}
OF_PARTS = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
OF_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)


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


def test_options_replace_special_tokens_as_in_transformers():
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}
    )
    assert template.render(TURNS, options={"bos_token": "Q"}) == "Qhello <&>"


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
    path = folder_with(
        tmp_path, {"chat_template": "{{ bos_token }}A" + BODY, "bos_token": token}
    )
    found = ChatTemplate.load(path)
    assert found.render(TURNS) == "<s>Ahello <&>"
    named = [
        {"name": "rag", "template": "R"},
        {"name": "default", "template": "D" + BODY},
    ]
    found = ChatTemplate.load(folder_with(tmp_path, {"chat_template": named}))
    assert found.render(TURNS) == "Dhello <&>"
    (tmp_path / "chat_template.jinja").write_text("J" + BODY)
    found = ChatTemplate.load(path)
    assert found.render(TURNS) == "Jhello <&>"


def test_named_tokens_are_those_of_the_files_that_transformers_reads(tmp_path):
    source = "{{ bos_token }}|{{ sep_token }}|{{ pad_token is defined }}" + BODY
    older = {"chat_template": source, "bos_token": "<old>"}
    map_file = tmp_path / "special_tokens_map.json"
    map_file.write_text('{"bos_token": "<s>", "sep_token": {"content": "<sep>"}}')
    assert (
        ChatTemplate.load(folder_with(tmp_path, older)).render(TURNS)
        == "<s>|<sep>|Falsehello <&>"
    )
    newer = {**older, "added_tokens_decoder": {}, "pad_token": "<pad>"}
    assert (
        ChatTemplate.load(folder_with(tmp_path, newer)).render(TURNS)
        == "<old>||Truehello <&>"
    )


def test_json_in_a_template_takes_the_options_that_transformers_takes():
    source = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}"
    assert ChatTemplate(source, {}).render([]) == '{"a": 1, "b": "\\u00e9"}'
    plain = ChatTemplate("{{ ['é', 1] | tojson(separators=(',', ':')) }}", {})
    assert plain.render([]) == '["é",1]'


def test_a_chosen_file_takes_the_place_of_the_folders_template(tmp_path):
    path = folder_with(tmp_path, {"chat_template": "T", "bos_token": "<s>"})
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}M" + BODY)
    found = ChatTemplate.load(path, str(tmp_path / "mine.jinja"))
    assert found.render(TURNS) == "<s>Mhello <&>"
    with pytest.raises(ConfigError, match=r"no chat template .*none\.jinja"):
        ChatTemplate.load(path, str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("is_file", [False, True])
def test_tools_take_the_template_that_a_folder_has_for_them(is_file, tmp_path):
    with_tools = "{{ tools[0].function.name }}:" + BODY
    named = [
        {"name": "default", "template": BODY},
        {"name": "tool_use", "template": with_tools},
    ]
    path = folder_with(tmp_path, {"chat_template": BODY if is_file else named})
    if is_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
            with_tools
        )
    found = ChatTemplate.load(path)
    assert found.render(TURNS, tools=[TOOL]) == "add:hello <&>"
    assert found.render(TURNS) == "hello <&>"
    assert found.tools_source == with_tools


def test_tools_that_a_template_does_not_show_are_refused():
    with raises(RequestError, "unsupported", "tools"):
        shown(ChatTemplate(BODY, {}), TURNS, tools=[TOOL])
    after_two = "{% if messages | length > 1 %}{{ tools }}{% endif %}" + BODY
    assert "add" in shown(ChatTemplate(after_two, {}), [*TURNS, *TURNS], tools=[TOOL])
    with raises(RequestError, "unsupported", "tools"):
        shown(ChatTemplate(after_two, {}), TURNS, tools=[TOOL])


@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [(BODY, "a", "a\nb"), (OF_PARTS, "<a>", "<a><b>"), (OF_BOTH, "a", "<a><b>")],
)
def test_contents_have_the_form_that_the_template_reads(source, of_text, of_parts):
    parts = [{"type": "text", "text": text} for text in "ab"]
    template = ChatTemplate(source, {})
    assert template.render([{"role": "user", "content": "a"}]) == of_text
    assert template.render([{"role": "user", "content": parts}]) == of_parts


ONLY_USERS = (
    "{% for m in messages if m.role == 'user' %}{{ m.content | trim }}{% endfor %}"
)
LOST: list[tuple[str, list[dict[str, object]], str]] = [
    (ONLY_USERS, [{"role": "system", "content": "e"}, *TURNS], "messages[0].content"),
    (
        ONLY_USERS,
        [*TURNS, {"role": "critic", "content": "hello"}],
        "messages[1].content",
    ),
    ("{{ messages[0].content }}", [*TURNS, *TURNS], "messages[1].content"),
    (
        BODY,
        [*TURNS, {"role": "assistant", "content": "", "tool_calls": [TOOL]}],
        "messages[1].tool_calls",
    ),
    ("{{ messages[0].content[0] }}", TURNS, "messages[0].content"),
]


@pytest.mark.parametrize(("source", "messages", "field"), LOST)
def test_what_would_not_reach_the_prompt_is_refused_by_name(source, messages, field):
    with pytest.raises(RequestError, match="leaves out") as caught:
        shown(ChatTemplate(source, {}), messages)
    assert caught.value.param == field


def test_what_a_template_changes_or_leaves_out_on_purpose_is_no_loss():
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    assert shown(ChatTemplate(upper, {}), TURNS) == "HELLO <&>"
    answer = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    thought = {
        "role": "assistant",
        "content": "<think>why</think>so",
        "reasoning": "why",
    }
    assert shown(ChatTemplate(answer, {}), [*TURNS, thought]) == "hello <&>so"
    assert (
        shown(ChatTemplate(ONLY_USERS, {}), [{"role": "system", "content": " "}]) == ""
    )


CALLED: list[dict[str, object]] = [
    *TURNS,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0123456789",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "2"},
]
OF_CALLS = (
    "{%% for m in messages %%}{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}"
    "{{ m.content or '' }}{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (
            OF_CALLS % "{{ c.function.name + c.function.arguments }}",
            'hello <&>add{"a": 1}2',
        ),
        (
            OF_CALLS % "{{ c.function.name }}{{ c.function.arguments | tojson }}",
            'hello <&>add{"a": 1}2',
        ),
        (
            OF_CALLS % "{{ c.function.name }}{{ c.function.arguments }}",
            'hello <&>add{"a": 1}2',
        ),
        (
            "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "hello <&>add2",
        ),
        (
            OF_CALLS
            % "{{ c.function.name }}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
            "{% endif %}",
            "hello <&>add2",
        ),
    ],
)
def test_calls_of_earlier_turns_have_the_form_that_the_template_reads(source, prompt):
    assert shown(ChatTemplate(source, {}), CALLED) == prompt


def test_ids_of_calls_are_shortened_alike_in_calls_and_results():
    source = (
        OF_CALLS
        % "{{ c.id }}{% if c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
    )
    source += "{{ messages[-1].tool_call_id }}"
    prompt = ChatTemplate(source, {}).render(CALLED)
    assert prompt[9:18] == prompt[-9:] != "call_0123456789"[:9]


def test_words_of_the_system_behind_the_first_are_the_users_where_a_template_refuses_them():
    first = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}{{ m.role }}:{{ m.content }} {% endfor %}"
    )
    turns = [
        {"role": "system", "content": "a"},
        *TURNS,
        {"role": "system", "content": "b"},
    ]
    assert shown(ChatTemplate(first, {}), turns) == "system:a user:hello <&> user:b "


def test_developers_are_the_system_of_templates_that_do_not_know_them():
    turn: dict[str, object] = {"role": "developer", "content": "brief"}
    assert (
        ChatTemplate("{{ messages[0].role }}" + BODY, {}).render([turn])
        == "systembrief"
    )
    knowing = "{# developer #}{{ messages[0].role }}" + BODY
    assert ChatTemplate(knowing, {}).render([turn]) == "developerbrief"


TRIMMED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("source", [SOURCE, TRIMMED])
@pytest.mark.parametrize("content", ["the end", "end " + END, "the ", "", "the the"])
def test_a_last_message_stays_open_for_the_model_to_continue(source, content):
    turns = [*TURNS, {"role": "assistant", "content": content}]
    prompt = ChatTemplate(source, {}).open_ended(turns)
    assert prompt.endswith(f"[user]hello <&>{END}[assistant]{content}")


def test_the_last_part_of_a_last_message_stays_open():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        ChatTemplate(OF_PARTS, {}).open_ended([{"role": "user", "content": parts}])
        == "<a><b"
    )


def test_a_message_whose_end_is_not_shown_cannot_be_continued():
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ messages[0].content[:5] }}", {}).open_ended(TURNS)
    assert (caught.value.code, caught.value.param) == (
        "unsupported",
        "continue_final_message",
    )


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


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    + END
    + "{% endfor %}[assistant]"
)


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


@served(script=hello, chat_template=ChatTemplate(CHAT, {}))
async def test_a_chat_can_go_on_with_its_last_message(bench, engine):
    turns = [*TURNS, {"role": "assistant", "content": "the"}]
    body = {
        "messages": turns,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    expected = TEXT.encode_now(f"[user]hello <&>{END}[assistant]the")
    assert (await bench.post(body, "/v1/chat/completions")).status == 200
    assert engine.streams[0].prompt_token_ids == expected
    assert (await bench.post(body, "/tokenize")).json["tokens"] == expected
    both = {**body, "add_generation_prompt": True}
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = await bench.post(both, path)
        assert (refused.status, refused.error["param"]) == (
            400,
            "continue_final_message",
        )


@served(script=hello, chat_template=ChatTemplate(CHAT, {}))
async def test_a_prompt_keeps_its_last_tokens(bench, engine):
    chat: dict[str, object] = {"messages": TURNS}
    whole = TEXT.encode_now(f"[user]hello <&>{END}[assistant]")
    bodies = {
        "/v1/chat/completions": (chat, whole),
        "/v1/responses": ({"input": "hello <&>"}, whole),
        "/v1/completions": (
            {"prompt": "hello the end"},
            TEXT.encode_now("hello the end"),
        ),
    }
    for path, (body, token_ids) in bodies.items():
        for kept in (1, 2, 50):
            await bench.post({**body, "truncate_prompt_tokens": kept}, path)
            assert engine.streams[-1].prompt_token_ids == token_ids[-kept:]
    length = engine.get_model_config().max_model_len
    longest = {
        "prompt": [5] * (length + 9),
        "truncate_prompt_tokens": -1,
        "max_tokens": 3,
    }
    await bench.post(longest)
    assert len(engine.streams[-1].prompt_token_ids) == length - 3
    echoed = {
        "prompt": "hello the end",
        "truncate_prompt_tokens": 1,
        "echo": True,
        "max_tokens": 0,
    }
    assert (await bench.post(echoed)).json["choices"][0]["text"] == " end"
    num_streams = len(engine.streams)
    for wrong in ({"truncate_prompt_tokens": length + 1}, {"max_tokens": length}):
        refused = await bench.post({**longest, **wrong})
        assert (refused.status, refused.error["param"]) == (
            400,
            "truncate_prompt_tokens",
        )
    assert len(engine.streams) == num_streams


@served()
async def test_a_model_without_a_template_says_so(bench):
    body: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]}
    reply = await bench.post(body, "/v1/chat/completions")
    assert (reply.status, reply.error["code"]) == (404, "no_chat_template")
