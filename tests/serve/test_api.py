"""The APIs as the `openai` client sees them, over an engine that repeats a script."""

import threading

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")
import httpx2
import openai

from tests.serve.server import DEADLINE, fake_server, make_client, send, wait_for

MESSAGES = [{"role": "user", "content": "hello"}]
CALL = '<think>hm</think>Yes.<tool>{"name": "f", "arguments": {"a": 1}}</tool>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def server():
    with fake_server() as server:
        yield server


@pytest.fixture
def api(server):
    server.engine.script = ["one", "three"]
    return server.client


def ask(api, **options):
    return api.chat.completions.create(**{"model": "tiny", "messages": MESSAGES} | options)


def test_a_chat_has_an_answer(api, server):
    answer = ask(api, max_tokens=9)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "one"
    assert answer.choices[0].finish_reason == "stop"
    prompt = server.engine.submitted[-1][0]
    assert server.engine.tokenizer.decode(prompt) == "<user>hello<assistant>"
    history = prompt[: server.engine.checkpoint_at]
    assert server.engine.tokenizer.decode(history) == "<user>hello"
    assert answer.usage.prompt_tokens == len(prompt) == 7
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_sampling_is_each_requests_own(api, server):
    ask(
        api, temperature=0.3, top_p=0.4, presence_penalty=0.5, frequency_penalty=-0.5, seed=7,
        max_completion_tokens=5, stop=["a", "b"], n=2, logprobs=True, top_logprobs=3,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "cache_salt": "me",
                    "stop_token_ids": [9]},
    )  # fmt: skip
    _, params, salt = server.engine.submitted[-1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.4, 4, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.seed, params.max_new_tokens) == (1.5, 7, 5)
    assert (params.stop, params.n, params.logprobs) == (("a", "b"), 2, 3)
    assert (params.stop_token_ids, salt) == ((256, 9), b"me")
    ask(api, extra_body={"ignore_eos": True})
    _, params, salt = server.engine.submitted[-1]
    assert (params.temperature, params.top_p, params.seed, params.n) == (1.0, 1.0, None, 1)
    assert (params.stop, params.stop_token_ids, salt) == ((), (), b"")
    assert params.max_new_tokens == 1000 - 7


def test_a_stream_has_the_same_answers(api):
    chunks = list(ask(api, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}))
    texts, ends, tokens = ["", ""], [None, None], [[], []]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
        tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        assert chunk.usage is None
    assert texts == ["one", "three"] and ends == ["stop", "stop"]
    assert [each.token for each in tokens[1]] == list("three")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 8


def test_a_stream_without_options_has_no_usage(api):
    assert all(chunk.usage is None and chunk.choices for chunk in ask(api, stream=True))


def test_logprobs(api):
    content = ask(api, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [each.token for each in content] == list("one")
    assert content[0].bytes == [ord("o")] and content[0].logprob == -0.5
    assert [each.token for each in content[0].top_logprobs] == ["o", "!"]
    assert ask(api).choices[0].logprobs is None


def test_length_is_a_reason(api):
    choice = ask(api, max_tokens=2).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("on", "length")


def test_reasoning_and_tool_calls(api, server):
    server.engine.script = [CALL]
    choice = ask(api, tools=[TOOL]).choices[0]
    assert not server.engine.submitted[-1][1].skip_special_tokens
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Yes." and choice.message.reasoning_content == "hm"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    deltas = [chunk.choices[0].delta for chunk in ask(api, tools=[TOOL], stream=True)]
    assert "".join(each.content or "" for each in deltas) == "Yes."
    assert "".join(getattr(each, "reasoning_content", "") for each in deltas) == "hm"
    ((call,),) = [each.tool_calls for each in deltas if each.tool_calls]
    assert (call.index, call.function.name) == (0, "f")
    # The message goes back as it came, with the call's result.
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    again = [*MESSAGES, choice.message.model_dump(), result]
    assert ask(api, messages=again, tools=[TOOL]).choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("Yes.<tool>{none}</tool>", "Yes."),
        ('Yes.<tool>{"a": 1}</tool> No.', "Yes."),
        ("Yes.<tool>{", "Yes."),
        ("Yes.<think>hm", "Yes."),
    ],
)
def test_a_model_may_write_no_tool_call(api, server, script, text):
    server.engine.script = [script]
    choice = ask(api, tools=[TOOL]).choices[0]
    assert choice.message.content.startswith(text) and not choice.message.tool_calls
    assert choice.finish_reason == "stop"
    parts = [chunk.choices[0].delta.content for chunk in ask(api, tools=[TOOL], stream=True)]
    assert "".join(part or "" for part in parts) == choice.message.content
    assert api.responses.create(model="tiny", input="x").output_text == choice.message.content


def test_tools_can_be_hidden(api, server):
    ask(api, tools=[TOOL])
    assert "parameters" in server.engine.tokenizer.decode(server.engine.submitted[-1][0])
    ask(api, tools=[TOOL], tool_choice="none")
    assert "parameters" not in server.engine.tokenizer.decode(server.engine.submitted[-1][0])


