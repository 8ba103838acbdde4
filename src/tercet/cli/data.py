"""Turn text into token shards.

tercet data prepare PATH... --out DIR     text files, source trees, .jsonl, .parquet
tercet data inspect DIR                   what a prepared corpus holds
tercet data python-library --out DIR      the Python library's own source, the demo's corpus
tercet data check-chat FILE...            check chat files, naming file, line and field
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tercet.util.text import count, size

if TYPE_CHECKING:
    from tercet.data import Corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-verbs and their flags."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = verbs.add_parser("prepare", help="write token shards", description="Write token shards of text.")
    prepare.add_argument("paths", nargs="+", metavar="PATH", help="text file, folder, .jsonl or .parquet")
    prepare.add_argument("--text-field", default="text", help="field of jsonl and parquet rows (default: text)")
    prepare.add_argument("--suffix", nargs="+", default=[], help="take only files of folders with these endings")
    library = verbs.add_parser("python-library", help="prepare the Python library's own source")
    for each in (prepare, library):
        each.add_argument("--out", required=True, metavar="DIR", help="folder of the corpus")
        each.add_argument("--tokenizer", metavar="FILE", help="tiktoken rank file or tokenizer folder; default: learn")
        each.add_argument("--vocab-size", type=int, default=4096, help="ids to learn, 256 control ids included")
        each.add_argument("--validation", type=float, default=0.02, help="share of documents held out (default: 0.02)")
        each.add_argument("--max-document-bytes", type=int, default=1 << 20, help="cut longer text files at line ends")
        each.add_argument("--overwrite", action="store_true", help="replace an existing corpus")
    inspect = verbs.add_parser("inspect", help="describe a prepared corpus")
    inspect.add_argument("corpus", metavar="DIR")
    check_chat = verbs.add_parser("check-chat", help="check chat JSONL files", description="Check chat JSONL files.")
    check_chat.add_argument("files", nargs="+", metavar="FILE", help="chat JSONL files, one conversation a line")
    check_chat.add_argument("--limit", type=int, default=50, help="problems to print (default: 50)")


def run(args: argparse.Namespace) -> int:
    """Prepare or describe a corpus."""
    from tercet.data import Corpus, prepare, python_library_corpus

    if args.action == "check-chat":
        return _check_chat(args)
    if args.action == "inspect":
        _describe(Corpus.open(args.corpus))
        return 0
    library = args.action == "python-library"
    corpus = prepare(
        python_library_corpus() if library else args.paths,
        args.out,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        validation=args.validation,
        text_field="text" if library else args.text_field,
        suffixes=() if library else args.suffix,
        max_document_bytes=args.max_document_bytes,
        overwrite=args.overwrite,
        progress=True,
    )
    _describe(corpus)
    return 0


def _check_chat(args: argparse.Namespace) -> int:
    """Print what is wrong with chat files; 1 if anything is."""
    from tercet.data.chat import check_chat

    report = check_chat(args.files)
    shown = report.problems[: max(args.limit, 0)]
    for problem in shown:
        print(problem)
    if len(shown) < len(report.problems):
        print(f"… and {len(report.problems) - len(shown)} more; raise --limit to see them")
    print(f"{report.conversations} good conversations, {len(report.problems)} problems in {report.files} files")
    return 0 if report.ok else 1


def _describe(corpus: Corpus) -> None:
    index = corpus.index
    print(f"{corpus.root}: vocabulary {corpus.vocab_size:,}, {len(index['sources']):,} files")
    for name, split in corpus.splits.items():
        ratio = f", {split.bytes / split.tokens:.2f} bytes/token" if split.tokens else ""
        totals = f"{count(split.tokens)} tokens  {size(split.bytes)}{ratio}"
        print(f"  {name:<10} {len(split.documents):>9,} documents  {totals}")
    for reason, times in index["skipped"].items():
        print(f"  skipped    {times:>9,} {reason}")
    if index["repeated"]:
        print(f"  {index['repeated']:,} files were named twice and taken once")
