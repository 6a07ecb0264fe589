"""What the Dynamo article reports of decode with each step added to the one before.

It names neither the model of this table nor how it was measured. Its other tables are of DeepSeek-V3 on 8 GPUs with a
batch of 128, and so is this one: every throughput in it is 128 ÷ the mean time between tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from coterie_lab.suites.joint.cells import CHAIN, REPLICATION, ROUTING, SCHEDULING, STANDARD


class Reported(NamedTuple):
    tbt_mean_ms: float
    tbt_p99_ms: float
    tokens_per_s: float
    all_to_all_pct: float


TABLE = {
    STANDARD: Reported(42.3, 78.1, 3020.0, 38.0),
    ROUTING: Reported(38.7, 65.2, 3300.0, 31.0),
    REPLICATION: Reported(34.2, 52.8, 3730.0, 24.0),
    SCHEDULING: Reported(31.8, 48.3, 4010.0, 20.0),
}
BATCH = 128
COMMUNICATION_SAVING_PCT = 41.0
"""Published saving of all-to-all communication ("up to") against routing by cached KV alone; none is given for TTFT."""
LAYER_US, LAYERS = 8.2, 58
"""Published all-to-all time of one layer, and DeepSeek-V3's number of MoE layers."""


def published_of(configuration: str) -> dict[str, Any]:
    """Return the published row, with the saving of its mean against the row before."""
    row, at = TABLE[configuration], CHAIN.index(configuration)
    saving = 100.0 * (1.0 - row.tbt_mean_ms / TABLE[CHAIN[at - 1]].tbt_mean_ms) if at else None
    return {**row._asdict(), "step_tbt_mean_saving_pct": saving}
