"""The command itself: cheap to start, one line per error, one module per verb."""

import subprocess
import sys
import types

import pytest

import tercet
from tercet.cli import main as command
from tercet.errors import ConfigError, StorageError

HEAVY = ("torch", "numpy", "rich", "tokenizers", "tiktoken")


def _loaded(code: str) -> set[str]:
    """Return which of the heavy packages a fresh interpreter holds after running *code*."""
    probe = f"import sys\n{code}\nprint('loaded:', *[m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    return set(out.split("loaded:")[1].split())


def test_the_probe_sees_what_is_loaded():
    assert _loaded("import rich") == {"rich"}


def test_import_is_cheap():
    assert _loaded("import tercet") == set()
    assert _loaded("import tercet.errors, tercet.config, tercet.presets, tercet.util.settings") == set()


def test_help_loads_nothing_heavy():
    run = "from tercet.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert _loaded(run) == set()


def test_help_names_every_verb(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in command.VERBS)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out.strip() == f"tercet {tercet.__version__}"


def test_module_runs_as_command():
    done = subprocess.run([sys.executable, "-m", "tercet", "pln"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "tercet: unknown verb 'pln' — did you mean 'plan'?"
    assert done.stdout == ""


def _verb(monkeypatch, run):
    module = types.SimpleNamespace(__doc__="A verb.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(command.importlib, "import_module", lambda name: module)
    return command.main(["plan"])


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("x is 3; use 4"), 2, "tercet plan: x is 3; use 4\n"),
        (KeyboardInterrupt(), 130, "\ntercet plan: stopped\n"),
        (BrokenPipeError(), 0, ""),
        (OSError(28, "No space left on device"), 2, "tercet plan: [Errno 28] No space left on device\n"),
        (StorageError(28, "cannot write x: full"), 2, "tercet plan: cannot write x: full\n"),
    ],
)
def test_errors_end_in_one_line_and_a_status(monkeypatch, capsys, error, status, message):
    def run(args):
        raise error

    assert _verb(monkeypatch, run) == status
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(args):
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        _verb(monkeypatch, run)


def test_status_of_a_verb_is_passed_on(monkeypatch):
    assert _verb(monkeypatch, lambda args: 3) == 3
    assert _verb(monkeypatch, lambda args: None) == 0


def test_a_reader_that_leaves_is_no_error():
    """As under ``| head``: the pipe closes while there is more to say."""
    talkative = (
        "import sys, types, tercet.cli.main as command\n"
        "verb = types.SimpleNamespace(__doc__='', add_arguments=lambda p: None, run=lambda a: print('x' * 100_000))\n"
        "command.importlib.import_module = lambda name: verb\n"
        "sys.exit(command.main(['plan']))"
    )
    words = [sys.executable, "-c", talkative]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_interrupted_while_a_verb_is_loading(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.importlib, "import_module", interrupted)
    assert command.main(["plan"]) == 130
    assert capsys.readouterr().err == "\ntercet plan: stopped\n"


def test_a_reader_that_leaves_a_table_is_no_error():
    """Rich turns the closed pipe into an exit with status 1; the command still did what was wanted of it."""
    words = [sys.executable, "-m", "tercet", "plan", "k3"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_exit_that_a_verb_asks_for_is_passed_on(monkeypatch):
    def run(args):
        raise SystemExit(5)

    with pytest.raises(SystemExit, match="5"):
        _verb(monkeypatch, run)
