"""Parameters of tests for both kinds of workers."""

from __future__ import annotations

import pytest
from sizes import long

kernel_is_long = pytest.mark.parametrize("shared", ["process", *long("kernel")], indirect=True, scope="session")
"""For tests that start workers anew, which takes seconds for each kernel."""
