"""What the commands in benchmarks/ share. Importing it finds `proxsparse` in this checkout, installed or not, and the
tiny models of the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
