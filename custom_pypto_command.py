"""The command ``custom-pypto``, with a report where the package does not load."""

import importlib.util
import sys
import types


def main() -> int:
    error = None
    try:
        import custom_pypto  # noqa: F401
    except ImportError as failure:
        package = importlib.util.find_spec("custom_pypto")
        if package is None or failure.__cause__ is None:  # else it names what is missing
            raise
        error = failure.__cause__
        # the report needs neither torch nor the library: a package without what __init__ imports
        sys.modules["custom_pypto"] = bare = types.ModuleType("custom_pypto")
        bare.__path__ = package.submodule_search_locations
    from custom_pypto.__main__ import main

    return main(load_error=error)


if __name__ == "__main__":
    sys.exit(main())
