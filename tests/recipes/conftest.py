"""Four workers for all recipes, which leave them unchanged but for their variables and groups."""

from __future__ import annotations

import sys
from pathlib import Path

from worlds import cluster_fixture

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))  # workers take the path over


four = cluster_fixture(4)
