"""What several test files share: the default model, from its cache, fetched if it is not there."""

import pytest


@pytest.fixture(scope="session")
def demo_directory():
    """The cached directory of the default model; the first use on a machine downloads it."""
    from mainstem.model.demo import ensure

    return ensure()


@pytest.fixture(scope="session")
def demo(demo_directory):
    """The default model in float32 as `load` gives it: module, tokenizer, name ..."""
    from mainstem.model.loading import load

    return load("demo")
