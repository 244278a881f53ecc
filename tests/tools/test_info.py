"""`dsv4 info`: versions, devices, backends, and why some are missing."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.backends import check_backend
from dsv4.kernels.external import find
from dsv4.tools import info
from dsv4.tools.cli import main


def test_tables(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "reference" in out and "flashmla" in out and "deepgemm" in out
    assert torch.__version__.split("+")[0] in out


def test_json(capsys):
    assert main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "triton", "transformers", "numpy"} <= set(result["versions"])
    assert result["backends"]["reference"] == {"available": True, "problem": None}
    assert result["devices"][0]["device"] == "cpu"
    assert len(result["devices"]) == 1 + torch.cuda.device_count()


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((7, 5), "refused"),
        ((8, 6), "never compiled in tests, never run on such a GPU"),
        ((9, 0), "GPU tests were run; docs/gpu-tests.json says at which commit"),
        ((12, 0), "compiled in tests, never run on such a GPU"),
    ],
)
def test_what_kernels_have_shown(monkeypatch, capability, said):
    properties = SimpleNamespace(
        name="a GPU", total_memory=1 << 30, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda idx: properties)
    assert info.collect_info()["devices"][1]["kernels"] == said
    assert main(["info"]) == 0


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    message = r"expected compute capability 8.0 or later, got 7.5 \(Tesla T4\)"
    with pytest.raises(ValueError, match=message):
        check_backend("triton", torch.device("cuda"))


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


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Make a folder for external kernels, and forget loaded ones."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("flash_mla", "deep_gemm", "vllm"):
            monkeypatch.delitem(sys.modules, name)
    named = str(Path(os.environ.get(find.FOLDER_VARIABLE, tmp_path)).resolve())
    monkeypatch.delenv(find.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != named])
    monkeypatch.syspath_prepend(tmp_path)
    find.load_flash_mla.cache_clear()
    find.load_deep_gemm.cache_clear()
    yield tmp_path
    find.load_flash_mla.cache_clear()
    find.load_deep_gemm.cache_clear()


def test_external_kernels(folder):
    (folder / "flash_mla.py").write_text(
        "def has_legacy(): return True\ndef flash_mla_with_kvcache(extra_k_cache): pass"
    )
    (folder / "deep_gemm.py").write_text("raise OSError('libcudart.so: not found\\nat all')")
    states = info.collect_info()["peers"]
    assert states["flashmla"] == {"available": True, "problem": None}
    assert "deep_gemm: OSError: libcudart.so: not found;" in states["deepgemm"]["problem"]
    assert [*states] == ["flashmla", "deepgemm", "sglang"]


def test_an_external_kernel_that_needs_another_package(folder):
    (folder / "deep_gemm.py").write_text("import no_such_package_of_ours")
    problem = info.collect_info()["peers"]["deepgemm"]["problem"]
    assert "deep_gemm: needs no_such_package_of_ours;" in problem
    assert "pip install 'dsv4[deepgemm]'" in problem


def test_sglang_is_listed(monkeypatch):
    def refuse():
        raise ImportError("pip install sglang")

    monkeypatch.setattr(info, "load_sglang", refuse)
    state = info.collect_info()["peers"]["sglang"]
    assert state == {"available": False, "problem": "pip install sglang"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_external_kernel_without_a_gpu(folder):
    from triton import knobs

    (folder / "deep_gemm.py").write_text(
        "fp8_fp4_paged_mqa_logits = get_paged_mqa_logits_metadata = get_num_sms = len"
    )
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        problem = info.collect_info()["peers"]["deepgemm"]["problem"]
    assert "expected cuda, got cpu" in problem
