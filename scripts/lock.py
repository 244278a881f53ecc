"""Write the hashes of every pinned package into requirements files: `make lock`.

A file's comments and `name==version` lines are its own; the hashes below them are the registry's,
of all files of that version. `--wheel` adds the hash of another build of a pinned version, and it
stays until the version changes. To move to another version, change its line and lock again. A
comment `# platform: NAME` names the platform whose wheels a file needs, if it is another one.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
PLATFORM = re.compile(r"^# platform: (\S+)$", re.MULTILINE)
DEFAULT_PLATFORM = "x86_64-manylinux_2_28"
TARGET = ["--python-version", "3.11.9", "--python-platform"]


def normal(name: str) -> str:
    """A package's name as wheels and pins have it in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[tuple[str, str], set[str]]:
    """The hashes of each pinned name and version."""
    pins: dict[tuple[str, str], set[str]] = {}
    for line in text.splitlines():
        if match := PIN.match(line):
            found = pins.setdefault((normal(match[1]), match[2]), set())
        elif match := HASH.search(line):
            found.add(match[1])
    return pins


def registry_hashes(pins: list[tuple[str, str]], platform: str) -> dict[tuple[str, str], set[str]]:
    """The hashes that the registry has for each pin, of which one must fit the platform."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pins.in"
        source.write_text("\n".join(f"{name}=={version}" for name, version in pins))
        uv = Path(sys.executable).with_name("uv")
        command = [str(uv), "pip", "compile", "--no-deps", "--generate-hashes", "--quiet"]
        result = subprocess.run(
            [*command, *TARGET, platform, str(source)],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return read_pins(result.stdout)


def wheel_hash(path: Path) -> tuple[tuple[str, str], str]:
    """The pin that a wheel satisfies, without its local version, and its hash."""
    name, version = path.name.split("-")[:2]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return (normal(name), version.partition("+")[0]), digest


def lock(path: Path, wheels: list[Path]) -> None:
    """Rewrite a file: its comments, then every pin with its hashes."""
    text = path.read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    pins = read_pins(text)
    platform = PLATFORM.search(text)
    hashes = registry_hashes(list(pins), platform[1] if platform else DEFAULT_PLATFORM)
    for pin, digest in map(wheel_hash, wheels):
        if pin in pins:
            pins[pin].add(digest)
    lines = comments
    for (name, version), kept in sorted(pins.items()):
        known = sorted(kept | hashes[name, version])
        lines.append(
            " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{h}" for h in known)])
        )
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(pins)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--wheel", action="append", default=[], type=Path)
    options = parser.parse_args()
    for path in options.files:
        lock(path, options.wheel)


if __name__ == "__main__":
    main()
