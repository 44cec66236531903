"""`python -m manylora`: the same as the `manylora` program."""

from __future__ import annotations

from manylora.cli import main

if __name__ == "__main__":
    main()
