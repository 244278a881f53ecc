"""`dsv4 demo --serve`: the same answers through a server process."""

import json

import pytest

from dsv4.tools.cli import main

pytest.importorskip("dsv4.serve", reason="this build has no server")
pytest.importorskip("openai")


def test_demo_through_the_server(capsys):
    assert main(["demo", "--serve", "--tokens", "256", "--questions", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["questions"] == 8
    assert result["shown"].keys() >= {"record", "chapter", "line", "nobody"}
    assert main(["demo", "--serve", "--tokens", "128", "--questions", "1"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("right: every answer is the book's\n") and "same ids" not in text
