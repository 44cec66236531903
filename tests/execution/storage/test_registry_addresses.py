"""Hubs, object stores and servers with a login: what is asked where, and what no one else ever sees."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from huggingface_hub import constants
from registry_server import RegistryServer, serving_folder
from registry_stubs import HUB_TOKEN, S3_KEY, S3_SECRET, HubServer, StoreServer

from manylora.core.errors import AdapterError, AdapterNotFound, AdapterUnavailable
from manylora.execution.storage import registry_addresses
from manylora.execution.storage.http_registry import FIRST_BYTES, HttpRegistry

WEIGHTS = "adapter_model.safetensors"
CONTENT = bytes(range(256)) * 1000
LIMIT = 1 << 26


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("org/name/sub", "bucket/some/a@1+x=y"):
        (path := tmp_path / "web" / name).mkdir(parents=True)
        for place in {path, tmp_path / "web" / "org" / "name"}:
            (place / WEIGHTS).write_bytes(CONTENT)
            (place / "adapter_config.json").write_text("{}")
    return tmp_path / "web"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_folder(folder, HubServer) as server:
        assert isinstance(server, HubServer)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = "{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{template}")
        monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
        yield server


@pytest.fixture
def storage(hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    """The host that stores the hub's weight files, over TLS and under another name."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(registry_addresses, "HUB_HOSTS", ("localhost",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    with serving_folder(folder, tls=tls) as server:
        hub.storage = f"https://localhost:{server.server_address[1]}"
        yield server


def registry(*prefixes: str) -> HttpRegistry:
    return HttpRegistry(prefixes, retries_s=(0.0,))


def whole(asked: HttpRegistry, url: str) -> bytes:
    head = asked.open("mine", url, LIMIT)
    return head.first + asked.read("mine", url, head, FIRST_BYTES, head.size - FIRST_BYTES)


def test_a_hub_is_read_in_one_commit_and_its_token_stays_with_it(
    hub: HubServer, storage: RegistryServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked = registry("hf://org")
    pinned = asked.pin("mine", "hf://org/name")
    assert pinned == f"hf://org/name@{'a' * 40}"
    assert asked.pin("mine", "hf://org/name@main/sub") == f"{pinned}/sub"
    hub.commits["main"] = "b" * 40
    assert asked.pin("mine", "hf://org/name@main") == f"hf://org/name@{'b' * 40}", "a branch is asked for anew"
    for place in (pinned, f"{pinned}/sub"):
        assert asked.open("mine", f"{place}/adapter_config.json", LIMIT).first == b"{}"
        assert whole(asked, f"{place}/{WEIGHTS}") == CONTENT
    assert len(storage.heads) == 4 and not any("authorization" in head.lower() for head in storage.heads)
    assert HUB_TOKEN not in caplog.text and "Signature=of-the-hub" not in caplog.text
    storage.faults.statuses = [403]
    with pytest.raises(AdapterError, match="the server answers 403") as refused:
        whole(asked, f"{pinned}/{WEIGHTS}")
    assert "Signature" not in str(refused.value) and HUB_TOKEN not in str(refused.value)


@pytest.mark.parametrize("elsewhere", ["http://169.254.169.254", "https://evil.org", "https://localhost.evil.org"])
def test_a_hub_leads_to_no_other_host(hub: HubServer, elsewhere: str) -> None:
    hub.storage = elsewhere
    with pytest.raises(AdapterError, match=f"the hub sends to '{elsewhere.partition('//')[2]}'"):
        registry("hf://org").open("mine", f"hf://org/name/{WEIGHTS}", LIMIT)


def test_errors_of_a_hub_are_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = registry("hf://org")
    for url, message in (
        ("hf://org/none", "the hub shows no org/none to this server"),
        ("hf://org/name@none", "org/name has no revision 'none'"),
        ("hf://org/name@main/none", "there is no adapter_config.json"),
    ):
        with pytest.raises(AdapterNotFound, match=message):
            asked.pin("mine", url)
    hub.commits["main"] = "../../etc"
    with pytest.raises(AdapterError, match="the hub names no commit of 'main'"):
        asked.pin("mine", "hf://org/name")
    hub.faults.statuses = [503, 503]
    with pytest.raises(AdapterUnavailable, match="the hub answers 503"):
        asked.pin("mine", "hf://org/name")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AdapterNotFound) as refused:
        registry("hf://org").pin("mine", "hf://org/name")
    assert "hf_wrong" not in str(refused.value)


