"""What all tests of the command line share."""

import pytest

from cli import progress


@pytest.fixture(autouse=True)
def _no_line_a_minute(monkeypatch):
    """On a busy machine a command that compiles first may take a minute, and its output is compared."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e6)
