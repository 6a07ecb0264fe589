"""The token table: a token's experts from its id, with confidence. See docs/predictors.md."""

from coterie.predictors.token_table.rows import ONE, TokenRows
from coterie.predictors.token_table.table import TokenTable

__all__ = ["ONE", "TokenRows", "TokenTable"]
