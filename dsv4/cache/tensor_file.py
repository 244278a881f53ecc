"""`TensorFile`: tensors with a description and a checksum in a safetensors file.

A file is read once. Its description, its tensors and their checksum come from those same bytes, so
nothing that happens to the file afterwards reaches what was checked.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FilePath = str | os.PathLike[str]

DTYPES = {"U8": torch.uint8, "I32": torch.int32}
MAX_PROBLEM = 1000  # characters of an error; files can hold texts of any length


@dataclass(frozen=True)
class TensorFile:
    """A kind of file.

    Attributes:
        name: The kind in words, for errors.
        key: The key of the metadata, which holds the description in JSON. There is only one, since
            safetensors writes several in any order.
        version: Name and version of the format.
    """

    name: str
    key: str
    version: str

    def write(
        self, path: FilePath, description: Mapping[str, str], tensors: Mapping[str, Tensor]
    ) -> None:
        """Write a file; a crash leaves the old file or none. Only regular files are replaced."""
        from safetensors.torch import save_file

        target = Path(os.path.realpath(path))
        if os.path.lexists(target) and not target.is_file():
            found = "a folder" if target.is_dir() else "a device, a pipe or a socket"
            raise self.refusal(path, f"expected a regular file or none to write to, found {found}")
        if not target.parent.is_dir():
            raise FileNotFoundError(f"No folder {target.parent} for a {self.name}")
        described = {"format": self.version, **description}
        described["checksum"] = _checksum(described, tensors)
        metadata = {self.key: json.dumps(described)}
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        os.close(handle)
        try:
            save_file(dict(tensors), name, metadata)
            _sync(name)
            os.replace(name, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        _sync(target.parent)

    def read(self, path: FilePath) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the description and the tensors of a file that fits its checksum.

        Raises:
            ValueError: It is damaged, or of another kind or version.
        """
        from safetensors import SafetensorError, deserialize

        if not Path(path).is_file():
            raise FileNotFoundError(f"No {self.name} at {os.fspath(path)}")
        data = Path(path).read_bytes()
        try:
            parts = deserialize(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        except (SafetensorError, ValueError) as error:
            text = f"expected a whole safetensors file, got: {error}"
            raise self.refusal(path, text) from None
        description = self._description(path, header.get("__metadata__") or {})
        tensors = {name: self._tensor(path, name, part) for name, part in parts}
        checksum = description.pop("checksum", None)
        if checksum != _checksum(description, tensors):
            raise self.refusal(path, "its contents do not match its checksum")
        del description["format"]
        return description, tensors

    def refusal(self, path: FilePath, problem: str) -> ValueError:
        """Make the error of a file that cannot be taken."""
        return ValueError(f"Invalid {self.name} {os.fspath(path)}: {problem[:MAX_PROBLEM]}")

    def _description(self, path: FilePath, metadata: Mapping[str, str]) -> dict[str, str]:
        try:
            description = json.loads(metadata[self.key])
        except (KeyError, ValueError, RecursionError):
            text = f"expected metadata {self.key!r} in JSON, found none"
            raise self.refusal(path, text) from None
        if not isinstance(description, dict):
            raise self.refusal(path, f"expected metadata {self.key!r} to be an object")
        if description.get("format") != self.version:
            got = description.get("format", "none")
            raise self.refusal(path, f"expected the format {self.version}, got {got}")
        for name, value in description.items():
            if not isinstance(value, str):
                text = f"expected the metadata {name} to be text, got {type(value).__name__}"
                raise self.refusal(path, text)
        return description

    def _tensor(self, path: FilePath, name: str, part: Mapping[str, object]) -> Tensor:
        dtype = DTYPES.get(str(part["dtype"]))
        if dtype is None:
            text = f"expected {name} in {' or '.join(DTYPES)}, got {part['dtype']}"
            raise self.refusal(path, text)
        data, shape = part["data"], part["shape"]
        assert isinstance(data, bytearray) and isinstance(shape, list), (type(data), type(shape))
        # frombuffer takes no empty buffer
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)


def _checksum(description: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():  # an empty one has any strides
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: FilePath) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
