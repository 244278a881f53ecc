"""A small model and a cache of it, whose unused memory is NaN."""

import pytest

from tests.integrations.generation import poisoned, small_model


@pytest.fixture(scope="module")
def model():
    return small_model(3, 4, 128, 0)


@pytest.fixture
def cache(model):
    with poisoned(model) as cache:
        yield cache
        cache.manager.check_integrity()
