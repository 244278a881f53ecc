"""`scripts/peers.sh`: its usage, pinned packages, a package that cannot be unpacked."""

import os
import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "peers.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=os.environ | environment, capture_output=True,
        text=True,
    )  # fmt: skip


def test_usage():
    done = run()
    assert done.returncode == 1 and "usage: scripts/peers.sh FOLDER" in done.stderr


def test_every_package_has_a_version():
    (packages,) = re.findall(r"--platform any \\\n(.*?)\ncd ", SCRIPT.read_text(), re.DOTALL)
    names = packages.replace("\\", "").split()
    assert len(names) > 10 and all(re.fullmatch(r"[a-z-]+[0-9]*==[0-9.]+", each) for each in names)


def test_a_package_that_cannot_be_unpacked(tmp_path):
    """With stand-ins for pip, which downloads three wheels, and for unzip, which fails at one."""
    commands = {
        "pip": 'while [ "$1" != --dest ]; do shift; done; cd "$2" && touch vllm-1.whl sglang-1.whl '
               "orjson-1.whl",
        "unzip": f'mkdir -p {tmp_path}/out/vllm {tmp_path}/out/sglang/srt/layers '
                 f'{tmp_path}/out/sglang/kernels/jit/csrc {tmp_path}/out/sglang/kernels/ops; '
                 'case $2 in orjson*) echo "a broken zip"; exit 9;; esac',
    }  # fmt: skip
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = run(str(tmp_path / "out"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr == "scripts/peers.sh: orjson-1.whl was not unpacked: a broken zip\n"
