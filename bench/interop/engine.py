"""Build llama.cpp for the comparison: fetch, unpack, compile, each step complete or done again.

    engine = build(Path("build/interop"))      # Engine(python=…/venv/bin/python, source=…/vendor/llama.cpp)

Everything lives in one folder, in an environment of its own. A step leaves its result only when it is complete (the
archive and its contents appear by a rename, the environment carries a stamp), so whatever an interruption left behind
is removed and made again; compiled objects stay in ``cmake/``, and the compiler goes on where it stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

VERSION = "0.3.36"
"""llama-cpp-python; its source package carries llama.cpp, the converter included."""

NAME = f"llama_cpp_python-{VERSION}"
BUILD_TOOLS = ("scikit-build-core==1.1.2", "ninja==1.13.2")
PROGRAMS = {"cmake": "cmake", "CC": "cc", "CXX": "c++"}
"""Needed programs, and the variables of the environment that replace the compilers."""

PROGRESS = re.compile(r"\[(\d+)/(\d+)\]")
STAMP = f"{VERSION} on Python {sys.version}"


class Engine(NamedTuple):
    """A built llama.cpp."""

    python: Path
    """Interpreter of the environment that has ``llama_cpp``."""
    source: Path
    """Source tree with the converter."""


class BuildError(Exception):
    """The engine cannot be built here; the message says what is missing."""


def build(work: Path) -> Engine:
    """Return the engine in *work*, doing whichever steps are not done yet.

    Raises:
        BuildError: a program is missing, the network is away, or the compiler failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    python, stamp = work / "venv" / "bin" / "python", work / "venv" / "complete"
    if stamp.is_file() and stamp.read_text() == STAMP and (work / NAME).is_dir() and _imports(python):
        return Engine(python, work / NAME / "vendor" / "llama.cpp")
    check_programs()
    shutil.rmtree(work / "venv", ignore_errors=True)
    print(f"making the environment {work / 'venv'}", flush=True)
    venv.create(work / "venv", with_pip=True)
    _pip(work, ["install", *BUILD_TOOLS], "install the build tools; is the network away?")
    _unpack(work, _fetch(work))
    print("compiling llama.cpp, once; about ten minutes on two cores", flush=True)
    options = ["--no-build-isolation", f"--config-settings=build-dir={work / 'cmake'}"]
    _pip(
        work,
        ["install", "-v", *options, str(work / NAME)],
        "compile llama.cpp; a second run goes on where the compiler stopped",
    )
    if not _imports(python):
        raise BuildError(f"{NAME} was installed but does not import; remove {work} and try again")
    stamp.write_text(STAMP)
    return Engine(python, work / NAME / "vendor" / "llama.cpp")


def check_programs() -> None:
    """Look for CMake and compilers before anything is downloaded.

    Raises:
        BuildError: names what is missing.
    """
    wanted = {name: os.environ.get(name, default) if name.isupper() else default for name, default in PROGRAMS.items()}
    if absent := [program for program in wanted.values() if not shutil.which(program.split()[0])]:
        raise BuildError(
            f"cannot find {', '.join(absent)}; building llama.cpp needs CMake and a C and C++ compiler "
            "(Debian, Ubuntu: apt install cmake g++; macOS: xcode-select --install and brew install cmake)"
        )


def _imports(python: Path) -> bool:
    return python.exists() and not subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode


def _fetch(work: Path) -> Path:
    """Return the source archive, downloaded unless it is there."""
    archive = work / f"{NAME}.tar.gz"
    if not archive.exists():
        print(f"downloading {archive.name} (77 MB)", flush=True)
        part = work / "download"
        shutil.rmtree(part, ignore_errors=True)
        wanted = f"llama-cpp-python=={VERSION}"
        options = ["--no-binary", "llama-cpp-python", "--no-deps", "--no-build-isolation", "-d", str(part)]
        _pip(work, ["download", *options, wanted], f"download {wanted}; without a network, put it at {archive}")
        os.replace(part / archive.name, archive)
        part.rmdir()
    return archive


def _unpack(work: Path, archive: Path) -> None:
    if (work / NAME).is_dir():
        return
    part = work / "unpacked"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(part, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BuildError(f"cannot unpack {archive} ({error}); remove it and try again") from error
    os.replace(part / NAME, work / NAME)
    part.rmdir()


def _pip(work: Path, arguments: Sequence[str], purpose: str) -> None:
    """Run pip of the environment, its output in ``build.log``, showing how far a compilation is.

    Raises:
        BuildError: it failed; the message holds the last lines of the log.
    """
    log = work / "build.log"
    command = [str(work / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    options = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_GENERATOR": "Ninja", "PYTHONUNBUFFERED": "1"}
    path = f"{work / 'venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = os.environ | options | {"PATH": path}
    lines: list[str] = []
    began, shown = time.monotonic(), 0
    with (
        open(log, "a", encoding="utf-8") as record,
        subprocess.Popen(
            ["nice", "-n", "10", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            record.write(line)
            lines.append(line.strip())
            if (match := PROGRESS.search(line)) and (tenth := 10 * int(match[1]) // int(match[2])) > shown:
                shown = tenth
                print(f"  {match[1]} of {match[2]} steps, {time.monotonic() - began:.0f} s", flush=True)
    if process.returncode:
        last = "\n".join(f"    {line}" for line in lines[-12:])
        raise BuildError(f"cannot {purpose}\n{last}\n(whole log: {log})")
