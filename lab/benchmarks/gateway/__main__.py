"""``python lab/benchmarks/gateway``: see compare.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gateway.compare import main

if __name__ == "__main__":
    main()
