"""Servers for tests: a process of `dsv4 serve`, or the app with a fake engine on a thread."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2
import openai
import uvicorn

from dsv4.serve.app import build_app
from dsv4.serve.served_model import ServedModel
from tests.serve.checkpoint import make_model, make_tokenizer
from tests.serve.fake_engine import FakeEngine

DEADLINE = 300.0  # seconds that only a broken server needs
MAIN = "from dsv4.tools.cli import main; raise SystemExit(main())"
SIZES = ["--max-tokens", "1024", "--max-requests", "8", "--prefix-bytes", "8MiB"]
EXACT = ["--kv", "fp32", "--index", "fp32"]


def wait_for(condition, what):
    """Return what a condition gives once that is true."""
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


def make_client(url, **options):
    return openai.OpenAI(
        base_url=f"{url}/v1", timeout=DEADLINE, **{"api_key": "none", "max_retries": 0} | options
    )


def send(url, path, body):
    """Send a request and return its connection, which the caller closes."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), DEADLINE)
    content = json.dumps(body)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n{content}".encode()
    )
    return connection


class Server:
    """A process that serves a checkpoint as `tiny`; `code` is what it runs."""

    def __init__(self, checkpoint, log, *options, code=MAIN, sizes=SIZES):
        self.log = log
        arguments = ["--debug", "serve", str(checkpoint), "--name", "tiny", "--port", "0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments, *sizes, *EXACT, *options],
                stdout=file, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        try:
            self.url = wait_for(self._find_url, "the server listens")
        except BaseException:
            self.process.kill()
            raise
        self.client = make_client(self.url)

    def _find_url(self):
        text = self.log.read_text()
        assert self.process.poll() is None, text
        found = re.search(r"running on (http://\S+)", text)
        return found and found[1]

    def state(self):
        return httpx2.get(f"{self.url}/cache/state", timeout=DEADLINE).json()

    def wait_until_idle(self):
        """Wait until no request is open; every block must be back."""
        state = wait_for(lambda: (now := self.state())["requests"] == [] and now, "idle")
        assert state["stats"]["num_request_blocks"] == state["stats"]["num_swapped_blocks"] == 0
        return state

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return 1024 * int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])

    def stop(self, number=signal.SIGTERM):
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)


@contextmanager
def running(*arguments, **options):
    """A `Server` that must end cleanly, its cache's books in order."""
    server = Server(*arguments, **options)
    try:
        yield server
        if server.process.poll() is None:
            server.wait_until_idle()
            assert server.stop() == 0, server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def fake_server(*, api_key=None, max_body=1 << 20, max_tokens=1000, **choices):
    """Serve a `FakeEngine` on a thread."""
    tokenizer = make_tokenizer(has_response_template=True)
    engine = FakeEngine(tokenizer, **choices)
    served = ServedModel("tiny", make_model(), tokenizer, engine, max_tokens)
    app = build_app(served, api_key=api_key, max_body=max_body)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, "the server listens")
        url = "http://{}:{}".format(*server.servers[0].sockets[0].getsockname())
        yield SimpleNamespace(url=url, client=make_client(url), engine=engine, served=served)
    finally:
        engine.hold.clear()
        server.should_exit = True
        thread.join(DEADLINE)
