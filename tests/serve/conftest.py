"""One checkpoint and one server process for the tests that need a real one."""

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from tests.serve.checkpoint import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    from tests.serve.server import running

    with running(checkpoint, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def alone():
    from tests.serve.checkpoint import Alone

    return Alone(num_new=24)
