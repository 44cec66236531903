"""Adapters from a registry: the same adapters as from disk, by ranges, from the URLs that are allowed alone."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_adapters import tiny_base, write_good_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registry_server import RegistryServer, serving_folder

from manylora.core.adapters.folder import LocalFile
from manylora.core.adapters.identity import is_provisional
from manylora.core.adapters.packed import PackedAdapter, image_of, own_memory
from manylora.core.adapters.read import HeaderReader, ReadRules, read_adapter
from manylora.core.adapters.read_layers import LayerReader
from manylora.core.adapters.remote import RemoteFile
from manylora.core.adapters.report import inspect_adapter
from manylora.core.adapters.sources import check_registry, is_moving, open_folder, pinned, registry_of, resolve_url
from manylora.core.adapters.weight_file import parse_header, read_header_bytes
from manylora.core.errors import (
    AdapterError,
    AdapterForbidden,
    AdapterNotFound,
    AdapterUnavailable,
    ConfigError,
)
from manylora.core.types import AdapterVersion
from manylora.execution.storage import reader_process
from manylora.execution.storage.http_registry import HttpRegistry
from manylora.execution.storage.reader_messages import ReaderSettings
from manylora.execution.storage.reader_process import ReaderProcess
from manylora.execution.storage.registry_process import PipedRegistry

BASE = tiny_base(num_layers=5)
TARGETS = ("embed_tokens", "q_proj", "k_proj", "o_proj", "down_proj", "lm_head")
LIMIT = 1 << 26
SIZE_OF_FIRST = 65536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of some 400 KB, most of which does not come with its opening."""
    return write_good_adapter(tmp_path_factory.mktemp("disk") / "a", BASE, rank=64, targets=TARGETS)


@pytest.fixture(scope="module")
def known(folder: Path) -> PackedAdapter:
    return read_adapter("mine", folder, ReadRules(base=BASE, max_bytes=LIMIT))


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[RegistryServer]:
    shutil.copytree(folder, tmp_path / "org" / "a")
    with serving_folder(tmp_path) as server:
        yield server


@pytest.fixture
def registry(server: RegistryServer) -> Iterator[HttpRegistry]:
    registry = HttpRegistry([f"{server.url}/org/"], retries_s=(0.0, 0.0))
    yield registry
    registry.close()


def read(server: RegistryServer, registry: HttpRegistry, max_bytes: int = LIMIT) -> PackedAdapter:
    return read_adapter("mine", f"{server.url}/org/a", ReadRules(base=BASE, max_bytes=max_bytes, registry=registry))


def check(server: RegistryServer, registry: HttpRegistry) -> AdapterVersion:
    headers = HeaderReader(ReadRules(base=BASE, max_bytes=LIMIT, registry=registry))
    return headers.read("mine", f"{server.url}/org/a")


def pages(version: AdapterVersion, registry: HttpRegistry) -> tuple[np.ndarray, list[int]]:
    """Read a version again; return its image and the counts of full pages."""
    with LayerReader(version, ReadRules(base=BASE, max_bytes=LIMIT, registry=registry)) as reader:
        image = image_of(own_memory(version.host_bytes), reader.layout, BASE.page)
        return image, list(reader.pack(image))


def place_of(folder: Path, module: str) -> int:
    """Return the first byte of a module in the weight file."""
    path = folder / "adapter_model.safetensors"
    file = LocalFile("mine", path.open("rb"), path)
    try:
        tensors = parse_header("mine", read_header_bytes("mine", file), file.size)
        return min(t.place[0] for key, t in tensors.items() if module in key and t.place)
    finally:
        file.close()


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("https://Host.org/a/b", "https://host.org"),
        ("https://host.org:443/a/b/", "https://host.org/a/"),
        ("http://[::1]:8080/a", "http://[::1]:8080/a"),
        ("hf://Org/name@v1/sub", "hf://Org"),
        ("hf://Org/name@v1", "hf://Org/name/"),
        ("s3://my_bucket/a/b@1#sha256=" + "0" * 64, "s3://my_bucket/a"),
        ("az://container/a", "az://container"),
    ],
)
def test_urls_below_a_prefix_are_allowed(url: str, prefix: str) -> None:
    found = resolve_url("mine", url, ["https://other.org/", prefix])
    assert not found.endswith("/") and found.startswith(check_registry(prefix))


