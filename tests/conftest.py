"""What several test files share: the default model, from its cache, fetched if it is not there."""

import pytest
from hypothesis import settings

settings.register_profile("mainstem", deadline=None)  # a busy machine is no fault
settings.load_profile("mainstem")


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


@pytest.fixture(scope="session")
def demo_model(demo):
    """The default model, opened; its anatomy and labels are found once for all tests of a process."""
    from mainstem.session import Model

    return Model(demo)
