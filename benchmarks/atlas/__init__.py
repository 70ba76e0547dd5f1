"""Everything to run on a machine with an NPU, in one command: ``bash run.sh atlas``.

``parts.py`` lists the parts. Each is one or more child processes, ``children.py`` runs them,
``advice.py`` names the next thing to try after a failure, ``summary.py`` writes page and archive,
``scrub.py`` takes paths and names out of it. The programs of the parts are beside them.
"""
