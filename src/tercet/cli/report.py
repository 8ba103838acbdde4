"""Write a run's report.html again, or draw its picture.

  tercet report runs/demo                       runs/demo/report.html
  tercet report runs/demo --picture demo.svg    also the main figures as one SVG file

Works on a run at any stage: finished, stopped, crashed, under way.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default RUN/report.html)")
    parser.add_argument("--picture", metavar="FILE", help="also write the main figures as an SVG picture")


def run(args: argparse.Namespace) -> int:
    """Write and say where."""
    from tercet.train.report import write_picture, write_report

    print(write_report(args.run, args.out))
    if args.picture:
        print(write_picture(args.run, args.picture))
    return 0
