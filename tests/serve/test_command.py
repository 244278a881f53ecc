"""`dsv4 serve`: what it refuses, and what it listens on."""

import argparse
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.serve import launch
from dsv4.tools import serve_command
from dsv4.tools.cli import main

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
(PINNED,) = re.findall(r"(?m)^transformers==(\S+)", REQUIREMENTS.read_text())
needs_server = pytest.mark.skipif(
    metadata.version("transformers") != PINNED, reason=f"needs transformers {PINNED}"
)


@pytest.mark.parametrize("found", ["5.21.4", "5.23.0", "5.220.0", "6.0.0"])
def test_another_transformers_is_refused(monkeypatch, capsys, found):
    monkeypatch.setattr(launch, "version", lambda name: found)
    assert main(["serve", "folder"]) == 1
    assert f"needs transformers 5.22, whose server it was tested on; got {found}" in (
        capsys.readouterr().err
    )


@needs_server
def test_the_installed_transformers_is_taken():
    assert metadata.version("transformers").startswith("5.22.")
    launch.check_versions()


@needs_server
@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "openai", "prometheus_client"])
def test_a_missing_package_names_the_extra(monkeypatch, capsys, name):
    monkeypatch.setitem(__import__("sys").modules, name, None)
    assert main(["serve", "folder"]) == 1
    assert "pip install 'dsv4[serve]'" in capsys.readouterr().err


def test_loopback_unless_told(monkeypatch):
    monkeypatch.delenv("DSV4_API_KEY", raising=False)
    parser = argparse.ArgumentParser()
    serve_command.add_options(parser)
    options = parser.parse_args(["folder"])
    assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, None)
    assert options.max_body == 8 << 20


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999", "http", "²"])
def test_a_port_that_is_none_is_refused(capsys, port):
    with pytest.raises(SystemExit):
        main(["serve", "folder", f"--port={port}"])
    assert "expected a whole number from 0 to 65535, got" in capsys.readouterr().err


@needs_server
def test_an_empty_key_is_refused(capsys):
    assert main(["serve", "folder", "--api-key", ""]) == 1
    assert "expected a key, got an empty one" in capsys.readouterr().err


def test_weights_have_their_own_name(tmp_path):
    config = SimpleNamespace(to_json_string=lambda: "{}")
    model = SimpleNamespace(config=config, dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    names = [launch.weights_id(str(tmp_path), model)]
    assert launch.weights_id(str(tmp_path), model) == names[0]
    names.append(launch.weights_id(str(tmp_path), SimpleNamespace(config=config, dtype="bf16")))
    (tmp_path / "model.safetensors").write_bytes(b"others")
    names.append(launch.weights_id(str(tmp_path), model))
    assert len(set(names)) == 3
    with pytest.raises(ValueError, match="needs a checkpoint's folder, got a/name"):
        launch.weights_id("a/name", model)
