"""`kvtier` and `python -m kvtier`: says what to install if the command line's own needs are not there."""

from __future__ import annotations

import sys
from importlib.util import find_spec

INSTALL = "pip install 'kvtier[cli]'"
NEEDED = ("typer", "rich", "tomli_w")


def main() -> None:
    """Run the command line; exit with status 2 where it is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(_refuse(missing))
    from kvtier.cli.app import run

    run()


def _refuse(missing: list[str]) -> int:
    print(f"kvtier's command line needs {', '.join(missing)}; run: {INSTALL}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
