import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manylora.core.adapters.bin_file import describe_bin
from manylora.core.adapters.folder import LocalFile
from manylora.core.adapters.tensors import StoredTensor
from manylora.core.errors import AdapterError

LIMIT = 1 << 20
REBUILD = torch._utils._rebuild_parameter


def read_bin(name: str, path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        source = LocalFile(name, file, path)
        described = describe_bin(name, file, max_bytes)
        return {
            key: one
            if one.place is None
            else one.filled({one.place: np.frombuffer(source.read(*_range(one)), np.uint8)})
            for key, one in described.items()
        }


def _range(tensor: StoredTensor) -> tuple[int, int]:
    assert tensor.place is not None and tensor.data.size == 0
    begin, end = tensor.place
    return begin, end - begin


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def test_tensors_come_back_as_stored(tmp_path: Path) -> None:
    content = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.arange(6.0).reshape(2, 3).t().to(torch.bfloat16),
        "c": torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        "d": torch.ones(3, dtype=torch.float16)[::2],
        "e": torch.ones(2, dtype=torch.int8),
        "f": torch.ones(0, 4),
    }
    tensors = read_bin("mine", saved(tmp_path / "adapter_model.bin", content), LIMIT)
    assert {k: (t.dtype, t.shape) for k, t in tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (3, 2)),
        "c": ("F64", (2,)),
        "d": ("F16", (2,)),
        "e": ("int8", (2,)),
        "f": ("F32", (0, 4)),
    }
    for key in "abcdf":
        np.testing.assert_array_equal(tensors[key].as_float32(), content[key].detach().float().numpy())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2)], "holds a list"),
        ({"a": {"b": torch.ones(2)}}, "more than tensors by name"),
        ({3: torch.ones(2)}, "more than tensors by name"),
        ({"a": torch.ones(2, 2).to_sparse()}, "more than tensors by name"),
        ({"a": torch.ones(1).expand(1 << 40)}, f"more than {LIMIT} bytes"),
        ({"a": torch.ones(1).expand(1 << 17), "b": torch.ones(1).expand((1 << 17) + 1)}, f"more than {LIMIT} bytes"),
        ({"a": Path("x")}, "more than tensors, and is not executed"),
    ],
)
def test_more_or_larger_than_tensors_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=words):
        read_bin("mine", saved(tmp_path / "adapter_model.bin", content), LIMIT)


class Built:
    """Pickles as an allowed object whose state is set afterwards."""

    def __init__(self, function: Any, args: tuple, state: Any) -> None:
        self.parts = function, args, state

    def __reduce__(self) -> tuple:
        return self.parts


@pytest.mark.parametrize(
    "content",
    [
        {"a": Built(REBUILD, (torch.ones(2), False, OrderedDict()), (None, {"offset": 1 << 40}))},
        {"a": Built(REBUILD, (torch.ones(2), False, OrderedDict()), {"offset": 1 << 40})},
        {"a": Built(REBUILD, (3, False, OrderedDict()), None)},
    ],
)
def test_the_state_of_a_tensor_cannot_be_set(content: Any, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"damaged|more than tensors"):
        read_bin("mine", saved(tmp_path / "adapter_model.bin", content), LIMIT)


def test_metadata_of_a_state_dict_is_passed_over(tmp_path: Path) -> None:
    content = OrderedDict(a=torch.ones(2))
    content._metadata = {"version": 1}  # type: ignore[attr-defined]
    content.items_ = torch.ones(1)  # type: ignore[attr-defined]
    assert read_bin("mine", saved(tmp_path / "adapter_model.bin", content), LIMIT).keys() == {"a"}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "arguments",
    [
        (1, (2, 2), (2, 1)),
        (0, (2, 3), (2, 1)),
        (0, (1 << 61, 0), (1, 1)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), (1, 1)),
    ],
)
def test_a_tensor_lies_in_its_storage(arguments: tuple, tmp_path: Path) -> None:
    storage = torch.ones(4).storage()
    window = Built(torch._utils._rebuild_tensor_v2, (storage, *arguments, False, OrderedDict()), None)
    path = saved(tmp_path / "adapter_model.bin", {"a": window})
    if arguments[1][-1] == 0:
        assert read_bin("mine", path, LIMIT)["a"].data.size == 0
        return
    with pytest.raises(AdapterError, match="damaged"):
        read_bin("mine", path, LIMIT)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_only_the_ranges_of_tensors_are_read(tmp_path: Path) -> None:
    fused = torch.arange(3000.0).reshape(100, 30)
    tensors = read_bin("mine", saved(tmp_path / "adapter_model.bin", {"a": fused[:, 10:20], "b": fused[7]}), LIMIT)
    for key, expected in (("a", fused[:, 10:20]), ("b", fused[7])):
        np.testing.assert_array_equal(tensors[key].as_float32(), expected.numpy())
    with (tmp_path / "adapter_model.bin").open("rb") as file:
        _, length = _range(describe_bin("mine", file, LIMIT)["b"])
    assert length == 4 * 30
    window = Built(torch._utils._rebuild_tensor_v2, (fused.storage(), 0, (2,), (2000,), False, OrderedDict()), None)
    with pytest.raises(AdapterError, match="spread over more than"):
        read_bin("mine", saved(tmp_path / "spread.bin", {"a": window}), LIMIT)


def test_a_memo_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}r\xff\xff\xff\x7f.")
    with pytest.raises(AdapterError, match="damaged"):
        read_bin("mine", path, LIMIT)


def test_a_compressed_archive_is_refused_unread(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain.bin", {"a": torch.zeros(1 << 22)})
    bomb = tmp_path / "bomb.bin"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    assert bomb.stat().st_size < LIMIT
    with pytest.raises(AdapterError, match="compressed"):
        read_bin("mine", bomb, LIMIT)


def test_the_old_format_and_garbage_are_refused(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.bin", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(AdapterError, match=r"older than 1\.6"):
        read_bin("mine", old, LIMIT)
    whole = saved(tmp_path / "whole.bin", {"a": torch.ones(200)}).read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        damaged = tmp_path / "cut.bin"
        damaged.write_bytes(whole[:cut])
        with pytest.raises(AdapterError, match="damaged"):
            read_bin("mine", damaged, LIMIT)
