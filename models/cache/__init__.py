"""The paged cache that the ops read, from the ground up: ``layout`` (what a row is), ``store``
(pools and block tables), ``sequence`` (lengths), ``step`` (new tokens of a forward), ``formats``
(how rows are written and read), ``paged_cache`` (what a user holds)."""

from .paged_cache import PagedCache as PagedCache
from .step import Step as Step
from .step import TokenSlice as TokenSlice
from .store import write as write
