"""Signals that ask for a stop: what is ignored stays ignored."""

from __future__ import annotations

import os
import signal
import threading

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
