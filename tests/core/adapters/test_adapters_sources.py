import os
from pathlib import Path

import pytest
from bad_adapters import tiny_base, write_good_adapter

from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.read import ReadRules
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import check_name, resolve_path
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for root in ("first", "second"):
        (tmp_path / root).mkdir()
    write_good_adapter(tmp_path / "outside", tiny_base())
    write_good_adapter(tmp_path / "first" / "one", tiny_base())
    write_good_adapter(tmp_path / "second" / "deep" / "two", tiny_base())
    return [tmp_path / "first", tmp_path / "second"]


def test_paths_inside_the_roots_are_found(roots: list[Path]) -> None:
    one, two = roots[0] / "one", roots[1] / "deep" / "two"
    assert resolve_path(str(one), roots) == one
    assert resolve_path("one", roots) == one
    assert resolve_path("./deep//two/", roots) == two
    assert resolve_path(str(two), roots) == two


def test_links_may_lead_from_root_to_root(roots: list[Path]) -> None:
    (roots[0] / "link").symlink_to(roots[1] / "deep" / "two")
    assert resolve_path("link", roots) == roots[1] / "deep" / "two"
    blobs = roots[0] / "blobs"
    blobs.mkdir()
    weights = roots[0] / "one" / "adapter_model.safetensors"
    weights.rename(blobs / "abc")
    weights.symlink_to("../blobs/abc")
    assert resolve_path("one", roots) == roots[0] / "one"


def test_a_root_may_itself_be_a_link(roots: list[Path], tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(roots[0])
    assert resolve_path(str(tmp_path / "alias" / "one"), [tmp_path / "alias"]) == roots[0] / "one"
    assert resolve_path(str(roots[0] / "one"), [tmp_path / "alias"]) == roots[0] / "one"


@pytest.mark.parametrize(
    "path",
    [
        "",
        " one",
        "one\n",
        "one\0two",
        "one\x1b[2J",
        "a" * 5000,
        "../outside",
        "one/../../outside",
        "~/adapters",
        "~root",
        "/etc",
        "/",
        "/proc/self/root",
    ],
)
def test_hostile_paths_are_forbidden(path: str, roots: list[Path]) -> None:
    with pytest.raises(AdapterForbidden) as caught:
        resolve_path(path, roots)
    assert len(str(caught.value)) < 600


def test_outside_is_forbidden_whether_it_exists_or_not(roots: list[Path], tmp_path: Path) -> None:
    reasons = set()
    for name in ("outside", "nothing", "first-but-longer"):
        with pytest.raises(AdapterForbidden) as caught:
            resolve_path(str(tmp_path / name), roots)
        reasons.add(caught.value.reason)
    assert len(reasons) == 1


def test_links_out_of_the_roots_are_forbidden(roots: list[Path], tmp_path: Path) -> None:
    (roots[0] / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(AdapterForbidden, match="leads outside"):
        resolve_path("out", roots)
    config = roots[0] / "one" / "adapter_config.json"
    config.unlink()
    config.symlink_to("/etc/hostname")
    with pytest.raises(AdapterForbidden, match=r"adapter_config.json leads outside") as caught:
        resolve_path("one", roots)
    assert "/etc" not in str(caught.value)


def test_what_is_no_directory_is_not_found(roots: list[Path]) -> None:
    (roots[0] / "file").write_text("x")
    os.mkfifo(roots[0] / "fifo")
    (roots[0] / "dangling").symlink_to("nowhere")
    (roots[0] / "loop").symlink_to("loop")
    for path in ("file", "fifo", "dangling", "loop", "nothing", "a" * 300):
        with pytest.raises(AdapterNotFound):
            resolve_path(path, roots)


def test_without_roots_nothing_is_allowed(roots: list[Path]) -> None:
    with pytest.raises(AdapterForbidden):
        resolve_path(str(roots[0] / "one"), [])


@pytest.mark.parametrize("name", ["sql", "org/sql-lora@v1.2", "a:b", "tenant_1/x+y", "A b", "x" * 256, "f(x)[1]"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", " x", "x ", "x\n", "x\ty", "x\0", "-x", "/x", "x/", ".", "..", "é", "x" * 257, 'x"y', "x\u202ey"]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(AdapterError, match="name"):
        check_name(name)


def adapter_bytes(base: BaseShape, rank: int, targets: tuple[str, ...] | None = None) -> int:
    modules = [m.name for m in base.modules if targets is None or m.name.rpartition(".")[2] in targets]
    return lay_out(dict.fromkeys(base.all_linear if targets is None else modules, rank), base).weight_bytes


def square_adapter_bytes(base: BaseShape, rank: int, num_targets: int) -> int:
    """Return the usual formula, which takes every projection as square."""
    return base.num_layers * num_targets * 2 * rank * base.hidden_size * base.page.element_bytes


def test_sizes_follow_the_real_shapes() -> None:
    llama_70b = tiny_base(
        num_layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocab=128, dtype="bfloat16"
    )
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    # The published 160 MB; grouped-query K and V make it 110.
    assert square_adapter_bytes(llama_70b, 16, len(attention)) == 167_772_160
    by_hand = 80 * 16 * 2 * (2 * (8192 + 8192) + 2 * (8192 + 1024))
    assert adapter_bytes(llama_70b, 16, attention) == by_hand < 167_772_160
    # A gated MLP is wider than square.
    assert adapter_bytes(llama_70b, 16) > square_adapter_bytes(llama_70b, 16, 7)


def test_size_is_what_a_packed_adapter_takes(tmp_path: Path) -> None:
    from manylora.core.adapters.read import read_adapter

    base = tiny_base()
    targets = ("q_proj", "embed_tokens")
    directory = write_good_adapter(tmp_path / "a", base, rank=4, targets=targets)
    version = read_adapter("a", directory, ReadRules(base=base, max_bytes=1 << 20)).version
    assert version.weight_bytes == adapter_bytes(base, 4, targets)
