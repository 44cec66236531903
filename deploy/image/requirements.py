"""Print the libraries of a project and of some of its extras, a line each: `requirements.py pyproject.toml EXTRA ...`.

An image installs them in a layer of their own, which is built anew only when one of these lines changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    file, *extras = sys.argv[1:]
    project = tomllib.loads(Path(file).read_text())["project"]
    print(
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
        sep="\n",
    )
