"""Page-locked memory in chunks: parts never overlap while any tensor of them is left, and are used again after."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from manylora.execution.storage.host_tier import ALIGN_BYTES, PinnedMemory

MOST = 10 * ALIGN_BYTES


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("manylora.execution.storage.host_tier.CHUNK_BYTES", MOST)
    return []


def memory(chunks: list[int]) -> PinnedMemory:
    def allocate(num_bytes: int) -> torch.Tensor:
        chunks.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    return PinnedMemory(allocate)


def test_images_keep_their_content_while_others_come_and_go(chunks: list[int]) -> None:
    pinned, rng = memory(chunks), random.Random(0)
    kept: list[tuple[int, torch.Tensor]] = []
    for number in range(300):
        source = torch.empty(rng.randint(1, 3), rng.randint(1, ALIGN_BYTES), dtype=torch.bfloat16)
        image = pinned.empty_like(source)
        assert image.shape == source.shape and image.dtype == source.dtype and image.is_contiguous()
        image.fill_(number)
        kept.append((number, image[-1:] if rng.random() < 0.5 else image))  # a view alone keeps the whole
        rng.shuffle(kept)
        del image, kept[6:]
        for value, tensor in kept:
            assert (tensor == value).all()
    assert len(chunks) <= 6


def test_a_part_is_used_again_once_no_view_of_it_is_left(chunks: list[int]) -> None:
    pinned = memory(chunks)
    first = pinned.empty_like(torch.empty(6 * ALIGN_BYTES, dtype=torch.uint8))
    place, view = first.data_ptr(), first[5:]
    del first
    gc.collect()
    second = pinned.empty_like(torch.empty(6 * ALIGN_BYTES, dtype=torch.uint8))
    assert second.data_ptr() != place and chunks == [MOST, MOST]
    del view
    gc.collect()
    assert pinned.empty_like(torch.empty(10 * ALIGN_BYTES, dtype=torch.uint8)).data_ptr() == place


def test_an_image_larger_than_a_chunk_has_one_of_its_own(chunks: list[int]) -> None:
    pinned = memory(chunks)
    image = pinned.empty_like(torch.empty(3 * MOST + 5, dtype=torch.uint8))
    assert image.nbytes == 3 * MOST + 5 and chunks == [3 * MOST + ALIGN_BYTES]
