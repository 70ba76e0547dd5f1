"""The paged cache that the ops read, from the ground up: ``layout`` (rows), ``store`` (pools and
block tables), ``sequence`` (lengths), ``step`` (new tokens of a forward), ``paged_cache`` (the
public class)."""

from .paged_cache import PagedCache as PagedCache
from .sequence import Tokens as Tokens
from .step import Step as Step
