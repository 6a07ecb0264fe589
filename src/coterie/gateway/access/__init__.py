"""Who may ask, and how often: API keys and rates."""

from coterie.gateway.access.keys import Caller, Entry, Keys, NewKey, new_key
from coterie.gateway.access.rates import Rates

__all__ = ["Caller", "Entry", "Keys", "NewKey", "Rates", "new_key"]
