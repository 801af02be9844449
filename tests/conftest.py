"""Settings of the whole test suite."""

import os

from hypothesis import settings

# A first example may compile a kernel, so no example has a deadline; CI draws the same examples every time.
settings.register_profile("packer", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("packer")
