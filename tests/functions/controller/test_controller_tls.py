"""TLS between the controller and its callers: both sides verify, and a refusal says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme

from manylora.core.errors import CapacityError, CertificateRefused, ConfigError, RequestError
from manylora.functions.controller.client import ControllerClient
from manylora.functions.controller.credentials import TOKEN, own_token, read_token, tls_files
from manylora.functions.controller.server import ControllerServer, member_of
from manylora.functions.wire import ControllerSetup, NodeReport, TlsFiles

FILE = '[backbones.base]\nmodel = "base"\n[functions.one]\nbackbone = "base"\nadapter = "one"\n'


class Authority:
    """An authority, and the files of its members."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(folder / "ca.pem")

    def member(self, name: str) -> TlsFiles:
        cert = self._ca.issue_cert(name)
        cert.private_key_pem.write_to_path(self._folder / f"{name}.key")
        (self._folder / f"{name}.pem").write_bytes(b"".join(one.bytes() for one in cert.cert_chain_pems))
        return TlsFiles(
            cert=str(self._folder / f"{name}.pem"),
            key=str(self._folder / f"{name}.key"),
            ca=str(self._folder / "ca.pem"),
        )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


def with_controller(folder: Path, tls: TlsFiles, scenario: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with the address of a controller that has a certificate and no token."""
    (folder / "functions.toml").write_text(FILE)

    async def run() -> None:
        server = ControllerServer(
            ControllerSetup(config=str(folder / "functions.toml"), folder=str(folder), token=None, tls=tls)
        )
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(ready.set))
        try:
            await ready.wait()
            await scenario(server.url)
        finally:
            server.drain()
            await serving

    asyncio.run(run())


async def names(url: str, tls: TlsFiles | None) -> list[str]:
    async with ControllerClient(url, None, tls) as client:
        return [row.name for row in (await client.overview()).functions]


def test_only_certificates_of_the_authority_are_admitted(tmp_path: Path, ours: Authority, theirs: Authority) -> None:
    agent, stranger = ours.member("agent"), theirs.member("agent")
    trusting_stranger = TlsFiles(cert=stranger.cert, key=stranger.key, ca=agent.ca)

    async def scenario(url: str) -> None:
        assert url.startswith("https://127.0.0.1:")
        assert await names(url, agent) == ["one"]
        with pytest.raises(CertificateRefused, match=r"at https://127.0.0.1:\d+: it refuses the cert"):
            await names(url, trusting_stranger)
        with pytest.raises(CertificateRefused, match="its certificate is refused here: self-signed"):
            await names(url, stranger)
        with pytest.raises(CertificateRefused, match="refused here: self-signed"):  # as by any other client
            await names(url, None)
        with pytest.raises(CapacityError, match="does not answer"):
            await names(url.replace("https", "http"), None)
        assert await names(url, agent) == ["one"]

    with_controller(tmp_path, ours.member("127.0.0.1"), scenario)


def test_a_caller_without_a_certificate_is_refused(
    tmp_path: Path, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ours.member("agent")
    monkeypatch.setenv("SSL_CERT_FILE", agent.ca)  # it trusts the controller

    async def scenario(url: str) -> None:
        with pytest.raises(CertificateRefused, match="it refuses the certificate of this side, or the lack of one"):
            await names(url, None)

    with_controller(tmp_path, ours.member("127.0.0.1"), scenario)


def test_a_controller_of_another_name_is_refused(tmp_path: Path, ours: Authority) -> None:
    async def scenario(url: str) -> None:
        with pytest.raises(CertificateRefused, match="refused here: IP address mismatch"):
            await names(url, ours.member("agent"))

    with_controller(tmp_path, ours.member("controller.example"), scenario)


def test_wrong_files_are_named(tmp_path: Path, ours: Authority, theirs: Authority) -> None:
    good, other = ours.member("agent"), theirs.member("agent")
    assert tls_files(None, None, None) is None
    with pytest.raises(ConfigError, match=r"tls_key = None, .*expected all three or none"):
        tls_files(good.cert, None, good.ca)
    for wrong, message in (
        (TlsFiles(cert=good.cert, key=other.key, ca=good.ca), "tls_key = .*cannot be used"),
        (TlsFiles(cert=good.cert, key=good.key, ca=good.key), "tls_ca = .*cannot be used"),
        (TlsFiles(cert=str(tmp_path / "none"), key=good.key, ca=good.ca), "none.*cannot be used: .*No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            ControllerClient("https://controller", None, wrong)
    with pytest.raises(ConfigError, match="begins with https"):
        ControllerClient("http://controller", None, good)


def test_a_node_belongs_to_the_certificate_that_reports_for_it(tmp_path: Path, ours: Authority) -> None:
    async def first_report(url: str, tls: TlsFiles) -> None:
        empty = NodeReport(
            incarnation=tls.cert[-8:],
            is_first=True,
            since_ns=0,
            until_ns=0,
            num_devices=1,
            num_cpus=1,
            accounts=[],
            device_ns=0,
            cpu_ns=0,
            host_byte_ns=0,
            address="http://node",
            pid=1,
            generation=0,
            free_bytes=1,
            functions=[],
            backbones=[],
        )
        async with ControllerClient(url, None, tls) as client:
            await client.report("a", empty)

    async def scenario(url: str) -> None:
        mine, renewed, other = ours.member("a.example"), ours.member("a.example"), ours.member("b.example")
        await first_report(url, mine)
        await first_report(url, renewed)
        with pytest.raises(RequestError, match=r"by certificate 'DNS:b.example', expected 'DNS:a.example'"):
            await first_report(url, other)

    with_controller(tmp_path, ours.member("127.0.0.1"), scenario)


def test_a_certificate_without_hosts_has_the_names_of_its_subject() -> None:
    subject = ((("commonName", "node"),), (("organizationName", "acme"),))
    assert member_of({"subject": subject}) == "commonName:node, organizationName:acme"
    assert member_of({"subject": subject, "subjectAltName": (("IP Address", "10.0.0.1"), ("DNS", "n"))}) == (
        "DNS:n, IP Address:10.0.0.1"
    )
    assert member_of({}) is None


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    """One that was not written yet, say: every caller would have it."""
    for contents, message in (("", "is empty"), (" \n", "is empty"), ("ü", "not ASCII")):
        (tmp_path / TOKEN).write_text(contents, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_token(tmp_path / TOKEN)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")
    (tmp_path / TOKEN).write_text("")
    token = own_token(tmp_path)
    assert len(token) > 32 and own_token(tmp_path) == read_token(tmp_path / TOKEN) == token
    assert (tmp_path / TOKEN).stat().st_mode & 0o777 == 0o600
