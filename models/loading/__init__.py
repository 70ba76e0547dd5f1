"""From files to a model: :mod:`.plan` says in which order."""
