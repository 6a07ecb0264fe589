"""``python lab/benchmarks/clients``: see trying.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clients.trying import main

if __name__ == "__main__":
    main()
