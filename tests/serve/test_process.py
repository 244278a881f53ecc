"""A server process over the real engine: its answers are the model's, and it ends cleanly."""

import json
import signal
import threading

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")
import httpx2
import openai

from tests.serve.server import DEADLINE, MAIN, Server, running, send, wait_for

PROMPTS = ["hello", "The quick brown fox", "a b c " * 20, "wait: " + "x" * 300]
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 900, "ignore_eos": True}


def complete(server, prompt, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    return server.client.completions.create(model="tiny", prompt=prompt, **options)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_are_the_models(server, alone, prompt):
    alone.check(prompt, complete(server, prompt).choices[0].text, 24)
    chunks = list(complete(server, prompt, stream=True))
    alone.check(prompt, "".join(chunk.choices[0].text for chunk in chunks), 24)


def test_a_chat_is_its_templates_prompt(server, alone):
    messages = [{"role": "user", "content": "hello"}]
    answer = server.client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=24, temperature=0
    )
    alone.check("<user>hello<assistant>", answer.choices[0].message.content, 24)
    answer = server.client.responses.create(
        model="tiny", input="hello", max_output_tokens=24, temperature=0
    )
    alone.check("<user>hello<assistant>", answer.output_text, 24)


def test_samples_of_one_prompt(server, alone):
    texts = [choice.text for choice in complete(server, PROMPTS[1], n=3).choices]
    for text in texts:
        alone.check(PROMPTS[1], text, 24)
    options = {"temperature": 1.5, "n": 3, "seed": 5, "max_tokens": 12}
    first = [choice.text for choice in complete(server, PROMPTS[1], **options).choices]
    again = [choice.text for choice in complete(server, PROMPTS[1], **options).choices]
    assert first == again and len(set(first)) == 3
    other = [
        choice.text for choice in complete(server, PROMPTS[1], **options | {"seed": 6}).choices
    ]
    assert other != first
    chunks = complete(server, PROMPTS[1], stream=True, **options)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == first


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_of_64_bits(server, seed):
    options = {"temperature": 1, "n": 3, "seed": seed, "max_tokens": 4}
    first, again = (complete(server, PROMPTS[0], **options).choices for _ in range(2))
    assert [choice.text for choice in first] == [choice.text for choice in again]


def test_stop_texts(server):
    whole = complete(server, PROMPTS[0]).choices[0].text
    stop = whole[5:7]
    expected = whole[: whole.index(stop)]
    choice = complete(server, PROMPTS[0], stop=stop).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "stop")
    chunks = list(complete(server, PROMPTS[0], stop=["never", stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_are_the_models(server, alone):
    choice = complete(server, PROMPTS[0], max_tokens=3, logprobs=5).choices[0]
    assert choice.logprobs.tokens == list(choice.text)
    for own, best in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert own == max(best.values()) and len(best) == 5
        assert all(-100 < score <= 0 for score in best.values())


def test_penalties(server):
    plain = complete(server, PROMPTS[2]).choices[0].text
    varied = complete(
        server, PROMPTS[2], presence_penalty=2, frequency_penalty=2,
        extra_body={"repetition_penalty": 100, "ignore_eos": True},
    ).choices[0].text  # fmt: skip
    assert len(set(varied)) == len(varied) == 24 and varied != plain


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_leaves_nothing(server, is_stream):
    before = server.wait_until_idle()["counts"].get("cancelled", 0)
    with send(server.url, "/v1/completions", LONG | {"stream": is_stream}):
        wait_for(lambda: server.state()["requests"], "the request runs")
    after = server.wait_until_idle()
    assert after["counts"]["cancelled"] == before + 1


def test_an_idle_connection_outlasts_a_clients_patience(server):
    """A server that closes first, after the 5 s of most clients, resets a request on its way."""
    with send(server.url, "/v1/completions", LONG | {"max_tokens": 1}) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.settimeout(6)
        with pytest.raises(TimeoutError):
            while connection.recv(4096):
                pass


def test_prompts_share_their_beginning(server):
    prompt = "shared text " * 50
    first = complete(server, prompt + "one", max_tokens=4)
    again = complete(server, prompt + "one", max_tokens=4)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    other = complete(server, prompt + "one", max_tokens=4, extra_body={"cache_salt": "mine"})
    assert other.choices[0].text == first.choices[0].text
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_sigterm_lets_requests_finish(checkpoint, tmp_path, alone):
    with running(checkpoint, tmp_path / "log", "--grace", "250") as server:
        stream = complete(server, PROMPTS[1], stream=True)
        text = next(stream).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].text for chunk in stream)
        alone.check(PROMPTS[1], text, 24)
        assert server.process.wait(DEADLINE) == 0, server.log.read_text()


def test_sigterm_ends_requests_that_take_too_long(checkpoint, tmp_path):
    with running(checkpoint, tmp_path / "log", "--grace", "1") as server:
        with send(server.url, "/v1/completions", LONG) as connection:
            wait_for(lambda: server.state()["requests"], "the request runs")
            server.process.send_signal(signal.SIGTERM)
            while connection.recv(4096):
                pass
        assert server.process.wait(DEADLINE) == 0, server.log.read_text()


def test_a_dead_worker_is_a_503(checkpoint, tmp_path):
    """The cache is lost at the moment that a file exists."""
    flag = tmp_path / "flag"
    code = f"""
import pathlib
from dsv4.errors import LostCacheError
from dsv4.integrations.transformers import PackedModel
call = PackedModel.__call__
def fail(*arguments):
    if pathlib.Path({str(flag)!r}).exists():
        raise LostCacheError("the device is gone")
    return call(*arguments)
PackedModel.__call__ = fail
{MAIN}"""
    with running(checkpoint, tmp_path / "log", code=code) as server:
        errors = []

        def ask():
            with pytest.raises(openai.APIError) as failed:
                complete(server, "hello", max_tokens=900, extra_body={"ignore_eos": True})
            errors.append(failed.value)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.state()["requests"]) == 4, "all run")
        flag.touch()
        for thread in threads:
            thread.join(DEADLINE)
        with pytest.raises(openai.InternalServerError) as failed:
            complete(server, "hello")
        assert [error.status_code for error in [*errors, failed.value]] == [503] * 5
        assert httpx2.get(f"{server.url}/health", timeout=DEADLINE).status_code == 503
        assert server.state()["error"]
        server.stop()


def test_a_killed_server_leaves_its_store(checkpoint, tmp_path, alone):
    prompts = [letter * 600 for letter in "abc"]
    store = ["--store", str(tmp_path / "store"), "--store-bytes", "1GiB"]
    server = Server(checkpoint, tmp_path / "first", *store)
    try:
        first = [complete(server, prompt, max_tokens=8).choices[0].text for prompt in prompts]
        wait_for(lambda: len(list((tmp_path / "store").rglob("*"))) > 5, "records are written")
    finally:
        server.stop(signal.SIGKILL)
    with running(checkpoint, tmp_path / "second", *store) as server:
        answers = [complete(server, prompt, max_tokens=8) for prompt in prompts]
        assert [answer.choices[0].text for answer in answers] == first
        for prompt, text in zip(prompts, first, strict=True):
            alone.check(prompt, text, 8)
        assert server.state()["hits"]["disk"] > 0, json.dumps(server.state())
