"""Routed experts that stay in their files: :func:`models.load` with ``memory``.

:mod:`.places` says where the bytes of an expert are, :mod:`.files` reads them, :mod:`.slots` says
which experts are in memory, :mod:`.pool` fills slots by threads, and :mod:`.experts` multiplies.
"""
