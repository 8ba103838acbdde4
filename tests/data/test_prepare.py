"""Preparation: what becomes a document, the split, exact bytes, and nothing half-written."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tercet.cli.main import main
from tercet.data import Corpus, Sources, Tokenizer, prepare, python_library_corpus
from tercet.data import prepare as prepare_function
from tercet.errors import DataError, StorageError

PREPARE = sys.modules[prepare_function.__module__]
PLAIN = Tokenizer({bytes([value]): value for value in range(256)})


def texts_of(paths: list[Path] | Path, **options: object) -> list[str]:
    given = paths if isinstance(paths, list) else [paths]
    return [document.data.decode() for document in Sources(given, **options)]  # type: ignore[arg-type]


def tree(root: Path, count: int = 40) -> Path:
    """A folder of distinct texts."""
    for number in range(count):
        file = root / f"part{number % 3}" / f"{number:03d}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {number}\n" + "word é " * number)
    return root


def left_behind(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# sources


def test_source_tree_skips_and_counts(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "__pycache__").mkdir()
    (root / "b" / "z.py").write_text("z")
    (root / "a.py").write_bytes("\ufeffa\r\n".encode())
    (root / "b.txt").write_text("b")
    (root / "empty.py").touch()
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    (root / ".hidden").write_text("no")
    (root / ".git" / "config").write_text("no")
    (root / "__pycache__" / "x.py").write_text("no")
    (root / "dangling").symlink_to(root / "nowhere")
    sources = Sources([root])
    assert [(sources.names[d.source], d.data) for d in sources] == [
        ("a.py", b"\xef\xbb\xbfa\r\n"),
        ("b/z.py", b"z"),
        ("b.txt", b"b"),
    ]
    assert dict(sources.skipped) == {"empty": 1, "binary": 1, "not UTF-8": 1}
    assert len(list(sources)) == 3  # a second pass gives the same
    assert sources.skipped["binary"] == 1
    assert texts_of(root, suffixes=["py"]) == ["\ufeffa\r\n", "z"]
    again = Sources([root / "b", root, root / "b" / "z.py"])
    assert again.repeated == 2
    assert again.names[0] == "b/z.py"


def test_missing_paths_and_empty_requests(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        Sources([tmp_path / "absent"])
    with pytest.raises(DataError, match="no input given"):
        Sources([])
    with pytest.raises(DataError, match="no files in"):
        Sources([tmp_path])
    with pytest.raises(DataError, match="at least 1024"):
        Sources([tmp_path], max_document_bytes=10)


def test_long_files_are_cut_at_line_ends_and_never_inside_a_character(tmp_path: Path) -> None:
    lines, one_line = "".join(f"line {n} é\n" for n in range(900)), "漢" * 2000
    for name, text in (("lines", lines), ("one", one_line)):
        (tmp_path / name).write_text(text)
        parts = texts_of(tmp_path / name, max_document_bytes=1024)
        assert "".join(parts) == text
        assert max(len(part.encode()) for part in parts) <= 1024
        assert min(len(part.encode()) for part in parts[:-1]) > 900
    assert all(part.endswith("\n") for part in texts_of(tmp_path / "lines", max_document_bytes=1024))


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one\\n", "id": 1}\n\n{"text": ""}\n{"text": "a\\ud800b"}\n{"body": "x", "text": "é"}\n')
    documents = list(Sources([file]))
    assert [d.data.decode() for d in documents] == ["one\n", "a\ufffdb", "é"]
    assert [d.row for d in documents] == [0, 3, 4]
    for line, message in (
        ("{", r"rows.jsonl:1: not a line of JSON"),
        ("[1]", r"rows.jsonl:1: no string in the field 'text' \(found list\)"),
        ('{"body": "x"}', r"found \['body'\]\); name the field"),
        ('{"text": 3}', r"no string in the field"),
        ("\xff", r"not a line of JSON"),
    ):
        file.write_bytes(line.encode("latin-1") + b"\n")
        with pytest.raises(DataError, match=message):
            list(Sources([file]))
    file.write_text('{"body": "x"}\n')
    assert texts_of(file, text_field="body") == ["x"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    rows = [f"row {n} é" for n in range(600)]
    parquet.write_table(arrow.table({"text": [*rows, None, ""], "n": list(range(602))}), file)
    sources = Sources([file])
    assert [d.data.decode() for d in sources] == rows
    assert sources.skipped["empty"] == 2
    with pytest.raises(DataError, match="no column 'body'"):
        texts_of(file, text_field="body")
    with pytest.raises(DataError, match="holds int, not text"):
        texts_of(file, text_field="n")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match="not a readable parquet file"):
        texts_of(file)


def test_python_library_is_real_text_in_a_fixed_order() -> None:
    paths = python_library_corpus()
    names = Sources(paths).names
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages", "encodings"} & set(Path(n).parts)]
    assert sum(path.stat().st_size for path in paths) > 5e6


# the corpus


def test_every_document_is_kept_exactly_in_order(tmp_path: Path) -> None:
    root = tree(tmp_path / "in")
    corpus = prepare([root], tmp_path / "out", vocab_size=700, validation=0.2, shard_tokens=300)
    assert len(corpus.index["splits"]["train"]["shards"]) > 2
    found = {name: data for split in corpus.splits for name, data in corpus.documents(split)}
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.txt")}
    assert found == files
    assert [name for name, _ in corpus.documents("train")] == sorted(name for name, _ in corpus.documents("train"))
    assert corpus.validation_bytes() == b"".join(data for _, data in corpus.documents("validation"))
    assert corpus.split("validation").bytes == len(corpus.validation_bytes())
    for split in corpus.splits.values():
        tokens = split.read(0, split.tokens)
        assert (tokens[split.starts[:-1]] == corpus.tokenizer.bos_id).all()
        assert (tokens[split.starts[1:] - 1] == corpus.tokenizer.eos_id).all()
        assert (tokens >= len(corpus.tokenizer.ranks)).sum() == 2 * len(split.documents)
    assert corpus.vocab_size == corpus.tokenizer.vocab_size
    assert left_behind(tmp_path) == ["in", "out"]


def test_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", 60)
    first = prepare([root], tmp_path / "a", tokenizer=PLAIN, validation=0.2)
    held_out = {data for _, data in first.documents("validation")}
    assert 4 <= len(held_out) <= 24  # 12 expected
    for path in sorted(root.rglob("*.txt"), reverse=True):  # other names, other order, copies, more text
        shutil.copy(path, root / f"copy-{path.name}")
        path.rename(root / f"z{path.name}")
    (root / "more").write_text("another text")
    second = prepare([root], tmp_path / "b", tokenizer=PLAIN, validation=0.2)
    train = {data for _, data in second.documents("train")}
    assert not held_out & train
    assert {data for _, data in second.documents("validation")} - {b"another text"} == held_out


def test_same_text_gives_the_same_fingerprint_anywhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tree(tmp_path / name / "in", 12)
    made = [prepare([tmp_path / n / "in"], tmp_path / n / "out", vocab_size=600) for n in ("one", "two")]
    assert made[0].fingerprint == made[1].fingerprint
    assert made[0].index == made[1].index
    assert str(tmp_path) not in (tmp_path / "one" / "out" / "index.json").read_text()
    (tmp_path / "two" / "in" / "part0" / "000.txt").write_text("changed")
    other = prepare([tmp_path / "two" / "in"], tmp_path / "other", tokenizer=made[0].tokenizer)
    assert other.fingerprint != made[0].fingerprint


def test_validation_text_never_shapes_the_vocabulary(tmp_path: Path) -> None:
    words = {f"{number:02d}": chr(0x61 + number) + chr(0x7A - number) for number in range(26)}
    for name, word in words.items():
        (tmp_path / name).write_text(f" {word}" * 50)
    corpus = prepare([tmp_path / name for name in words], tmp_path / "out", vocab_size=1024, validation=0.3)
    for split in ("train", "validation"):
        learnt = [words[name].encode() in corpus.tokenizer.ranks for name, _ in corpus.documents(split)]
        assert learnt == [split == "train"] * len(corpus.split(split).documents)
    assert len(corpus.split("validation").documents) > 1


def test_existing_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    PLAIN.save(tmp_path / "tokenizer")
    tree(tmp_path / "in", 5)
    corpus = prepare([tmp_path / "in"], tmp_path / "out", tokenizer=tmp_path / "tokenizer" / "tiktoken.model")
    assert corpus.tokenizer.fingerprint == PLAIN.fingerprint
    assert corpus.vocab_size == 512


def test_wide_vocabularies_use_four_bytes(tmp_path: Path) -> None:
    ranks = dict(PLAIN.ranks) | {b"%05d" % n: 256 + n for n in range(70_000)}
    tree(tmp_path / "in", 5)
    corpus = prepare([tmp_path / "in"], tmp_path / "out", tokenizer=Tokenizer(ranks))
    assert corpus.index["dtype"] == "<u4"
    assert int(corpus.split("train").read(0, 1)[0]) == 70_256


def test_validation_share_edges(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", 3)
    assert len(prepare([root], tmp_path / "a", tokenizer=PLAIN, validation=0.0).split("validation").documents) == 0
    assert len(prepare([root], tmp_path / "b", tokenizer=PLAIN, validation=1e-9).split("validation").documents) == 1
    for share in (-0.1, 1.0):
        with pytest.raises(DataError, match=r"share of the documents in \[0, 1\)"):
            prepare([root], tmp_path / "c", validation=share)
    with pytest.raises(DataError, match="would be held out"):
        prepare([root / "part0" / "000.txt"], tmp_path / "c", tokenizer=PLAIN)
    (tmp_path / "bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"no text in 1 files; skipped: \{'binary': 1\}"):
        prepare([tmp_path / "bin"], tmp_path / "c")
    assert left_behind(tmp_path) == ["a", "b", "bin", "in"]


# the target folder


def test_existing_targets_are_never_overwritten_by_accident(tmp_path: Path) -> None:
    root, out = tree(tmp_path / "in", 5), tmp_path / "out"
    first = prepare([root], out, tokenizer=PLAIN).fingerprint
    with pytest.raises(DataError, match="already holds a corpus"):
        prepare([root], out, tokenizer=PLAIN)
    (root / "more.txt").write_text("more text")
    assert prepare([root], out, tokenizer=PLAIN, overwrite=True).fingerprint != first
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="holds other files and no corpus"):
        prepare([root], tmp_path / "precious", tokenizer=PLAIN, overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        prepare([root], root / "more.txt", tokenizer=PLAIN, overwrite=True)
    (tmp_path / "void").mkdir()
    prepare([root], tmp_path / "void", tokenizer=PLAIN)
    assert left_behind(tmp_path) == ["in", "out", "precious", "void"]


def test_a_corpus_inside_its_own_source_tree_does_not_feed_on_itself(tmp_path: Path) -> None:
    root = tree(tmp_path / "in", 8)
    first = prepare([root], root / "corpus", tokenizer=PLAIN)
    second = prepare([root], root / "corpus", tokenizer=PLAIN, overwrite=True)
    assert second.fingerprint == first.fingerprint
    assert len(second.index["sources"]) == 8


@pytest.mark.parametrize("moment", [3, 23, 43])
def test_interrupt_leaves_nothing_and_keeps_the_old_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """A real SIGINT while looking, learning and writing (20 documents are hashed in each pass)."""
    root, out = tree(tmp_path / "in", 20), tmp_path / "out"
    old = prepare([root], out, vocab_size=600).fingerprint
    seen, original = 0, PREPARE._hash

    def interrupting(document: object) -> object:
        nonlocal seen
        seen += 1
        if seen == moment:
            signal.raise_signal(signal.SIGINT)
        return original(document)

    monkeypatch.setattr(PREPARE, "_hash", interrupting)
    with pytest.raises(KeyboardInterrupt):
        prepare([root], out, vocab_size=600, overwrite=True)
    assert seen >= moment  # the trainer finishes its pass before Python sees the signal
    assert left_behind(tmp_path) == ["in", "out"]
    assert Corpus.open(out).fingerprint == old


def test_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses writes beyond a file-size limit, as it does on a full disk."""
    root = tree(tmp_path / "in", 60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot write") as caught:
            prepare([root], tmp_path / "out", tokenizer=PLAIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert left_behind(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failed_publication_puts_the_old_corpus_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, raised: type[BaseException]
) -> None:
    root, out = tree(tmp_path / "in", 5), tmp_path / "out"
    old = prepare([root], out, tokenizer=PLAIN).fingerprint
    (root / "more.txt").write_text("more text")
    replace = os.replace

    def refusing(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if str(source).endswith(".part") and Path(target) == out:
            raise fault
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(raised):
        prepare([root], out, tokenizer=PLAIN, overwrite=True)
    assert Corpus.open(out).fingerprint == old
    assert left_behind(tmp_path) == ["in", "out"]


def test_killed_runs_are_swept_up_and_living_ones_left_alone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive = tmp_path / f".out.{gone.pid}.part", tmp_path / f".out.{os.getppid()}.part"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "train-00000.bin").write_bytes(b"half")
    prepare([tree(tmp_path / "in", 5)], tmp_path / "out", tokenizer=PLAIN)
    assert left_behind(tmp_path) == [alive.name, "in", "out"]


# opening


def test_damaged_corpora_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([tree(tmp_path / "in", 5)], out, tokenizer=PLAIN)
    with pytest.raises(DataError, match=r"no prepared corpus at .*tercet data prepare"):
        Corpus.open(tmp_path)
    with pytest.raises(DataError, match=r"no split 'tain'.*did you mean 'train'"):
        Corpus.open(out).split("tain")

    def refused(file: str, content: bytes | None, message: str) -> None:
        path = out / file
        kept = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            Corpus.open(out).tokenizer  # noqa: B018
        path.write_bytes(kept)

    index = json.loads((out / "index.json").read_text())
    shard = (out / "train-00000.bin").read_bytes()
    refused("train-00000.bin", shard[:-1], "truncated or replaced")
    refused("train-00000.bin", None, "cannot read the shard")
    refused("train-documents.npy", b"\x93NUMPY", "cannot read .*train-documents.npy")
    refused("validation-documents.npy", None, "cannot read")
    refused("index.json", b"{", "not JSON")
    refused("index.json", b"{}", "not a corpus index")
    refused("index.json", json.dumps({**index, "format": 99}).encode(), "not a corpus index of format")
    refused("index.json", json.dumps({k: v for k, v in index.items() if k != "splits"}).encode(), "misstates 'splits'")
    for elsewhere in ("../out/train-00000.bin", str(out.parent / "in" / "x")):
        moved = json.loads(json.dumps(index))
        moved["splits"]["train"]["shards"][0]["file"] = elsewhere
        refused("index.json", json.dumps(moved).encode(), "names a shard elsewhere")
    index["splits"]["train"]["documents"] += 1
    refused("index.json", json.dumps(index).encode(), "the index says")
    fewer = np.load(out / "train-documents.npy")
    fewer["tokens"][0] += 1
    np.save(tmp_path / "fewer.npy", fewer)
    refused("train-documents.npy", (tmp_path / "fewer.npy").read_bytes(), "disagree on the number of tokens")
    (out / "tokenizer" / "tercet_tokenizer.json").unlink()
    Tokenizer.train(["abcabc"] * 9, 600).save(out / "tokenizer")
    with pytest.raises(DataError, match="not the one that wrote the shards"):
        Corpus.open(out).tokenizer  # noqa: B018


def test_damaged_tokens_never_reach_an_embedding(tmp_path: Path) -> None:
    corpus = prepare([tree(tmp_path / "in", 5)], tmp_path / "out", tokenizer=PLAIN)
    shard = tmp_path / "out" / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[21] = 0xFF
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"outside the vocabulary \[0, 512\); the shard is damaged"):
        Corpus.open(tmp_path / "out").split("train").read(0, corpus.split("train").tokens)


# the command


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "in", 8)
    (root / "b.bin").write_bytes(b"\0")
    arguments = ["data", "prepare", str(root), "--out", str(tmp_path / "out"), "--vocab-size", "600"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "8 documents" not in printed  # one is held out
    assert "7 documents" in printed
    assert "1 binary" in printed
    assert main(arguments) == 2
    assert "already holds a corpus" in capsys.readouterr().err
    assert main(["data", "inspect", str(tmp_path / "out")]) == 0
    assert "vocabulary" in capsys.readouterr().out
    assert main(["data", "prepare", str(tmp_path / "absent"), "--out", str(tmp_path / "x")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
