"""TLS of the router: towards clients, and towards servers whose certificates lead to an authority of one's own."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from proxying import FakeServer, routing, run, until

from manylora.core.errors import ConfigError
from manylora.core.server_config import TlsConfig
from manylora.route.config import ProxyConfig
from manylora.route.serve import Proxy

NUM_STALLED = 20


def test_clients_and_servers_speak_tls_and_a_handshake_that_stalls_holds_up_no_other(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, chain, key = (str(tmp_path / name) for name in ("ca.pem", "chain.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(chain)
    of_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issued.configure_cert(of_server)
    tls = TlsConfig(ssl_certfile=chain, ssl_keyfile=key)

    async def test() -> None:
        fake = FakeServer()
        await fake.start(tls=of_server)
        url = f"https://127.0.0.1:{fake.port}"
        async with routing(url, backend_ca_certs=ca, tls=tls) as (proxy, _):
            address = proxy.url.removeprefix("https://").split(":")
            stalled = [await asyncio.open_connection(*address) for _ in range(NUM_STALLED)]
            async with httpx.AsyncClient(base_url=proxy.url, verify=ssl.create_default_context(cafile=ca)) as http:
                body = {"model": "base", "prompt": "hello", "stream": True}
                answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.text.endswith("data: [DONE]\n\n")) == (200, True)
            for _, writer in stalled:
                writer.close()
        async with routing(url) as (proxy, client):  # the system knows no such authority
            (backend,) = proxy.backends
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in backend.health.reason)
            assert (await client.complete("base")).status == 503
        await fake.stop()

    run(test)


def test_an_authority_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    authorities = trustme.CA(), trustme.CA()
    ca = tmp_path / "ca.pem"
    authorities[0].cert_pem.write_to_path(str(ca))
    of_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authorities[0].issue_cert("127.0.0.1").configure_cert(of_server)

    async def test() -> None:
        fake = FakeServer()
        await fake.start(tls=of_server)
        try:
            async with routing(f"https://127.0.0.1:{fake.port}", backend_ca_certs=str(ca)) as (proxy, _):
                (backend,) = proxy.backends
                await until(lambda: backend.health.is_up)
                authorities[1].issue_cert("127.0.0.1").configure_cert(of_server)
                await until(lambda: "CERTIFICATE_VERIFY_FAILED" in backend.health.reason)
                ca.write_text("nothing")
                await until(lambda: "CERTIFICATE_VERIFY_FAILED" in backend.health.reason)
                authorities[1].cert_pem.write_to_path(str(ca))
                await until(lambda: backend.health.is_up)
        finally:
            await fake.stop()

    run(test)


def test_a_file_that_holds_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="backend_ca_certs"):
        Proxy(ProxyConfig(backends=("dns+https:a:1",), port=0, backend_ca_certs=str(tmp_path / "none.pem")))