def test_completions(api, server):
    server.engine.script = []
    answer = api.completions.create(model="tiny", prompt=["abc", "de"], n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["cba", "cba", "ed", "ed"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs.tokens == ["c", "b", "a"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]
    assert answer.choices[0].logprobs.top_logprobs[0] == {"c": -0.5, "!": -7.0}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)
    assert server.engine.submitted[-1][1].max_new_tokens == 16
    assert server.engine.submitted[-1][1].skip_special_tokens
    ids = server.engine.tokenizer("xyz")["input_ids"]
    assert api.completions.create(model="tiny", prompt=ids).choices[0].text == "zyx"
    assert api.completions.create(model="tiny", prompt=[ids, ids]).choices[1].text == "zyx"
    chunks = list(api.completions.create(model="tiny", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "cba"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_responses(api, server):
    answer = api.responses.create(model="tiny", input="hi", instructions="be brief")
    assert (answer.output_text, answer.status) == ("one", "completed")
    prompt = server.engine.tokenizer.decode(server.engine.submitted[-1][0])
    assert prompt == "<user>be brief<user>hi<assistant>"
    assert answer.usage.input_tokens_details.cached_tokens == 2
    answer = api.responses.create(model="tiny", input=MESSAGES, max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("on", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("script", [CALL, CALL.replace("Yes.", ""), "plain", CALL[17:]])
def test_a_streamed_response_is_the_whole_one(api, server, script):
    server.engine.script = [script]
    whole = api.responses.create(model="tiny", input="hi")
    with api.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert streamed.output_text == whole.output_text
    assert [each.type for each in streamed.output] == [each.type for each in whole.output]
    assert [each.type for each in whole.output][-1] == "message" or "<tool>" in script


def test_models(api):
    (model,) = api.models.list().data
    assert model.id == api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.models.retrieve("an/other")


@pytest.mark.parametrize(
    "path", ["/reset", "/load_model", "/v1/audio/transcriptions", "/v1/systemone", "/docs", "/x"]
)
def test_other_routes_are_gone(server, path):
    for method in ("GET", "POST"):
        reply = httpx2.request(method, server.url + path)
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_cancels(server, is_stream):
    engine = server.engine
    engine.script = ["a long answer"]
    engine.hold.set()
    engine.cancelled.clear()
    body = {"model": "tiny", "messages": MESSAGES, "stream": is_stream}
    with send(server.url, "/v1/chat/completions", body):
        wait_for(lambda: engine.open, "the request runs")
    wait_for(lambda: engine.cancelled, "the request is cancelled")
    engine.hold.clear()
    assert not engine.open and not server.served.generations
    assert ask(server.client).choices[0].message.content == "a long answer"


def test_the_queue_has_an_end():
    with fake_server(max_waiting=1) as server:
        server.engine.hold.set()
        first = threading.Thread(target=lambda: ask(server.client))
        first.start()
        wait_for(lambda: server.engine.open, "the first request runs")
        with pytest.raises(openai.RateLimitError) as refused:
            ask(server.client)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "rate_limit_exceeded"
        server.engine.hold.clear()
        first.join(DEADLINE)
        assert ask(server.client).choices[0].finish_reason == "stop"


def test_a_dead_engine_is_a_503():
    with fake_server() as server:
        server.engine.hold.set()
        failures = []

        def fail(**options):
            with pytest.raises(openai.APIError) as failed:
                list(ask(server.client, **options))
            failures.append(failed.value)

        threads = [threading.Thread(target=fail, kwargs={"stream": True}),
                   threading.Thread(target=fail)]  # fmt: skip
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.engine.open) == 2, "both run")
        server.engine.die("no memory")
        for thread in threads:
            thread.join(DEADLINE)
        assert len(failures) == 2
        assert all("no memory" in str(each) for each in failures)
        assert httpx2.get(f"{server.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="no memory") as failed:
            ask(server.client)
        assert failed.value.status_code == 503
        with pytest.raises(openai.APIError, match="no memory"):
            list(server.client.responses.create(model="tiny", input="x", stream=True))


@pytest.mark.parametrize(
    ("reason", "status"), [("timeout", 504), ("cancelled", 503), ("error", 500)]
)
def test_a_request_that_the_engine_ends_is_an_error(server, reason, status):
    server.engine.script = ["a long answer"]
    server.engine.hold.set()
    failures = []

    def fail(**options):
        with pytest.raises(openai.APIError) as failed:
            list(ask(server.client, **options))
        failures.append(failed.value)

    threads = [threading.Thread(target=fail, kwargs={"stream": each}) for each in (False, True)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(server.engine.open) == 2, "both run")
    server.engine.end(reason, "why")
    for thread in threads:
        thread.join(DEADLINE)
    server.engine.hold.clear()
    assert [error.status_code for error in failures if hasattr(error, "status_code")] == [status]
    assert len(failures) == 2


def test_a_key_guards_all_but_health_and_the_page():
    with fake_server(api_key="right") as server:
        for key in ("wrong", "righ", "right2", "ŕight"):
            header = {"Authorization": f"Bearer {key}".encode()}
            reply = httpx2.get(f"{server.url}/v1/models", headers=header)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/cache/state", "/x"):
            assert httpx2.get(server.url + path).status_code == 401
        for path in ("/health", "/cache"):
            assert httpx2.get(server.url + path).status_code == 200
        big = httpx2.post(f"{server.url}/v1/completions", content=b"x" * (3 << 20))
        assert big.status_code == 401
        with pytest.raises(openai.AuthenticationError):
            ask(server.client)
        server.engine.script = ["yes"]
        assert ask(make_client(server.url, api_key="right")).choices[0].message.content == "yes"


def test_metrics(api, server):
    ask(api)
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert float(values["dsv4_time_to_first_token_seconds_count"]) >= 1
    assert float(values["dsv4_time_per_token_seconds_count"]) >= 2
    assert values["dsv4_prompt_tokens_total"] == "100.0"
    assert values['dsv4_requests{state="decode"}'] == "0.0"
    assert values['dsv4_blocks{state="free"}'] == "5.0"
    assert values['dsv4_bytes{component="swa"}'] == "2048.0"
    tiers = [
        values[f'dsv4_hit_tokens_total{{tier="{tier}"}}'] for tier in ("device", "host", "disk")
    ]
    assert tiers == ["10.0", "30.0", "20.0"]
