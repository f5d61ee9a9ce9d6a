"""`python -m ajusta`: the same as the `ajusta` command."""

from __future__ import annotations

from ajusta.cli.main import main

if __name__ == "__main__":
    main()