@pytest.mark.parametrize(
    "url",
    [
        *("https://host.org.evil.org/a/b", "https://host.org@evil.org/a/b", "https://evil.org/a/b", "https://evil.org"),
        *("https://u:p@host.org/a/b", "https://host.org/a/../b", "https://host.org/a/./../c", "https://host.org/ab"),
        *(
            "https://host.org/a/%2e%2e/b",
            "https://host.org/a/..%2fb",
            "https://host.org/a/b?x=1",
            "https://host.org/a#b",
        ),
        *("hf://org/ab", "hf://org", "hf://evil/a", "hf://org/a@1/../b", "s3://org/a", "https://host.org/a@1"),
        *("hf://org/a#sha256=0", "hf://org:1/a", "hf://u@org/a", "ftp://host.org/a/b"),
        *("http://host.org/a/b", "https://host.org:444/a/b", "https://host.org/a\\..\\b", "https://host.org/a//b"),
        *("https://host.org/a/b\n", "https://host.org/a/b c", "https:///a/b", "https://host.org/a/" + "b" * 2048),
    ],
)
def test_all_other_urls_are_refused(url: str) -> None:
    with pytest.raises(AdapterForbidden):
        resolve_url("mine", url, ["https://host.org/a/", "hf://org/a"])


def test_without_a_registry_the_option_is_named(tmp_path: Path) -> None:
    for refused in (
        lambda: resolve_url("mine", "https://host.org/a", []),
        lambda: open_folder("mine", "https://host.org/a"),
    ):
        with pytest.raises(AdapterForbidden, match="--lora-registry"):
            refused()
    for url in ("ftp://host", "hf://org/name@main", "https://host/a#sha256=" + "0" * 64):
        with pytest.raises(ConfigError, match=f"Got the URL '{url}'"):
            check_registry(url)


def test_a_url_of_a_hub_is_pinned_to_a_commit_of_its_own_place() -> None:
    commit, digest = "0123456789abcdef" * 2 + "01234567", "#sha256=" + "0" * 64
    asked = f"hf://org/name@main/sub{digest}"
    assert is_moving(asked) and is_moving("hf://org/name") and not is_moving(f"hf://org/name@{commit}")
    assert pinned(asked, f"hf://org/name@{commit}/sub{digest}") == f"hf://org/name@{commit}/sub{digest}"
    for other in (f"hf://org/name@{commit}/sub", f"hf://org/other@{commit}/sub{digest}", asked, "/etc", ""):
        assert pinned(asked, other) == asked
    assert registry_of(asked) == "hf://org/name" and registry_of(f"https://host/a@1{digest}") == "https://host/a@1"


def test_it_is_the_adapter_that_a_disk_would_have(
    server: RegistryServer, registry: HttpRegistry, known: PackedAdapter
) -> None:
    found = read(server, registry)
    assert (found.version.key, found.version.layer_digests) == (known.version.key, known.version.layer_digests)
    assert found.version.source == f"{server.url}/org/a"
    np.testing.assert_array_equal(found.image, known.image)
    report = inspect_adapter(f"{server.url}/org/a", BASE, max_bytes=LIMIT, registry=registry)
    assert report.version == found.version


def test_layers_are_ranges_and_count_as_they_come_from_the_first_read_on(
    server: RegistryServer, registry: HttpRegistry, known: PackedAdapter
) -> None:
    version = check(server, registry)
    assert is_provisional(version.key) and len(server.asked) == 2, "one request for each file"
    image, full = pages(version, registry)
    np.testing.assert_array_equal(image, known.image)
    assert len(full) == BASE.num_layers + 2 and len(set(full)) > BASE.num_layers
    assert len(server.ranges()) == BASE.num_layers, "embedding and head came with the opening"
    again, of_known = pages(replace(version, layer_digests=known.version.layer_digests), registry)
    np.testing.assert_array_equal(again, known.image)
    assert of_known == full


