import json

import pytest

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import cache_salt_of, parse_request, prompts_of


def prompts(path: str, body: object):
    return prompts_of(parse_request(ENDPOINTS[path], json.dumps(body).encode()))


def chat(*messages, **fields):
    (prompt,) = prompts("/v1/chat/completions", {"model": "m", "messages": list(messages), **fields})
    return prompt.data


def user(content):
    return {"role": "user", "content": content}


def test_a_conversation_continues_its_own_earlier_turns():
    first = [{"role": "system", "content": "Be brief."}, user("One?")]
    second = [*first, {"role": "assistant", "content": "1"}, user("Two?")]

    assert chat(*second).startswith(chat(*first))


def test_tools_come_before_messages_in_any_order_of_fields():
    tools = [{"type": "function", "function": {"name": "f"}}]
    raw = json.dumps({"messages": [user("hi")], "tools": tools}).encode()
    other = json.dumps({"tools": tools, "messages": [user("hi")]}).encode()
    endpoint = ENDPOINTS["/v1/chat/completions"]

    one, two = prompts_of(parse_request(endpoint, raw)), prompts_of(parse_request(endpoint, other))

    assert one == two
    assert one[0].data.index(b'"f"') < one[0].data.index(b"hi")


def test_key_order_and_spaces_within_a_message_do_not_matter():
    endpoint = ENDPOINTS["/v1/chat/completions"]
    one = prompts_of(parse_request(endpoint, b'{"messages":[{"role":"user","content":"hi"}]}'))
    two = prompts_of(parse_request(endpoint, b'{"messages": [ {"content" : "hi", "role" :"user"} ]}'))

    assert one == two


def test_a_text_part_counts_like_the_same_text():
    assert chat(user("hello")) == chat(user([{"type": "text", "text": "hello"}]))


def test_an_image_counts_by_its_hash():
    def with_image(data):
        url = {"url": "data:image/png;base64," + data * 10_000}
        return chat(user([{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]))

    assert with_image("A") == with_image("A")
    assert with_image("A") != with_image("B")
    assert len(with_image("A")) < 200


def a_result(content):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}


@pytest.mark.parametrize("wrap", [str, lambda text: [{"type": "text", "text": text}]], ids=["text", "parts"])
def test_the_text_of_a_tools_result_counts_in_full(wrap):
    one, two = (chat(user([a_result(wrap(end + "word " * 10_000))])) for end in "ab")
    assert len(one) > 50_000
    assert one != two


def test_the_input_of_a_tools_call_counts_in_full():
    call = {"type": "tool_use", "id": "toolu_1", "name": "Write", "input": {"text": "word " * 10_000}}
    assert len(chat({"role": "assistant", "content": [call]})) > 50_000


def test_an_image_in_a_tools_result_counts_by_its_hash():
    def with_image(data):
        source = {"type": "base64", "media_type": "image/png", "data": data * 10_000}
        text = {"type": "text", "text": "word " * 1_000}
        return chat(user([a_result([text, {"type": "image", "source": source}, text])]))

    assert with_image("A") == with_image("A")
    assert with_image("A") != with_image("B")
    assert 10_000 < len(with_image("A")) < 11_000


def test_results_within_results_are_not_read_further():
    content = [{"type": "text", "text": "word " * 1_000}]
    for _ in range(200):
        content = [a_result(content)]
    assert len(chat(user(content))) < 200


def test_tool_calls_and_results_are_part_of_the_prompt():
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }

    assert chat(user("a"), call, user("b")) != chat(
        user("a"), {"role": "assistant", "content": None}, user("b")
    )


@pytest.mark.parametrize(
    "messages", [3, "text", [1, 2], [{"role": "user"}], [{"role": "user", "content": [1]}]]
)
def test_messages_of_any_shape_do_no_harm(messages):
    assert len(prompts("/v1/chat/completions", {"messages": messages})) == 1


def test_anthropics_system_comes_first():
    (prompt,) = prompts("/v1/messages", {"messages": [user("hi")], "system": "Be kind."})

    assert prompt.data.index(b"Be kind.") < prompt.data.index(b"hi")


@pytest.mark.parametrize(
    ("prompt", "count", "is_ids"),
    [("text", 1, False), (["a", "b"], 2, False), ([1, 2, 3], 1, True), ([[1, 2], [3]], 2, True)],
)
def test_every_prompt_shape_of_completions(prompt, count, is_ids):
    found = prompts("/v1/completions", {"prompt": prompt})

    assert len(found) == count
    assert all(entry.is_token_ids is is_ids for entry in found)


def test_token_ids_take_four_bytes_each():
    (prompt,) = prompts("/v1/completions", {"prompt": [1, 2, 300]})

    assert prompt.data == b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"


def test_impossible_token_ids_are_not_taken_for_ids():
    (prompt,) = prompts("/v1/completions", {"prompt": [-1, 2**40]})

    assert not prompt.is_token_ids


def test_inputs_of_embeddings_are_prompts_of_their_own():
    assert len(prompts("/v1/embeddings", {"input": ["a", "b", "c"]})) == 3


def test_input_items_of_responses_are_one_prompt_after_its_instructions():
    (prompt,) = prompts("/v1/responses", {"instructions": "Be brief.", "input": [user("hi"), user("ho")]})

    assert prompt.data.index(b"Be brief.") < prompt.data.index(b"hi") < prompt.data.index(b"ho")


def test_a_responses_text_input_follows_its_instructions():
    (prompt,) = prompts("/v1/responses", {"input": "hi", "instructions": "Be brief."})

    assert prompt.data.index(b"Be brief.") < prompt.data.index(b"hi")


