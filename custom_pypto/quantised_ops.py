"""The ops on int8 caches. :mod:`custom_pypto.ops` exports them and explains letters and layouts."""

__all__: list[str] = []
