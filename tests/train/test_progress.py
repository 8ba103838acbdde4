"""The display: right numbers, calm off a terminal, and never in training's way."""

import io

import pytest

from tercet.train.progress import SMOOTHING, WINDOW, Progress, SteadyConsole


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _train(step: int, loss: float | None = 3.0, **more) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "lr": 4e-3, "tokens_per_second": 12_300.0, **more}


def _plain() -> tuple[SteadyConsole, io.StringIO]:
    out = io.StringIO()
    return SteadyConsole(file=out, highlight=False, force_terminal=False, width=200), out


def _terminal() -> tuple[SteadyConsole, io.StringIO]:
    out = io.StringIO()
    return SteadyConsole(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"}), out


def test_plain_lines_are_few_and_complete():
    clock, (console, out) = Clock(), _plain()
    with Progress(100, console=console, clock=clock, plain_seconds=10) as progress:
        for step in range(1, 101):
            clock.now += 1.0
            progress.update(_train(step))
            if step == 50:
                progress.update({"kind": "validation", "step": 50, "loss": 2.0, "bits_per_byte": 2.1234})
    lines = out.getvalue().splitlines()
    assert 10 <= len(lines) <= 12
    assert "step 1/100" in lines[0] and "loss 3.000" in lines[0] and "12.3k tokens/s" in lines[0]
    assert "held-out" not in lines[0] and "held-out 2.123 bits/byte" in lines[-1]
    assert "step 100/100" in lines[-1] and "left" not in lines[-1]
    assert "\x1b" not in out.getvalue()


def test_loss_is_an_unbiased_moving_average():
    progress = Progress(10, console=_plain()[0])
    assert progress.loss is None
    progress.update(_train(1, 4.0))
    assert progress.loss == pytest.approx(4.0)
    progress.update(_train(2, 2.0))
    assert progress.loss == pytest.approx((SMOOTHING * 4.0 + 2.0) / (SMOOTHING + 1.0))
    progress.update(_train(3, None))
    progress.update(_train(4, float("nan")))
    assert progress.loss == pytest.approx((SMOOTHING * 4.0 + 2.0) / (SMOOTHING + 1.0))


def test_remaining_time_forgets_a_slow_start_and_starts_at_the_resumed_step():
    clock = Clock()
    progress = Progress(1000, 500, console=_plain()[0], clock=clock)
    assert progress.remaining_seconds is None
    clock.now += 60.0
    progress.update(_train(501))
    assert progress.remaining_seconds == pytest.approx(60.0 * 499)
    for step in range(502, 502 + WINDOW):
        clock.now += 0.5
        progress.update(_train(step))
    assert progress.remaining_seconds == pytest.approx(0.5 * (1000 - 501 - WINDOW))


def test_a_loss_that_is_not_finite_says_so():
    progress = Progress(10, console=_plain()[0])
    progress.update(_train(1, None, skipped=True))
    assert "loss not finite" in progress.line().plain and "step skipped" in progress.line().plain


def test_terminal_draws_in_place_and_restores_the_cursor_after_ctrl_c():
    console, out = _terminal()

    def interrupted() -> None:
        with Progress(10, console=console) as progress:
            progress.update(_train(1))
            progress.note("saved [step] 1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = out.getvalue()
    assert "step 1/10" in text and "saved [step] 1" in text
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide) == text.count(show) == 1 and text.rindex(show) > text.rindex("step 1/10")


def test_interrupted_plain_run_ends_with_where_it_was():
    clock, (console, out) = Clock(), _plain()

    def interrupted() -> None:
        with Progress(100, console=console, clock=clock) as progress:
            for step in range(1, 5):
                clock.now += 1.0
                progress.update(_train(step))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "step 4/100" in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_vanished_console_does_not_stop_training(terminal, error):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

    console = SteadyConsole(file=Gone(), force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
    with Progress(3, console=console) as progress:
        for step in range(1, 4):
            progress.update(_train(step))
            progress.note("still here")
    assert progress.step == 3


def test_a_closed_stream_does_not_stop_training():
    console, out = _plain()
    with Progress(3, console=console) as progress:
        out.close()
        progress.update(_train(1))
        progress.update(_train(3))
    assert progress.step == 3


def test_other_rows_are_ignored():
    console, out = _plain()
    progress = Progress(3, console=console)
    progress.update({"kind": "probe", "step": 2})
    progress.update({"kind": "sample", "step": 2, "prompt": "a", "text": "b"})
    assert out.getvalue() == "" and progress.step == 0
