"""Settings of the whole test suite."""

import os

import pytest
from hypothesis import settings

from packer import node_cache
from packer.sources import remote

# A first example may compile a kernel, so no example has a deadline; CI draws the same examples every time.
settings.register_profile("packer", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("packer")


@pytest.fixture(autouse=True, scope="session")
def node_cache_of_the_tests(tmp_path_factory):
    """What a test leaves in the cache of the node is not for the user's own runs, and the other way round."""
    folder = tmp_path_factory.mktemp("node-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(node_cache.FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Failed requests are made again at once."""
    monkeypatch.setattr(remote, "FIRST_DELAY_SECONDS", 0.0)
