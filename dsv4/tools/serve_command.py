"""Options of `dsv4 serve`."""

import argparse
import os
from pathlib import Path

from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.serve.launch import DEFAULT_TOKENS
from dsv4.tools.planner.command import positive, size


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dsv4 serve`."""
    add = parser.add_argument
    add("model", help="a checkpoint's folder, or its name on the hub")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one")
    add("--name", help="the model's name for clients; by default MODEL")
    add("--api-key", default=os.environ.get("DSV4_API_KEY"),
        help="the key that clients must send; by default $DSV4_API_KEY")  # fmt: skip
    add("--chat-template", type=Path, metavar="FILE", help="a Jinja template, over the model's own")
    add("--response-template", type=Path, metavar="FILE",
        help="transformers' JSON template of reasoning and tool calls")  # fmt: skip
    add("--max-tokens", type=positive,
        help=f"tokens of the longest request; by default {DEFAULT_TOKENS}")  # fmt: skip
    add("--max-requests", type=positive, default=16, help="requests that run at once (%(default)s)")
    add("--num-blocks", type=positive, help="blocks of the cache; by default --max-requests of "
        "--max-tokens each")  # fmt: skip
    add("--max-step-tokens", type=positive, default=2048, help="tokens of one step (%(default)s)")
    add("--max-queue", type=positive, default=1000,
        help="requests that may be open at once (%(default)s)")  # fmt: skip
    add("--max-body", type=size, default="8MiB", help="the largest request (%(default)s)")
    add("--timeout", type=positive, metavar="SECONDS", help="the most time for a request")
    add("--grace", type=positive, default=30, metavar="SECONDS",
        help="time for open requests after SIGTERM (%(default)s)")  # fmt: skip
    add("--kv", choices=KV_FORMATS, default="fp8", help="row format of the KV (%(default)s)")
    add("--index", choices=INDEX_FORMATS, default="mxfp4",
        help="row format of the index keys (%(default)s)")  # fmt: skip
    add("--prefix-bytes", type=size, default="1GiB",
        help="host memory of the prefix cache (%(default)s)")  # fmt: skip
    add("--store", type=Path, metavar="FOLDER", help="keep the prefix cache there, too")
    add("--store-bytes", type=size, default="64GiB",
        help="the most bytes of --store (%(default)s)")  # fmt: skip
    add("--drafts", type=int, default=0, help="tokens that a step may draft (%(default)s)")
    add("--device", default=None, help="cpu, cuda or cuda:N; by default cuda where there is one")
    add("--dtype", default="auto", help="float32 or bfloat16; by default the checkpoint's")


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 65535, got {text!r}")
    return int(text)