def test_rerank_and_score_are_keyed_by_their_first_text():
    (rerank,) = prompts("/v1/rerank", {"query": "q", "documents": ["a"]})
    (score,) = prompts("/score", {"text_1": "one", "text_2": ["two"]})

    assert rerank.data.startswith(b'"q"')
    assert score.data.startswith(b'"one"')


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/invocations", {"x": 1})])
def test_bodies_without_a_prompt_have_none(path, body):
    assert prompts(path, body) == ()


def test_the_cache_salt_is_found():
    endpoint = ENDPOINTS["/v1/chat/completions"]

    assert cache_salt_of(parse_request(endpoint, b'{"cache_salt": "t1"}')) == "t1"
    assert cache_salt_of(parse_request(endpoint, b'{"cache_salt": null}')) == ""
    assert cache_salt_of(parse_request(endpoint, b"{}")) == ""


@pytest.mark.parametrize(
    "odd",
    [
        user("more"),
        user(["a part"]),
        user(None),
        {"role": "user"},
        {"content": "no role"},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
    ],
)
def test_a_long_conversation_is_rendered_as_its_messages_are(odd):
    plain = [user(f"turn {number}") for number in range(20)]
    for messages in ([odd, *plain], [*plain, odd], [*plain[:9], odd, *plain[9:]]):
        whole = prompts("/v1/chat/completions", {"messages": messages})[0].data
        one_by_one = [
            prompts("/v1/chat/completions", {"messages": [message]})[0].data for message in messages
        ]

        assert whole == b"".join(one_by_one)


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


def messages(system, *turns, **fields):
    (prompt,) = prompts("/v1/messages", {"model": "m", "system": system, "messages": list(turns), **fields})
    return prompt.data


def block(text, **fields):
    return {"type": "text", "text": text, **fields}


MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}


@pytest.mark.parametrize("rest", ["", "\nMore in the same block."])
def test_a_block_of_messages_with_a_billing_header_is_dropped_whole(rest):
    with_header = messages([block(BILLING.format("1ab2c") + rest), block("Be kind.")], user("hi"))

    assert with_header == messages([block("Be kind.")], user("hi"))


def test_an_inline_system_message_of_messages_with_a_billing_header_is_dropped_whole():
    for content in (BILLING.format(1) + "\nrest", [block(BILLING.format(2))]):
        inline = messages("Be kind.", user("hi"), {"role": "system", "content": content})

        assert inline == messages("Be kind.", user("hi"), {"role": "system"})


def test_of_any_other_system_text_with_a_billing_header_the_first_line_is_dropped():
    header = BILLING.format("1ab2c") + "\n"
    kind = {"role": "system", "content": "Be kind."}

    assert chat({"role": "system", "content": header + "Be kind."}) == chat(kind)
    assert chat({"role": "system", "content": [block(header + "Be kind.")]}) == chat(kind)
    assert chat({"role": "system", "content": [header[:-1], "Be kind."]}) == chat(kind)
    assert chat({"role": "system", "content": header[:-1]}) == b'\x1e"system"'
    assert messages(header + "Be kind.", user("hi")) == messages("Be kind.", user("hi"))
    (plain,) = prompts("/v1/responses", {"instructions": "Be kind.", "input": [user("hi")]})
    (headed,) = prompts("/v1/responses", {"instructions": header + "Be kind.", "input": [user("hi")]})
    assert headed == plain


@pytest.mark.parametrize("role", ["user", "assistant", "developer", "tool"])
def test_a_billing_header_of_another_role_counts(role):
    one, two = ({"role": role, "content": BILLING.format(digits)} for digits in "ab")

    assert chat(one) != chat(two)
    assert messages("", one) != messages("", two)


def test_a_billing_header_that_does_not_begin_the_text_counts():
    assert messages([block("a\n" + BILLING.format(1))]) != messages([block("a\n" + BILLING.format(2))])


def test_a_billing_header_with_escapes_is_dropped_too():
    raw = b'{"messages":[{"role":"system","content":"\\u0078-anthropic-billing-header: 1\\nBe kind."}]}'
    (prompt,) = prompts_of(parse_request(ENDPOINTS["/v1/chat/completions"], raw))

    assert prompt.data == chat({"role": "system", "content": "Be kind."})


@pytest.mark.parametrize("long", ["", "x" * 3_000])
def test_marks_for_a_providers_cache_are_no_part_of_the_prompt(long):
    def turn(*marked, tool=None):
        blocks = {
            "system": block("Be kind."),
            "text": block("hi" + long),
            "call": {"type": "tool_use", "id": "t", "name": "f", "input": {"a": long}},
            "result": {"type": "tool_result", "tool_use_id": "t", "content": "42" + long},
            "image": {"type": "image", "source": {"type": "base64", "data": "A" + long}},
        }
        for name in marked:
            blocks[name] = {**blocks[name], **MARK}
        system, text, call, result, image = blocks.values()
        tools = [{"name": "f", "description": long}, {"name": "g", "description": long, **(tool or {})}]
        return messages(
            [system],
            user([text]),
            {"role": "assistant", "content": [call]},
            user([result, image]),
            tools=tools,
        )

    assert turn("system", "text", "call", "result", "image", tool=MARK) == turn()
    assert turn(tool={"cache_control": None}) == turn()
    first = {"cache_control": {"type": "ephemeral"}, "type": "tool_result", "content": "42" + long}
    assert messages("", user([first])) == messages(
        "", user([{"type": "tool_result", "content": "42" + long}])
    )


def test_a_text_about_marks_is_part_of_the_prompt():
    one, two = (
        {"type": "tool_result", "content": f'the member ,"cache_control":{{"type":"{kind}"}} is new'}
        for kind in "ab"
    )

    assert messages("", user([one])) != messages("", user([two]))
    assert b"cache_control" in messages("", user([one]))