@pytest.mark.parametrize("etags", ["weak", "none"])
def test_without_a_strong_etag_a_first_read_counts_at_its_end(
    etags: str, server: RegistryServer, registry: HttpRegistry, known: PackedAdapter
) -> None:
    server.faults.etags = etags
    version = check(server, registry)
    image, full = pages(version, registry)
    np.testing.assert_array_equal(image, known.image)
    assert full == [version.num_pages]


def test_an_answer_that_breaks_off_is_resumed_at_the_byte_reached(
    server: RegistryServer, registry: HttpRegistry, known: PackedAdapter
) -> None:
    server.faults.cut_after = [50_000, 70_000, 1000, 0]  # of an opening, and of the range behind it
    found = read(server, registry)
    np.testing.assert_array_equal(found.image, known.image)
    opening, *ranges = [asked for file, asked in server.asked if file.startswith("adapter_model")]
    assert opening == "bytes=0-65535" and ranges[0] == opening, "an opening is repeated"
    begin, end = (int(part) for part in str(ranges[1]).removeprefix("bytes=").split("-"))
    assert ranges[1:] == [f"bytes={at}-{end}" for at in (begin, begin + 70_000, begin + 71_000, begin + 71_000)]


def test_errors_of_the_server_are_retried_and_then_named(server: RegistryServer, registry: HttpRegistry) -> None:
    server.faults.statuses = [503, 429]
    check(server, registry)
    server.faults.statuses = [500] * 3
    with pytest.raises(AdapterError, match=r"cannot read .*adapter_config\.json: the server answers 500"):
        check(server, registry)


@pytest.mark.slow
@given(
    has_ranges=st.booleans(),
    cuts=st.lists(st.integers(0, 300_000), max_size=5),
    reads=st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 300_000)), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_of_any_server_that_breaks_off_anywhere_is_right(
    has_ranges: bool, cuts: list[int], reads: list[tuple[int, int]], server: RegistryServer
) -> None:
    content = (server.root / "org" / "a" / "adapter_model.safetensors").read_bytes()
    server.faults.has_ranges, server.faults.cut_after = has_ranges, list(cuts)
    registry = HttpRegistry([server.url], retries_s=[0.0] * len(cuts))
    try:
        url = f"{server.url}/org/a/adapter_model.safetensors"
        head = registry.open("mine", url, LIMIT)
        file = RemoteFile("mine", url, head, registry)
        assert file.size == len(content)
        for begin, end in map(sorted, reads):
            assert file.read(begin, end - begin) == content[begin:end]
    finally:
        registry.close()


@pytest.mark.parametrize("checks_if_match", [True, False])
@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_file_that_changes_between_two_ranges_is_refused(
    has_ranges: bool, checks_if_match: bool, server: RegistryServer, registry: HttpRegistry
) -> None:
    version = check(server, registry)
    server.faults.checks_if_match, server.faults.has_ranges = checks_if_match, has_ranges
    file = server.root / "org" / "a" / "adapter_model.safetensors"
    with LayerReader(version, ReadRules(base=BASE, max_bytes=LIMIT, registry=registry)) as reader:
        image = image_of(own_memory(version.host_bytes), reader.layout, BASE.page)
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors changed while it was read"):
            list(reader.pack(image))
    with pytest.raises(AdapterError, match="changed since it was registered"):
        pages(version, registry)


def test_a_changed_configuration_is_another_version(server: RegistryServer, registry: HttpRegistry) -> None:
    version = check(server, registry)
    config = server.root / "org" / "a" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 128', '"lora_alpha": 64'))
    with pytest.raises(AdapterError, match="changed since it was registered"):
        pages(version, registry)


def test_a_server_without_ranges_is_read_once_and_in_order(
    server: RegistryServer, registry: HttpRegistry, folder: Path, known: PackedAdapter
) -> None:
    server.faults.has_ranges = False
    version = check(server, registry)
    server.asked.clear()
    server.faults.cut_after = [SIZE_OF_FIRST, SIZE_OF_FIRST + 100_000]
    image, full = pages(version, registry)
    np.testing.assert_array_equal(image, known.image)
    assert len(full) == BASE.num_layers + 2
    bodies = [asked for file, asked in server.asked if file.startswith("adapter_model")]
    assert len(bodies) == 3 and bodies[-1] is None, "opened, begun, and begun again where it broke off"


