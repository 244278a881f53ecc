"""The commands of README and guide that start a server and ask it."""

import argparse
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra dsv4[serve] is not installed")
import httpx2

from dsv4.tools.serve_command import add_options
from tests.serve.server import DEADLINE

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", "docs/serving.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_starts_a_server_and_asks_it(server, page):
    (block,) = [
        each
        for each in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        if "dsv4 serve" in each
    ]
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(re.search(r"dsv4 serve (.*?) +&", block)[1].split())
    address, path = re.search(r"curl ([0-9.:]+)(\S+)", block).groups()
    assert address == f"{options.host}:{options.port}"
    body = re.search(r"-d '\n(.*)'", block, re.DOTALL)[1].replace(options.model, "tiny")
    header = dict([re.search(r'-H "(.*?): (.*?)"', block).groups()])
    reply = httpx2.post(server.url + path, content=body, headers=header, timeout=DEADLINE)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"]


def test_every_option_of_the_guide_exists():
    parser = argparse.ArgumentParser()
    add_options(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", (ROOT / "docs/serving.md").read_text()))
    assert named <= known
