"""Makes the table of mechanisms importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
