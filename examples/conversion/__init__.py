"""The parts of convert_checkpoint.py: :mod:`.folder` writes what :mod:`.plain`, :mod:`.stored` or
:mod:`.packed` makes of the tensors of a checkpoint."""
