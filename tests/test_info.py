"""`dsv4 info`: what is here and why the rest is not."""

import json
import sys
import types

import pytest
import torch

from dsv4 import info
from dsv4.cli import main


def test_tables(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "reference" in out and "flash_mla" in out and "not installed" in out
    assert torch.__version__.split("+")[0] in out


def test_json(capsys):
    assert main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "triton", "transformers", "numpy"} <= set(result["versions"])
    assert result["backends"]["reference"] == {"available": True, "problem": None}
    assert result["devices"][0]["device"] == "cpu"
    assert len(result["devices"]) == 1 + torch.cuda.device_count()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("cuda", "problem"),
    [
        (None, "no CUDA: this torch is built without it"),
        ("13.0", "no CUDA device: torch finds none"),
    ],
)
def test_triton_without_a_gpu(monkeypatch, cuda, problem):
    from triton import knobs

    monkeypatch.setattr(torch.version, "cuda", cuda)
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        state = info.collect_info()["backends"]["triton"]
    assert state == {"available": False, "problem": problem}


def test_triton_that_is_not_installed(monkeypatch):
    def refuse(name, device):
        if name == "triton":
            raise ImportError("backend='triton' needs Triton: pip install 'dsv4[triton]'")

    monkeypatch.setattr(info, "check_backend", refuse)
    backends = info.collect_info()["backends"]
    assert backends["reference"]["available"]
    assert "pip install 'dsv4[triton]'" in backends["triton"]["problem"]


def test_a_package_that_is_not_there():
    assert info._version("no_such_package_of_ours") is None
    assert info._import_problem("no_such_package_of_ours") == "not installed"


def test_peers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    (tmp_path / "deep_gemm.py").write_text("raise OSError('libcudart.so: not found\\nat all')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    peers = info.collect_info()["peers"]
    assert peers["flash_mla"] == {"available": True, "problem": None}
    assert peers["deep_gemm"]["problem"] == "OSError: libcudart.so: not found"


def test_a_peer_that_needs_another_package(monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("import no_such_package_of_ours")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    assert info.collect_info()["peers"]["deep_gemm"]["problem"] == "needs no_such_package_of_ours"
