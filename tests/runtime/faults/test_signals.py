"""Signals that ask for a stop: what is ignored stays ignored."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from shardwise.runtime.faults import guard
from shardwise.runtime.faults.signals import heeded


def test_signals_that_are_ignored_are_not_heeded() -> None:
    asked = (signal.SIGTERM, signal.SIGHUP)
    assert heeded(asked) == list(asked)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heeded(asked) == [signal.SIGTERM]
        with guard.stop_requests() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    found: list[list[signal.Signals]] = []
    thread = threading.Thread(target=lambda: found.append(heeded(asked)))
    thread.start()
    thread.join()
    assert found == [[]]


def test_sighup_asks_a_rank_to_stop() -> None:
    with guard.stop_requests() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.name == "SIGHUP"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_rank_that_was_asked_is_not_asked_again_while_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's warning may come twice; the second must not replace the exit code of a run that has saved."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with guard.stop_requests():
            pass
        assert signal.getsignal(signal.SIGUSR1) is before
        with guard.stop_requests() as request:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert request.name == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
