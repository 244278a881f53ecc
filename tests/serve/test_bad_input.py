"""Bad input gets an error of OpenAI's shape, and the server lives."""

import copy
import json
import random

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")
import httpx2

from tests.serve.server import DEADLINE

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
INPUT = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
APIS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": INPUT}
EXTREMES = [
    None, True, False, 0, -1, 1, 2.5, 1e308, -1e308, float("nan"), float("inf"), 10**30, -(10**30),
    "", "x", "\ud800", "x" * 2000, "\x00", [], {}, [[]], [None], [{}], {"a": None}, [1, "a"],
    {"type": "text"}, [{"type": "function"}], [{"role": "user"}], [-1], [10**9], [[1], ["a"]],
]  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "temperature",
    "max_output_tokens", "top_p", "n", "stop", "stream", "stream_options", "logprobs", "seed",
    "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice",
    "response_format", "user", "cache_salt", "top_k", "min_p", "repetition_penalty", "ignore_eos",
    "stop_token_ids", "chat_template_kwargs", "reasoning_effort", "reasoning", "text", "include",
    "instructions", "metadata", "echo", "best_of", "suffix", "generation_config", "unheard_of",
]  # fmt: skip


def check_error(reply, status=None):
    """A refusal names what is wrong in the shape that clients read."""
    error = reply.json()["error"]
    assert reply.status_code == status or (status is None and 400 <= reply.status_code < 500)
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def post(server, path, content, **headers):
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    headers = {"content-type": "application/json"} | headers
    return httpx2.post(server.url + path, content=content, headers=headers, timeout=DEADLINE)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"model": 3}, 400, "model"),
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({"half a pair \ud800": 1}, 400, "half a pair ?"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"temperature": "1"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"top_p": float("inf")}, 400, "top_p"),
        ({"top_k": 10**9}, 400, "top_k"),
        ({"seed": 2**63}, 400, "seed"),
        ({"seed": 1.0}, 400, "seed"),
        ({"stream": "yes"}, 400, "stream"),
        ({"cache_salt": "\ud800"}, 400, "cache_salt"),
        ({"stop_token_ids": [10**9]}, 400, "stop_token_ids"),
    ],
)
def test_fields_of_all_apis(server, path, change, status, param):
    assert check_error(post(server, path, APIS[path] | change), status)["param"] == param


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"messages": None}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": ["hello"]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "pirate", "content": "a"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": -5}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 10**6}, None),
        ("/v1/chat/completions", {"n": 0}, "n"),
        ("/v1/chat/completions", {"n": 1000}, "n"),
        ("/v1/chat/completions", {"stop": ["a"] * 5}, "stop"),
        ("/v1/chat/completions", {"stop": [""]}, "stop"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"logit_bias": {"1": 5}}, "logit_bias"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"chat_template": "x"}}, None),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ""}, None),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
        ("/v1/completions", {"prompt": [1, 10**6]}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 1100}, None),
        ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ("/v1/completions", {"logprobs": 6}, "logprobs"),
        ("/v1/completions", {"echo": True}, "echo"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/responses", {"input": None}, "input"),
        ("/v1/responses", {"input": [{"type": "image"}]}, "input"),
        ("/v1/responses", {"previous_response_id": "x"}, "previous_response_id"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools"),
    ],
)  # fmt: skip
def test_fields_of_one_api(server, path, change, param):
    error = check_error(post(server, path, APIS[path] | change), 400)
    assert error["param"] == param
    if "maximum context" in error["message"]:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 99]
)
def test_what_is_no_json_object(server, content):
    for path in APIS:
        check_error(post(server, path, content), 400)


def test_another_content_type(server):
    reply = post(server, "/v1/completions", TEXT, **{"content-type": "text/plain"})
    assert "Content-Type: application/json" in check_error(reply, 400)["message"]


def test_a_message_without_a_role(server):
    reply = post(server, "/v1/chat/completions", CHAT | {"messages": [{"content": "a"}]})
    assert "expected a role" in check_error(reply, 400)["message"]


def test_large_bodies(server):
    check_error(post(server, "/v1/completions", TEXT | {"prompt": "x" * 10_000_000}), 413)

    def parts():
        for _ in range(160):
            yield b"x" * 65536

    reply = httpx2.post(f"{server.url}/v1/completions", content=parts(), timeout=DEADLINE)
    check_error(reply, 413)


def test_ignored_fields(server):
    """Fields that change no answer are taken."""
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert post(server, "/v1/chat/completions", CHAT | ignored).status_code == 200
    assert post(server, "/v1/responses", INPUT | ignored).status_code == 200


class Fuzz:
    """Random requests, most of them broken in some way."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def body(self, valid):
        body = copy.deepcopy(valid)
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            name = self.random.choice([*FIELDS, *body])
            if self.random.random() < 0.2:
                body.pop(name, None)
            elif self.random.random() < 0.2 and isinstance(body.get(name), list) and body[name]:
                body[name][0] = self.random.choice(EXTREMES)
            else:
                body[name] = self.random.choice(EXTREMES)
        return body

    def content(self, valid):
        content = json.dumps(self.body(valid)).encode()
        if self.random.random() < 0.1:
            place = self.random.randrange(len(content))
            content = self.random.choice([
                content[:place], content[:place] + b"\xff" + content[place + 1 :], content * 2,
            ])  # fmt: skip
        return content

    def send(self, client):
        path = self.random.choice(list(APIS))
        headers = {"content-type": "application/json"}
        if self.random.random() < 0.05:
            headers["content-type"] = self.random.choice(["text/plain", "multipart/form-data", "x"])
        if self.random.random() < 0.05:
            headers["x-request-id"] = self.random.choice(["", "a", "é".encode(), "x" * 999])
        method = "POST" if self.random.random() < 0.95 else self.random.choice(["GET", "PUT"])
        return client.request(method, path, content=self.content(APIS[path]), headers=headers)


def run_fuzz(server, seed, num_requests):
    fuzz, statuses = Fuzz(seed), set()
    with httpx2.Client(base_url=server.url, timeout=DEADLINE) as client:
        for _ in range(num_requests):
            reply = fuzz.send(client)
            statuses.add(reply.status_code)
            if reply.status_code != 200:
                check_error(reply)
        assert client.get("/health").status_code == 200
    assert {200, 400, 404} <= statuses
    server.wait_until_idle()


def test_fuzz(server):
    run_fuzz(server, 1, 200)


@pytest.mark.slow
def test_more_fuzz(server):
    run_fuzz(server, 2, 2000)
