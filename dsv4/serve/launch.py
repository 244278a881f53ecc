"""`run`: the life of a server, from loading to SIGTERM."""

import argparse
import hashlib
import json
import os
import signal
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TESTED = "5.22"
DEFAULT_TOKENS = 8192
KEEP_ALIVE = 75  # seconds; clients drop an idle connection first, after 5 to 60, and reuse none
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_versions() -> None:
    """Refuse a transformers whose server was not tested, and missing packages."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(f"{TESTED}."):
        raise RuntimeError(
            f"dsv4 serve needs transformers {TESTED}, whose server it was tested on; got {found}"
        )
    try:
        for name in ("fastapi", "openai", "prometheus_client", "uvicorn"):
            import_module(name)
    except ImportError as error:
        raise ImportError(f"dsv4 serve needs {error.name}: pip install 'dsv4[serve]'") from error


def run(options: argparse.Namespace) -> int:
    """Load a model and serve it until SIGTERM or SIGINT."""
    check_versions()
    if options.api_key == "":  # a variable that is not set would leave the server open
        raise ValueError("Invalid --api-key: expected a key, got an empty one")
    import uvicorn

    from dsv4.serve.app import build_app

    with ExitStack() as closing:
        served = load(options, closing)
        app = build_app(served, api_key=options.api_key, max_body=options.max_body)
        config = uvicorn.Config(
            app, host=options.host, port=options.port, log_level="info", access_log=False,
            timeout_graceful_shutdown=options.grace, server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
        )  # fmt: skip
        if options.api_key is None and options.host not in LOOPBACK:
            print(f"dsv4: whoever reaches {options.host} may ask: see --api-key", file=sys.stderr)
        # uvicorn raises the signal that stopped it once more, which must not end this process.
        signal.signal(signal.SIGTERM, lambda *_: None)
        served.engine.start()
        uvicorn.Server(config).run()
    return 0


def load(options: argparse.Namespace, closing: ExitStack) -> Any:
    """Load the model, make its cache and its engine; `closing` ends them."""
    import torch
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    from dsv4.cache.prefix.store import PrefixStore
    from dsv4.checks import check_checkpoint
    from dsv4.engine import Engine, EngineThread
    from dsv4.integrations.transformers import PackedModel, attach
    from dsv4.serve.served_model import ServedModel

    if os.path.isabs(options.model) or os.path.isdir(options.model):  # else a name on the hub
        check_checkpoint(options.model)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.chat_template is not None:
        tokenizer.chat_template = options.chat_template.read_text()
    if options.response_template is not None:
        tokenizer.response_template = json.loads(options.response_template.read_text())
    model: Any = DeepseekV4ForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    model = model.to(device).eval()
    store = None
    if options.store is not None:
        name = weights_id(options.model, model)
        store = PrefixStore(options.store, options.store_bytes, model_id=name)
        closing.enter_context(store)
    cache = attach(
        model,
        max_requests=options.max_requests,
        max_tokens=None if options.num_blocks else options.max_tokens or DEFAULT_TOKENS,
        num_blocks=options.num_blocks,
        kv_format=options.kv,
        index_format=options.index,
        drafts_per_step=options.drafts,
        max_forward_tokens=max(options.max_step_tokens, options.max_requests),
        prefix_bytes=options.prefix_bytes,
        host_slots=options.max_requests,
        store=store,
    )
    closing.enter_context(cache)
    if options.debug:
        closing.callback(cache.manager.check_integrity)
    engine = Engine(
        PackedModel(model, cache), cache.manager, tokenizer=tokenizer,
        max_step_tokens=options.max_step_tokens, num_drafts=options.drafts,
    )  # fmt: skip
    thread = EngineThread(engine, max_waiting=options.max_queue)
    closing.callback(thread.stop)
    longest = cache.manager.capacity.longest_request
    longest = min(longest, options.max_tokens or longest)
    name = options.name or options.model
    return ServedModel(name, model, tokenizer, thread, longest, options.timeout)


def weights_id(source: str, model: Any) -> str:
    """Return a name for weights that others do not have, for records on disk."""
    folder, commit = Path(source), getattr(model.config, "_commit_hash", None)
    if not folder.is_dir() and commit is None:
        raise ValueError(f"--store needs a checkpoint's folder, got {source}")
    files = [path.stat() for path in sorted(folder.glob("*.safetensors"))]
    about = [(each.st_size, each.st_mtime_ns) for each in files] if folder.is_dir() else commit
    name = f"{model.config.to_json_string()} {model.dtype} {about}"
    return hashlib.blake2b(name.encode()).hexdigest()
