"""Checksums: every flipped bit is found, for any size of the tensor and any position."""

import base64
import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moduli.io as mio
from moduli.io._checksum import BLOCK, Checksum, checksums_of

SIZES = [0, 1, 7, 8, 65_535, 65_536, 65_537, 8168, BLOCK - 1, BLOCK, BLOCK + 3, 2 * BLOCK + 8168, 9 * BLOCK + 5]


def checksum_of(data):
    return checksums_of([data])[0]


@pytest.mark.parametrize("size", SIZES)
def test_updates_by_blocks_equal_the_checksum_of_the_whole(size):
    data = np.random.default_rng(size).bytes(size)
    checksum = Checksum(size)
    for start in range(0, size, 2 * BLOCK):
        checksum.update(data[start : start + 2 * BLOCK])
    assert checksum.value == checksum_of(data)
    assert checksums_of([data, b"x", data]) == [checksum_of(data), checksum_of(b"x"), checksum_of(data)]


def test_checksums_of_several_threads_equal_those_of_one():
    data = np.random.default_rng(0).bytes(5 * 8 * BLOCK + 11)
    assert checksums_of([data, data[:100_000]]) == [checksum_of(data[:-11] + data[-11:]), checksum_of(data[:100_000])]
    checksum = Checksum(len(data))
    for start in range(0, len(data), BLOCK):
        checksum.update(data[start : start + BLOCK])
    assert checksum.value == checksum_of(data)


@pytest.mark.parametrize("size", [65_536, BLOCK + 3])
@pytest.mark.parametrize("fill", [0, 255, None])
def test_one_flipped_bit_always_changes_the_sum(size, fill):
    """The sum of all words changes by a power of two, so every flip is found: every bit of some words, and random ones."""
    data = bytearray(np.random.default_rng(1).bytes(size) if fill is None else bytes([fill]) * size)
    before = checksum_of(data) % 2**64
    rng = random.Random(0)
    places = [*range(8 * 64), *range(8 * (size - 3), 8 * size), *(rng.randrange(8 * size) for _ in range(300))]
    for bit in places:
        data[bit // 8] ^= 1 << bit % 8
        assert checksum_of(data) % 2**64 != before, bit
        data[bit // 8] ^= 1 << bit % 8
    assert checksum_of(data) % 2**64 == before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bits_and_moved_bytes_are_found(data):
    size = data.draw(st.sampled_from([100, 65_536, BLOCK + 8, 2 * BLOCK]))
    raw = bytearray(np.random.default_rng(data.draw(st.integers(0, 9))).bytes(size))
    before, original = checksum_of(raw), bytes(raw)
    if data.draw(st.booleans()):
        for bit in data.draw(st.sets(st.integers(0, 8 * size - 1), min_size=2, max_size=6)):
            raw[bit // 8] ^= 1 << bit % 8
    else:
        width = data.draw(st.sampled_from([4, 8, 16, 512, 4096]))
        a, b = (width * data.draw(st.integers(0, size // width)) for _ in range(2))
        raw[a : a + width], raw[b : b + width] = raw[b : b + width], raw[a : a + width]
    assert len(raw) != size or (checksum_of(raw) == before) == (bytes(raw) == original)


def test_flipped_bits_of_a_file_are_found(tmp_path):
    path, rng = tmp_path / "net", random.Random(3)
    mio.save(
        path, {"large": torch.randn(700_000), "odd": torch.arange(40_001, dtype=torch.int16), "small": torch.randn(5)}
    )
    good = path.read_bytes()
    for _ in range(60):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(mio.CheckpointError):
            mio.read(path)


OLD = (
    "c-m!<U24NH41lxkB1Nw=CU!#e^Rhk-"
    "c7`Pc*Re@qse|LPmSE^ncGM|OIs!A6E$NeFOV_6;tO=T?S5CCTiKc;ag5I>3uM_Q*XqAN$G}BTSSqkKVq?HLrQZSVjG0XT-"
    "9`iQOFhU#K3x{lQfAMHd)k-"
    "QT8L6Ph+Nh#?2|>Mrm@*nyfY=!;yWr!LB{Y7O!zF;><~nl@B%zGaYzglyes)AR_hc>kD8IHgTYiS>>a19p8ccX4@g6*Z@45Nb-"
    "3Empe#Zt0jGdUR&wWiG49I9bDmS8wrzFj5OgnGWKKAJ*E%~1o6Q0)I?{@3>qv!R0iMH$hhQ|Rn${pqB@C*GWcsT"
)


def test_files_of_version_0_1_are_read_and_verified(tmp_path):
    path, good = tmp_path / "old", zlib.decompress(base64.b85decode(OLD))
    assert b"moduli.crc32" in good
    path.write_bytes(good)
    content = mio.read(path)
    assert content.module["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert content.module["n"].tolist() == [1, 2, 3]
    assert content.extra == {"epoch": 3}
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        with pytest.raises(mio.CheckpointError):
            mio.read(path)
