"""Puts the repository's root on the path, so that tests import bench/ as its commands do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # at the end: where the package is installed, that one is tested
