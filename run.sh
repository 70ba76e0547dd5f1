#!/usr/bin/env bash
# Starts commands/run.py, which has the commands, by the Python of the environment or, while there is
# none, by another one.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
environment="$(bash "$root/build_and_install.sh" --where)"
for python in "$environment/bin/python" python3 python3.{10..20}; do
  # run it, not only find it: a version manager's shim may exist and fail
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    exec "$python" -u "$root/commands/run.py" "$@"
  fi
done
echo "run.sh: no Python from Python 3.10 on runs (Debian, Ubuntu: apt install python3 python3-venv python3-dev)" >&2
exit 1