def test_what_is_kept_of_a_body_is_right_when_a_range_of_it_was_given_up(
    server: RegistryServer, registry: HttpRegistry
) -> None:
    """Of a server without ranges: the rest of the body comes behind what was there, not behind what was read of it."""
    server.faults.has_ranges = False
    url, content = f"{server.url}/org/a/adapter_model.safetensors", bytes(range(251)) * 8000
    (server.root / "org" / "a" / "adapter_model.safetensors").write_bytes(content)
    head = registry.open("mine", url, LIMIT)
    given_up = registry.parts("mine", url, head, 0, 1_000_000)
    next(given_up)
    given_up.close()
    assert registry.read("mine", url, head, 1_000_000, len(content) - 1_000_000) == content[1_000_000:]


class FullOnce:
    """A temporary file on a disk that is full when it is written to for the second time."""

    def __init__(self, file: Any) -> None:
        self._file, self._num_writes = file, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, part: memoryview) -> int:
        self._num_writes += 1
        if self._num_writes == 2:
            raise OSError(28, "No space left on device")
        return int(self._file.write(part))


def test_no_byte_is_left_out_of_a_body_that_the_disk_had_no_room_for(
    server: RegistryServer, registry: HttpRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.has_ranges = False
    url, content = f"{server.url}/org/a/adapter_model.safetensors", bytes(range(251)) * 8000
    (server.root / "org" / "a" / "adapter_model.safetensors").write_bytes(content)
    head = registry.open("mine", url, LIMIT)
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **kwargs: FullOnce(make(**kwargs)))
    with pytest.raises(
        AdapterUnavailable, match=r"ignores ranges, and adapter_model.* cannot be kept meanwhile: No space"
    ):
        registry.read("mine", url, head, 0, len(content))
    monkeypatch.undo()
    assert registry.read("mine", url, head, 0, len(content)) == content

    def nowhere(**kwargs: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    registry.close()
    other = HttpRegistry([server.url])
    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)
    with pytest.raises(AdapterUnavailable, match="cannot be kept meanwhile: No usable"):
        other.read("mine", url, head, 0, 10)
    monkeypatch.undo()
    assert other.read("mine", url, head, 0, len(content)) == content
    other.close()


def test_identities_that_no_client_could_send_are_compared(server: RegistryServer, registry: HttpRegistry) -> None:
    """An ETag may hold bytes beyond ASCII, and a date a year that no calendar has."""
    server.faults.headers = {"ETag": '"\xe9"'}
    version = check(server, registry)
    assert len(pages(version, registry)[1]) == BASE.num_layers + 2
    server.faults.headers = {"ETag": '"\xe8"'}
    with pytest.raises(AdapterError, match="changed"):
        pages(version, registry)
    server.faults.headers = {"ETag": "", "Last-Modified": "Thu, 01 Jan 99999 00:00:00 GMT"}
    assert len(pages(check(server, registry), registry)[1]) > 0