def test_object_stores_get_signed_requests(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("obstore")
    caplog.set_level(logging.DEBUG)
    with serving_folder(folder, StoreServer) as server:
        private = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {"type": "service_account", "private_key": private.decode(), "private_key_id": "1", "client_id": "1"}
        account |= {"client_email": "a@host.org", "token_uri": "http://127.0.0.1:1/", "gcs_base_url": server.url}
        for name, value in {
            "AWS_ACCESS_KEY_ID": S3_KEY,
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "AWS_ENDPOINT_URL": server.url,
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
            "AZURE_STORAGE_ENDPOINT": server.url,
        }.items():
            monkeypatch.setenv(name, value)
        for scheme in ("s3", "gs", "az"):
            asked = registry(f"{scheme}://bucket/some")
            assert whole(asked, f"{scheme}://bucket/some/a@1+x=y/{WEIGHTS}") == CONTENT
            with pytest.raises(AdapterNotFound, match=f"there is no {WEIGHTS}"):
                asked.open("mine", f"{scheme}://bucket/some/b/{WEIGHTS}", LIMIT)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(AdapterError, match="the server answers 403"):
            registry("s3://bucket").open("mine", f"s3://bucket/some/a@1+x=y/{WEIGHTS}", LIMIT)
        server.faults.statuses = [307]
        with pytest.raises(AdapterError, match="redirects are not followed"):
            registry("gs://bucket").open("mine", f"gs://bucket/some/a@1+x=y/{WEIGHTS}", LIMIT)
    assert "ignature" not in caplog.text and "sig=" not in caplog.text
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{nonsense: secret}")
    with pytest.raises(AdapterError, match="no credentials for gs://") as refused:
        registry("gs://bucket").open("mine", f"gs://bucket/{WEIGHTS}", LIMIT)
    assert "secret" not in str(refused.value)


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(AdapterError, match=r"s3:// needs obstore: pip install 'manylora\[stores\]'"):
        registry("s3://bucket").open("mine", f"s3://bucket/a/{WEIGHTS}", LIMIT)


def test_a_login_goes_to_its_host_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving_folder(folder) as server, serving_folder(folder) as other:
        url = f"{server.url}/org/name/{WEIGHTS}"
        for host, user, expected in (
            ("127.0.0.1", "me", "Basic bWU6cHc="),
            ("127.0.0.1", "bearer", "Bearer pw"),
            ("host.org", "me", None),
        ):
            (tmp_path / "netrc").write_text(f"machine {host} login {user} password pw\ndefault login d password dd\n")
            server.heads.clear()
            assert whole(registry(server.url), url) == CONTENT
            assert all((f"Authorization: {expected}" in head) == (expected is not None) for head in server.heads)
        assert registry_addresses.Addresses()._login("mine", "http://host.org/a") == {}, "not without TLS"
        assert "Authorization" in registry_addresses.Addresses()._login("mine", "https://host.org/a")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pw\n")
        server.faults.statuses, server.faults.headers = [302], {"Location": f"{other.url}/a"}
        with pytest.raises(AdapterError, match="redirects are not followed"):
            whole(registry(server.url, other.url), url)
        assert not other.heads
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login bearer password pẅ\n", encoding="utf-8")
        with pytest.raises(AdapterError, match=r"the bearer token of 127\.0\.0\.1 in ~/\.netrc is not printable ASCII"):
            whole(registry(server.url), url)
        (tmp_path / "netrc").write_text("nonsense pw\n")
        assert whole(registry(server.url), url) == CONTENT
    assert "netrc_not_read" in caplog.text and "bWU6cHc" not in caplog.text and " pw" not in caplog.text
