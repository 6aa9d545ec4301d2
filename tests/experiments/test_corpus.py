"""The byte corpus: what is held out, what is reproducible, what is refused."""

import hashlib

import numpy as np
import pytest

from experiments import corpus

HELD_OUT_SHA256 = "8abb2df2977aba0df3a81cac2a8d91e8eb16827ad614db2e37abd73e7bd89b9d"


def test_committed_held_out_text_is_the_recorded_one():
    text = corpus.load_held_out_text()
    assert hashlib.sha256(text).hexdigest() == HELD_OUT_SHA256
    assert HELD_OUT_SHA256 in (corpus.HELD_OUT_FILE.parent / "README.md").read_text()


def test_build_separates_held_out_files(tmp_path):
    prose = tmp_path / "prose"
    prose.mkdir()
    for i in range(60):
        (prose / f"part{i}.rst.txt").write_bytes(f"Chapter {i}\r\nwith\0 text\n\n".encode())
    manifest = corpus.build(tmp_path / "corpus", [prose])
    train = corpus.load_training_text(tmp_path / "corpus").tobytes()
    held_out = (tmp_path / "corpus" / "held_out.bin").read_bytes()
    assert manifest["sources"]["prose"]["files"] == 60
    assert manifest["train"]["bytes"] == len(train) > len(held_out) > 0
    documents = train.split(b"\0")
    assert len(documents) == manifest["train"]["files"]
    for i in range(60):  # every file lies on the side that its name decides, cleaned
        expected = f"Chapter {i}\nwith text\n".encode()
        is_held_out = corpus.is_held_out(f"prose/prose/part{i}.rst.txt")
        assert (expected in documents) != is_held_out
        assert (expected in held_out.split(b"\0")) == is_held_out
    assert corpus.build(tmp_path / "again", [prose])["train"]["sha256"] == manifest["train"]["sha256"]


def test_about_one_file_in_twenty_is_held_out():
    share = np.mean([corpus.is_held_out(f"stdlib/module_{i}.py") for i in range(4000)])
    assert 0.03 < share < 0.07


def test_a_changed_or_missing_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"python -m experiments.corpus"):
        corpus.load_training_text(tmp_path)
    (tmp_path / "manifest.json").write_text('{"train": {"sha256": "0"}}')
    (tmp_path / "train.bin").write_bytes(b"text")
    with pytest.raises(ValueError, match="build the corpus again"):
        corpus.load_training_text(tmp_path)
    with pytest.raises(ValueError, match="holds no"):
        corpus.build(tmp_path / "corpus", [tmp_path / "nothing"])


def test_held_out_streams():
    streams = corpus.held_out_streams(4, 1000, seed=3)
    assert streams.shape == (4, 1000) and streams.dtype == np.int32
    assert (streams[:, 0] == corpus.BOS).all()
    assert streams.min() >= 1 and streams.max() < corpus.VOCAB_SIZE  # byte 0 became END_OF_DOCUMENT
    np.testing.assert_array_equal(streams, corpus.held_out_streams(4, 1000, seed=3))
    assert (streams != corpus.held_out_streams(4, 1000, seed=4)).any()
    with pytest.raises(ValueError, match="shorter streams"):
        corpus.held_out_streams(1, 10_000_000)


def test_sixteen_long_streams_do_not_overlap():
    text = np.arange(1_458_109)
    spans = corpus.text_spans(text, 16, 65_536, seed=1)
    assert len(np.unique(spans)) == spans.size