def test_bounds_and_manners_of_servers(server: RegistryServer, registry: HttpRegistry) -> None:
    with pytest.raises(AdapterError, match="bytes, at most 1000 are accepted"):
        read(server, registry, max_bytes=1000)
    for headers, message in (
        ({"ETag": "", "Last-Modified": ""}, "neither ETag nor Last-Modified"),
        ({"Content-Range": "bytes 0-9/*"}, "does not say how many bytes"),
        ({"Content-Range": "bytes 1-10/100"}, "another range than bytes 0 to 99"),
        ({"Content-Encoding": "gzip"}, "encoded, which was not asked for"),
    ):
        server.faults.headers = headers
        with pytest.raises(AdapterError, match=message):
            read(server, registry)
    server.faults.headers = {}
    for status, message in ((302, "redirects are not followed"), (403, "the server answers 403")):
        server.faults.statuses = [status]
        with pytest.raises(AdapterError, match=message):
            read(server, registry)
    with pytest.raises(AdapterError, match="took longer than 0 s"):
        read(server, HttpRegistry([server.url], limit_s=0.0))
    (server.root / "org" / "a" / "adapter_config.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(AdapterError, match=r"adapter_config\.json has 2097152 bytes, at most 1048576"):
        read(server, registry)
    with pytest.raises(AdapterNotFound, match=r"there is no adapter_config\.json$"):
        read_adapter("mine", f"{server.url}/org/b", ReadRules(base=BASE, max_bytes=LIMIT, registry=registry))


@pytest.mark.slow
def test_slow_headers_are_refused_alone_and_soon(
    server: RegistryServer, folder: Path, known: PackedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters on a server that begins to answer and never ends, among those of others."""
    monkeypatch.setattr(reader_process, "CHECK_S", 1.5)
    monkeypatch.setattr(reader_process, "SLOW_CHECKS_S", 3.0)
    limits: list[float] = []
    receive = reader_process.receive

    def timed(pipe: Connection, limit_s: float) -> Any:
        limits.append(limit_s)
        return receive(pipe, limit_s)

    monkeypatch.setattr(reader_process, "receive", timed)
    server.faults.held_from = 0
    process = ReaderProcess()
    process.configure(ReaderSettings(base=BASE, max_bytes=LIMIT, registries=(f"{server.url}/org",), limit_s=600.0))
    asked = [("good", str(folder)), *((f"slow-{n}", f"{server.url}/org/a") for n in range(3)), ("last", str(folder))]
    try:
        found = process.check(asked)
        assert [one.adapter for one in found if isinstance(one, AdapterError)] == ["slow-0", "slow-1", "slow-2"]
        assert all("took longer than" in one.reason for one in found if isinstance(one, AdapterError))
        assert not any(isinstance(found[place], AdapterError) for place in (0, 4))
        assert limits[1] == 1.5 and limits[-1] == reader_process.HURRIED_CHECK_S
    finally:
        server.faults.released.set()
        process.close()


@pytest.mark.slow
def test_a_process_that_has_ended_is_a_registry_that_does_not_answer_now() -> None:
    """Another one is started for the next read, so an adapter is tried again, and not left out."""
    pipe, other = Pipe()
    other.close()
    with pytest.raises(AdapterUnavailable, match="the process that asks registries died"):
        PipedRegistry(pipe).open("mine", "https://host.org/a", LIMIT)


def test_a_reader_without_network_hands_on_layers_while_later_ones_are_held_back(
    server: RegistryServer, folder: Path, known: PackedAdapter
) -> None:
    """The whole path: the confined reader, the process that asks, and pages that count before the rest was sent."""
    process = ReaderProcess()
    process.configure(
        ReaderSettings(base=BASE, max_bytes=LIMIT, roots=(), registries=(f"{server.url}/org",), limit_s=60.0)
    )
    try:
        (version,) = process.check([("mine", f"{server.url}/org/a")])
        assert isinstance(version, AdapterVersion)
        server.faults.held_from = place_of(folder, "layers.3")
        begun: list[PackedAdapter] = []
        counts: list[int] = []
        needed = known.layout.groups["model.layers.2.mlp.down_proj"].num_pages_needed - 1
        early = threading.Event()

        def advance(num_full: int) -> None:
            counts.append(num_full)
            if num_full >= needed:
                early.set()

        digests: list[bytes] = []
        thread = threading.Thread(target=lambda: digests.append(process.read_layers(version, begun.append, advance)))
        thread.start()
        assert early.wait(60), "layers 0 to 2 are there"
        np.testing.assert_array_equal(begun[0].image[:needed], known.image[:needed])
        assert max(counts) < version.num_pages and not digests
        server.faults.released.set()
        thread.join(60)
        assert digests == [known.version.layer_digests] and counts[-1] == version.num_pages
        np.testing.assert_array_equal(begun[0].image, known.image)

        for elsewhere in (f"{server.url}/other/a", "https://host.org/a"):
            with pytest.raises(AdapterForbidden, match="in no registry that --lora-registry allows"):
                process.read("mine", elsewhere)
        assert process._registry is not None
        process._registry.kill()
        process._registry.wait()
        assert process.read("mine", f"{server.url}/org/a").version.key == known.version.key
    finally:
        process.close()
