"""What the commands in benchmarks/ share. Importing it finds `proxsparse` in this checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
