"""`python -m kvtier`: the command line."""

from kvtier.cli.__main__ import main

if __name__ == "__main__":
    main()
