"""Compression codecs: Kafka's numbers and names, bytes that come back, sizes that are bounded."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnstore.errors import UnsupportedCompression
from txnstore.log import columns
from txnstore.log.columns import Codec, DecompressionFailed, compress, decompress, require_codec

CODECS = [codec for codec in Codec if codec is not Codec.NONE]


def test_numbers_and_names_are_kafkas() -> None:
    assert {codec.label: int(codec) for codec in Codec} == {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
    assert [Codec.named(codec.label) for codec in Codec] == list(Codec)


@pytest.mark.parametrize("label", ["", "GZIP", "brotli", "zstd "])
def test_an_unknown_name_is_refused_with_the_known_ones(label: str) -> None:
    with pytest.raises(UnsupportedCompression, match="none, gzip, snappy, lz4, zstd"):
        Codec.named(label)


@given(st.sampled_from(Codec), st.binary(max_size=300), st.integers(1, 50))
def test_what_was_compressed_comes_back(codec: Codec, data: bytes, times: int) -> None:
    assert decompress(codec, compress(codec, data * times), len(data) * times) == data * times


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=200), st.integers(0), st.integers(0, 7))
def test_damage_is_told_or_harmless(codec: Codec, data: bytes, place: int, bit: int) -> None:
    compressed = compress(codec, data)
    flipped = bytearray(compressed)
    flipped[place % len(flipped)] ^= 1 << bit
    for damaged in (bytes(flipped), compressed[: place % len(compressed)], b""):
        try:
            assert len(decompress(codec, damaged, len(data))) == len(data)
        except DecompressionFailed:
            continue


@pytest.mark.parametrize("codec", CODECS)
def test_a_cut_end_and_a_longer_one_are_told(codec: Codec) -> None:
    compressed = compress(codec, b"records" * 9)
    for damaged in (compressed[:-1], compressed + b"\0"):
        with pytest.raises(DecompressionFailed):
            decompress(codec, damaged, 63)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("size_bytes", [0, 999, 1001, 10_000])
def test_another_size_than_the_true_one_is_told(codec: Codec, size_bytes: int) -> None:
    with pytest.raises(DecompressionFailed):
        decompress(codec, compress(codec, b"ab" * 500), size_bytes)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_takes_no_more_memory_than_the_size_that_was_said(codec: Codec) -> None:
    bomb = compress(codec, bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(DecompressionFailed):
            decompress(codec, bomb, 1000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize("codec", Codec)
def test_positions_that_promise_too_much_are_refused_before_memory_is_taken(codec: Codec) -> None:
    with pytest.raises(columns.DamagedColumn, match="ends above"):
        columns.unpack_bytes(
            columns.pack_positions([0, columns.COLUMN_BYTES_MAX + 1]),
            None,
            compress(codec, b""),
            count=1,
            codec=codec,
            what="value",
        )


def test_gzip_is_what_gzip_reads_and_does_not_depend_on_the_time() -> None:
    assert gzip.decompress(compress(Codec.GZIP, b"records")) == b"records"
    assert compress(Codec.GZIP, b"records") == compress(Codec.GZIP, b"records")
    assert decompress(Codec.GZIP, gzip.compress(b"records", mtime=5), 7) == b"records"
    with pytest.raises(DecompressionFailed):
        decompress(Codec.GZIP, zlib.compress(b"records"), 7)


@pytest.mark.parametrize("codec", [Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_codec_without_its_package_says_how_to_get_it(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    data = compress(codec, b"records")
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for use in (lambda: require_codec(codec), lambda: compress(codec, b""), lambda: decompress(codec, data, 7)):
        with pytest.raises(UnsupportedCompression, match=rf"'{codec.label}' .* pip install txnstore\[compression\]"):
            use()


def test_gzip_and_none_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for codec in (Codec.NONE, Codec.GZIP):
        require_codec(codec)
        assert decompress(codec, compress(codec, b"records"), 7) == b"records"
