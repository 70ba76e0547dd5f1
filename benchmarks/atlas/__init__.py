"""Everything to run on a machine with an NPU, in one command: ``bash run.sh atlas``.

``parts.py`` lists the parts. Each is one or more child processes, ``children.py`` runs them,
``summary.py`` writes page and archive. The programs of the parts are beside them.
"""
