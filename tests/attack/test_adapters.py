"""Folders and registries of adapters that are hostile by their size or their silence: no neighbour is late.

The engine is the demo's own, which reads adapters. A neighbour's stream goes on while they are loaded and requested.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from attack_target import MIB, MODEL, Answer, Target, Watch, running

from manylora.demo import demo_adapters

CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Hosts:
    """A server, a folder that a tenant writes, and the URL of a registry that accepts connections and never answers."""

    target: Target
    folder: Path
    tarpit: str

    def load(self, name: str, path: str) -> Answer:
        return self.target.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def complete(self, name: str) -> Answer:
        return self.target.post("/v1/completions", {"model": name, "prompt": "hi", "max_tokens": 2})


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    tmp = tmp_path_factory.mktemp("adapters")
    folder = tmp / "tenants"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tarpit = f"http://127.0.0.1:{silent.getsockname()[1]}/org"
        with running(tmp, "--lora-dir", str(folder), "--lora-registry", tarpit, model=(MODEL,)) as target:
            yield Hosts(target, folder, tarpit)


def calls_on_a_list(folder: Path) -> None:
    pairs = b"]q\x00(" + b"".join(b"M%sK\x02\x86" % struct.pack("<H", key) for key in range(20_000)) + b"e\x85q\x01"
    program = b"\x80\x02" + pairs + b"ccollections\nOrderedDict\nq\x02h\x01R" * 100_000 + b"}."
    (folder / "adapter_model.safetensors").unlink()
    with zipfile.ZipFile(folder / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)


def sparse(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 33)


def many_tokens(folder: Path) -> None:
    large = b'{"added_tokens":[' + b'{"id":1,"content":"x"},' * (60 * MIB // 24) + b'{"id":1,"content":"x"}]}'
    (folder / "tokenizer.json").write_bytes(large)
    (folder / "tokenizer_config.json").write_bytes(large)
    (folder / "added_tokens.json").write_text(json.dumps({f"<{n}>": n for n in range(100_000)}))


def long_mapping(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "auto_mapping": {"x": "x" * 900_000}}))


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (calls_on_a_list, 500, b"more than tensors"),
        (sparse, 500, b"damaged"),
        (many_tokens, 200, b""),
        (long_mapping, 200, b""),
    ],
)
def test_a_hostile_folder_stops_nobody(hosts: Hosts, change: Callable[[Path], None], status: int, words: bytes) -> None:
    name = change.__name__
    folder = Path(shutil.copytree(next(iter(demo_adapters().values())), hosts.folder / name))
    change(folder)
    with Watch(hosts.target) as seen, ThreadPoolExecutor(10) as clients:
        loaded = hosts.load(name, str(folder))
        answers = list(clients.map(hosts.complete, [name] * 10))
    print(seen.summary())
    assert loaded.status == status and words in loaded.body, loaded.body
    assert {answer.status for answer in answers} == {200 if status == 200 else 404}
    seen.check()


def test_a_registry_that_never_answers_stops_nobody(hosts: Hosts) -> None:
    folder = Path(shutil.copytree(next(iter(demo_adapters().values())), hosts.folder / "quick"))

    def ask_the_tarpit() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server ends before
            hosts.load("slow", f"{hosts.tarpit}/slow")

    threading.Thread(target=ask_the_tarpit, daemon=True).start()
    with Watch(hosts.target) as seen:
        assert hosts.load("quick", str(folder)).status == 200
        for _ in range(5):
            assert hosts.complete("quick").status == 200
        assert hosts.complete("slow").status == 404
    print(seen.summary())
    seen.check()
