"""What several test files share: the default model, from its cache, fetched if it is not there."""

import pytest
from hypothesis import settings

settings.register_profile("mainstem", deadline=None)  # a busy machine is no fault
settings.load_profile("mainstem")


def pytest_addoption(parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave slow tests out, and run others with one parameter set")


def pytest_collection_modifyitems(config, items) -> None:
    if not config.getoption("--quick"):
        return
    kept = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            kept.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept.values())])
    items[:] = kept.values()


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
