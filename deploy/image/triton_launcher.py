"""Compile Triton's launcher of kernels into Triton's cache, so that an image needs no compiler: it is one file of C.

Kernels themselves are compiled by Triton and `ptxas`, which its package has. The launcher is linked against the library
of CUDA's driver, which is there with a GPU alone. A library with the same name and functions takes its place here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    (triton,) = find_spec("triton").submodule_search_locations
    launcher = Path(triton, "backends", "nvidia", "driver.c").read_text()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        functions = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", launcher)))
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, f"-Wl,-soname,{library.name}", source], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        os.environ["LD_LIBRARY_PATH"] = folder
        # In a process of its own, which looks for libraries there from its start.
        subprocess.run(["python", "-c", "from triton.backends.nvidia.driver import CudaUtils; CudaUtils()"], check=True)
    (made,) = Path(os.environ["TRITON_CACHE_DIR"]).glob("*/cuda_utils*.so")
    print(f"compiled {made}")
