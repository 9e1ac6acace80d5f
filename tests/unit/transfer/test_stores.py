"""Stores of blocks: what they hold, what they refuse, and what is left when they open again."""

import errno
import os
from pathlib import Path

import pytest

from baton.kv_transfer import stores
from baton.kv_transfer.interfaces import BAD_RECORD
from baton.kv_transfer.stores import BlockStore, ClaimedFolder, FolderStore, MemoryStore
from baton.protocol.blocks import NO_HASH, block_hashes, unpack_hashes
from baton.protocol.errors import ConfigError, TransferError

BLOCK_BYTES = 64
NUM_SLOTS = 4
MAKER = b"m" * 16
HASHES = block_hashes(range(16), 2)


def folder_store(
    folder: Path,
    num_slots: int = NUM_SLOTS,
    maker: bytes = MAKER,
    block_bytes: int = BLOCK_BYTES,
) -> FolderStore:
    return FolderStore(
        folder, "rank0", num_slots * (block_bytes + 20), block_bytes, maker
    )


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path) -> BlockStore:
    if request.param == "memory":
        return MemoryStore(NUM_SLOTS * BLOCK_BYTES, BLOCK_BYTES)
    return folder_store(tmp_path)


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


def read(store: BlockStore, slot: int, number: int) -> bytes:
    into = bytearray(BLOCK_BYTES)
    store.read(slot, HASHES[number], memoryview(into))
    return bytes(into)


def is_bad(store: BlockStore, slot: int, number: int) -> bool:
    with pytest.raises(TransferError) as caught:
        read(store, slot, number)
    return caught.value.code == BAD_RECORD


def test_a_slot_holds_the_last_block_that_was_written(store):
    assert store.num_slots == NUM_SLOTS
    assert unpack_hashes(store.hashes()) == [NO_HASH] * NUM_SLOTS
    store.write(3, HASHES[1], block(1))
    assert read(store, 3, 1) == block(1)
    store.write(3, HASHES[2], block(2))
    assert read(store, 3, 2) == block(2)
    assert is_bad(store, 3, 1)
    assert is_bad(store, 0, 1)
    store.clear()
    assert is_bad(store, 3, 2)
    store.write(0, HASHES[4], block(4))
    assert read(store, 0, 4) == block(4)


def filled(folder: Path) -> None:
    store = folder_store(folder)
    for number in range(NUM_SLOTS):
        store.write(number, HASHES[number], block(number))
    store.close()


def test_a_folder_holds_its_blocks_when_it_opens_again(tmp_path):
    filled(tmp_path)
    store = folder_store(tmp_path)
    assert unpack_hashes(store.hashes()) == HASHES[:NUM_SLOTS]
    assert not store.was_foreign
    assert [read(store, number, number)[0] for number in range(NUM_SLOTS)] == [
        0,
        1,
        2,
        3,
    ]
    store.clear()
    store.close()
    assert unpack_hashes(folder_store(tmp_path).hashes()) == [NO_HASH] * NUM_SLOTS


@pytest.mark.parametrize("num_slots", [2, 6])
def test_a_folder_of_another_size_keeps_the_blocks_that_fit(num_slots, tmp_path):
    filled(tmp_path)
    store = folder_store(tmp_path, num_slots)
    kept = min(num_slots, NUM_SLOTS)
    assert unpack_hashes(store.hashes()) == [
        *HASHES[:kept],
        *[NO_HASH] * (num_slots - kept),
    ]
    assert read(store, 1, 1) == block(1)
    assert (
        sum(path.stat().st_size for path in tmp_path.iterdir()) <= num_slots * 84 + 64
    )


@pytest.mark.parametrize("fields", [{"maker": b"o" * 16}, {"block_bytes": 32}])
def test_blocks_of_another_model_are_never_read(fields, tmp_path):
    filled(tmp_path)
    store = folder_store(tmp_path, **fields)
    assert store.was_foreign
    assert unpack_hashes(store.hashes()) == [NO_HASH] * NUM_SLOTS
    store.close()
    assert unpack_hashes(folder_store(tmp_path).hashes()) == [NO_HASH] * NUM_SLOTS


def test_a_record_of_another_maker_is_not_believed_although_the_title_is(tmp_path):
    filled(tmp_path)
    index = tmp_path / "rank0.index"
    data = index.read_bytes().replace(MAKER, b"o" * 16)
    index.write_bytes(data)
    assert is_bad(folder_store(tmp_path, maker=b"o" * 16), 1, 1)


@pytest.mark.parametrize("file", ["rank0.blocks", "rank0.index"])
@pytest.mark.parametrize("at", [0.3, 0.6, 0.99])
def test_no_damage_of_a_file_brings_a_wrong_block(file, at, tmp_path):
    filled(tmp_path)
    path = tmp_path / file
    whole = path.read_bytes()
    place = int(at * len(whole))
    for damaged in (
        whole[:place],
        whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :],
        whole[place:] + whole[:place],
        bytes(len(whole)),
        b"",
    ):
        path.write_bytes(damaged)
        store = folder_store(tmp_path)
        num_bad = 0
        for slot in range(NUM_SLOTS):
            for number in range(NUM_SLOTS):
                into = bytearray(BLOCK_BYTES)
                try:
                    store.read(slot, HASHES[number], memoryview(into))
                except TransferError:
                    num_bad += 1
                    continue
                assert into == block(number)
        assert num_bad > NUM_SLOTS * (NUM_SLOTS - 1), (
            "one more than the slots of others"
        )
        store.close()
        filled(tmp_path)


def test_a_bad_record_is_gone_when_the_folder_opens_again(tmp_path):
    filled(tmp_path)
    os.truncate(tmp_path / "rank0.blocks", BLOCK_BYTES + 1)
    store = folder_store(tmp_path)
    assert is_bad(store, 1, 1)
    store.close()
    assert unpack_hashes(folder_store(tmp_path).hashes())[:2] == [HASHES[0], NO_HASH]


def test_a_slot_whose_write_failed_holds_nothing(tmp_path, monkeypatch):
    filled(tmp_path)
    store = folder_store(tmp_path)
    write = os.pwrite

    def fails_half_way(descriptor, data, offset):
        if len(data) == BLOCK_BYTES:
            return write(descriptor, data[: BLOCK_BYTES // 2], offset)
        if len(data) == BLOCK_BYTES // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(stores.os, "pwrite", fails_half_way)
    with pytest.raises(OSError, match="No space"):
        store.write(1, HASHES[7], block(7))
    assert is_bad(store, 1, 1)
    assert is_bad(store, 1, 7)
    monkeypatch.undo()
    assert read(store, 2, 2) == block(2)
    store.close()
    assert is_bad(folder_store(tmp_path), 1, 1)


def test_each_process_has_a_folder_of_its_own(tmp_path):
    first = ClaimedFolder(tmp_path, "decode")
    second = ClaimedFolder(tmp_path, "decode")
    names = [
        first.path.name,
        second.path.name,
        ClaimedFolder(tmp_path, "prefill").path.name,
    ]
    assert names == ["decode-0", "decode-1", "prefill-0"]
    first.close()
    again = ClaimedFolder(tmp_path, "decode")
    assert again.path == first.path


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache\.folder: cannot use .*file"):
        ClaimedFolder(tmp_path / "file", "decode")
    (tmp_path / "rank0.index").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        folder_store(tmp_path)
