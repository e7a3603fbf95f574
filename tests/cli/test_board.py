"""``shardwise board``: who is answered and who is not, what is shown, and what it costs."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli import board_pages, board_server
from shardwise.cli.app import main
from shardwise.cli.board_pages import BoardPages
from shardwise.runtime.faults.outcome import Exit, write_exit
from shardwise.runtime.owner import claim
from shardwise.runtime.report.report import Report
from shardwise.spec.plan import Estimate
from tests.cli.boards import Asked, board, many_runs, own_process, processor_s, resident_mib, some_runs
from tests.cli.test_compare import write_run
from tests.pages.parsed import Parsed, faults
from tests.said import refuses, shows

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with board(some_runs(tmp_path_factory.mktemp("board") / "secret-runs")) as one:
        yield one


@pytest.fixture(autouse=True)
def _shown_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as it was a moment ago."""
    monkeypatch.setattr(board_pages, "KEPT_S", 0.0)


def words(text: str) -> str:
    """The words of a page, which is well-formed, loads nothing, and leads to pages of this board only."""
    ours = re.compile(r"a loads (run/[^/]+|\.\./)$|no place (run/|\.\./)")
    assert [fault for fault in faults(text) if not ours.match(fault)] == []
    return " ".join(Parsed(text).words.split())


def refused(answer: bytes, asked: Asked) -> int:
    """The status of an answer that tells nothing; 0 of none."""
    head, _, body = answer.partition(b"\r\n\r\n")
    for secret in (asked.token, "secret-runs", "finished", "Python", "Traceback", str(asked.runs)):
        assert secret.encode() not in answer
    assert len(body) < 60
    return int(head.split()[1]) if head else 0


def test_it_lists_what_runs_lists(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """In the same order and words."""
    assert main(["runs", str(asked.runs)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    page = words(asked.whole())
    for line in lines:
        cells = re.split(r"\s{2,}", line.strip())
        assert shows(page, *cells[:4]), line
    names = [line.split()[0] for line in lines]
    assert sorted(names, key=page.index) == names and len(names) == 4
    assert all(shows(page, "4 runs", f"1 {name}") for name in names)
    assert shows(page, "20/40", "3.000", "120")  # tokens/s of the last step
    assert len(Parsed(asked.whole()).pictures()) == 4


def test_of_very_many_runs_the_newest_are_shown(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_pages, "MOST_RUNS", 2)
    page = fresh(BoardPages(asked.runs))
    assert shows(words(page), "4 runs") and shows(words(page), "newest 2") and page.count('href="run/') == 2
    assert page.index(">interrupted<") < page.index(">failed<")


def test_every_answer_forbids_what_pages_do_not_need(asked: Asked) -> None:
    host = f"Host: 127.0.0.1:{asked.port}"
    for path in ("", "run/finished", "run/none"):
        head = asked.raw(f"GET /{asked.token}/{path} HTTP/1.1\r\n{host}\r\n\r\n".encode()).partition(b"\r\n\r\n")[0]
        found = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
        assert found["Referrer-Policy"] == "no-referrer" and found["Cache-Control"] == "no-store"
        assert found["X-Content-Type-Options"] == "nosniff" and found["Server"] == "shardwise"
        policy = found["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "script" not in policy and "http" not in policy
    answer = asked.raw(f"HEAD /{asked.token}/ HTTP/1.1\r\n{host}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/{token}/", "evil.example:{port}", 403),
        ("/{token}/", "127.0.0.1", 403),
        ("/{token}/", "127.0.0.1:1", 403),
        ("/{token}/", "127.0.0.1:{port}\r\nHost: evil.example", 403),
        ("/{token}/", "", 403),
        ("/", "127.0.0.1:{port}", 403),
        ("/{token}", "127.0.0.1:{port}", 404),
        ("/{token}x/", "127.0.0.1:{port}", 403),
        ("/\xff/", "127.0.0.1:{port}", 403),
        ("/run/finished", "127.0.0.1:{port}", 403),
        ("http://127.0.0.1:{port}/{token}/", "127.0.0.1:{port}", 403),
        ("/{token}/run/../run/finished", "127.0.0.1:{port}", 404),
        ("/{token}/run/..", "127.0.0.1:{port}", 404),
        ("/{token}/run/%2e%2e", "127.0.0.1:{port}", 404),
        ("/{token}/run/%2e%2e%2ffinished", "127.0.0.1:{port}", 404),
        ("/{token}/run/finished%2frecipe.yaml", "127.0.0.1:{port}", 404),
        ("/{token}/run/finished/recipe.yaml", "127.0.0.1:{port}", 404),
        ("/{token}/run/finished%00", "127.0.0.1:{port}", 404),
        ("/{token}/run/%ff", "127.0.0.1:{port}", 404),
        ("/{token}/run/", "127.0.0.1:{port}", 404),
        ("/{token}/finished", "127.0.0.1:{port}", 404),
        ("/{token}//etc/passwd", "127.0.0.1:{port}", 404),
        ("/{token}/?x", "127.0.0.1:{port}", 404),
    ],
)
def test_others_are_refused(path: str, host: str, status: int, asked: Asked) -> None:
    """Other sites' names that lead here, who does not know the token, and paths that are no page's."""
    place, who = (text.format(token=asked.token, port=asked.port) for text in (path, host))
    line = f"Host: {who}\r\n" if who else ""
    answer = asked.raw(f"GET {place} HTTP/1.1\r\n{line}\r\n".encode("latin-1"))
    assert refused(answer, asked) == status


def test_both_names_of_this_machine_are_answered(asked: Asked) -> None:
    for name in ("localhost", "127.0.0.1", "LOCALHOST"):
        request = f"GET /{asked.token}/run/stopped HTTP/1.1\r\nHost: {name}:{asked.port}\r\n\r\n"
        assert asked.raw(request.encode()).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "NONE"])
def test_nothing_but_reading_is_allowed(method: str, asked: Asked) -> None:
    request = f"{method} /{asked.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{asked.port}\r\nContent-Length: 3\r\n\r\nabc"
    assert refused(asked.raw(request.encode()), asked) in (405, 0)


@pytest.mark.parametrize("kind", ["line", "header", "headers", "endless", "garbage", "version", "nothing"])
def test_what_is_no_small_request_is_refused(kind: str, asked: Asked) -> None:
    begin = f"GET /{asked.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{asked.port}\r\n"
    request = {
        "line": f"GET /{asked.token}/?{'x' * 100_000} HTTP/1.1\r\nHost: 127.0.0.1:{asked.port}\r\n\r\n",
        "header": f"{begin}X: {'x' * 100_000}\r\n\r\n",
        "headers": begin + "X: y\r\n" * 150 + "\r\n",
        "endless": begin + "X: y\r\n" * 100_000,
        "garbage": "\x16\x03\x01\x02\r\n\r\n",
        "version": f"GET /{asked.token}/ HTTP/9.9\r\nHost: 127.0.0.1:{asked.port}\r\n\r\n",
        "nothing": "\r\n\r\n",
    }[kind]
    assert refused(asked.raw(request.encode("latin-1")), asked) in (0, 400, 431, 505)
    assert asked.ask()[0] == 200


def test_who_is_slow_keeps_nobody_waiting(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than are answered at once, of which each sends a byte and no more: the first are cut off."""
    monkeypatch.setattr(board_server, "HEAD_S", 30.0)
    more = 8
    slow = [socket.create_connection(("127.0.0.1", asked.port)) for _ in range(board_server.MOST_CONNECTIONS + more)]
    for one in slow:
        one.sendall(b"G")
    begun_s = time.monotonic()
    assert asked.ask()[0] == 200
    assert time.monotonic() - begun_s < 20
    assert threading.active_count() < board_server.MOST_CONNECTIONS + 10
    for one in slow[:more]:
        one.settimeout(10)
        with suppress(ConnectionError):
            assert one.recv(10) == b""
    for one in slow:
        one.close()


def test_who_sends_little_by_little_is_cut_off(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_server, "HEAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", asked.port)) as one:
        begun_s = time.monotonic()
        with suppress(ConnectionError):
            while not select.select([one], [], [], 0.05)[0]:
                one.sendall(b"x")
            assert one.recv(10) == b""
        assert 0.2 < time.monotonic() - begun_s < 10


def test_many_requests_leave_nothing_behind(asked: Asked) -> None:
    asked.page()
    before = resident_mib(os.getpid()), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(500):
        status, _ = asked.ask("run/finished" if number % 2 else f"run/{number}")
        assert status == (200 if number % 2 else 404)
    time.sleep(0.05)
    assert threading.active_count() <= before[1] + 1
    assert len(os.listdir("/proc/self/fd")) <= before[2] + 2
    assert resident_mib(os.getpid()) < before[0] + 8


def fresh(pages: BoardPages, rest: str = "") -> str:
    """A page once everything has been read."""
    while True:
        answer = pages.answer(rest)
        assert answer is not None
        if answer.again_s != board_pages.SOON_S:
            return answer.html.decode()


def row(step: int, loss: float | None) -> str:
    return json.dumps({"step": step, "tokens": 64 * step, "loss": loss, "tokens_per_s": 50.0, "seconds": 0.5}) + "\n"


def test_a_run_is_shown_while_it_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 3, 0.1, False, train={"max_steps": 40})
    held, pages = claim(run), BoardPages(tmp_path)
    assert shows(words(fresh(pages)), "running, pid", "3/40", "4.700")
    first = words(fresh(pages, "run/a"))
    assert shows(first, "running, pid", "3/40") and shows(first, "3 steps", "192 tokens")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(4, 2.25) + row(5, 1.125)[:-9])  # of the second a part
    assert shows(words(fresh(pages)), "4/40", "2.250")
    assert shows(words(fresh(pages, "run/a")), "4 steps")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(row(5, 1.125)[-9:])
    assert shows(words(fresh(pages)), "5/40", "1.125", "50")
    assert shows(words(fresh(pages, "run/a")), "5 steps")
    assert "from 1.125 to" in drawn(fresh(pages, "run/a")) and "from 4.9 to 1.125" in drawn(fresh(pages))
    assert pages.answer("").again_s == 5  # type: ignore[union-attr]
    held.release()
    assert shows(words(fresh(pages)), "interrupted", "5/40")
    assert pages.answer("").again_s == 30  # type: ignore[union-attr]
    assert shows(words(fresh(pages, "run/a")), "shardwise train")


def drawn(page: str) -> str:
    """What the picture of the loss tells."""
    told = (picture.get("aria-label") or "" for picture in Parsed(page).pictures())
    return next(each for each in told if each.startswith("Loss"))


def test_a_file_that_is_another_is_read_anew(tmp_path: Path) -> None:
    """Cut off, written over in place, or replaced by one that is longer."""
    run = write_run(tmp_path / "a", 50, 0.01, False)
    pages, metrics = BoardPages(tmp_path), run / "metrics.jsonl"
    assert shows(words(fresh(pages, "run/a")), "50 steps")
    metrics.write_text(row(1, 8.0) + row(2, 7.0))
    assert shows(words(fresh(pages, "run/a")), "2 steps") and "to 8" in drawn(fresh(pages, "run/a"))
    metrics.write_text("".join(row(step, 30.0 + step) for step in range(1, 90)))
    assert shows(words(fresh(pages, "run/a")), "89 steps") and "from 31 to 119" in drawn(fresh(pages))
    (run / "new").write_text("".join(row(step, 2.0) for step in range(1, 200)))
    os.replace(run / "new", metrics)
    assert shows(words(fresh(pages, "run/a")), "199 steps") and "from 2 to 2" in drawn(fresh(pages))
    metrics.unlink()
    assert shows(words(fresh(pages, "run/a")), "0 steps") and fresh(pages).count("<polyline") == 0


DIES = """
import os, sys
from pathlib import Path
from shardwise.runtime.faults.outcome import Exit, write_exit
from shardwise.runtime.owner import claim
from shardwise.runtime.report.report import Report
from shardwise.spec.plan import Estimate
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_a_run_whose_process_is_gone_goes_on_no_more(tmp_path: Path) -> None:
    """No file of it has changed."""
    run, pages = write_run(tmp_path / "a", 3, 0.1, False), BoardPages(tmp_path)
    command = [sys.executable, "-c", DIES, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        assert shows(words(fresh(pages)), "running, pid", process.pid)
        assert shows(words(fresh(pages, "run/a")), "running, pid", process.pid)
    assert shows(words(fresh(pages, "run/a")), "interrupted") and "running" not in words(fresh(pages, "run/a"))
    assert pages.answer("run/a") is pages.answer("run/a")  # nothing is drawn again
    assert shows(words(fresh(pages)), "a interrupted")


def test_the_report_of_a_run_that_has_ended_is_shown(tmp_path: Path) -> None:
    """Unless it is of fewer steps than the run has done since."""
    run, pages = write_run(tmp_path / "a", 20, 0.1), BoardPages(tmp_path)
    write_exit(run, Exit("done", 0, ""))
    report = Report(run, 20, 1280, 61.0, 0.5, Estimate(), after="and so on", notes=["Best checkpoint: step 4."])
    report.keep()
    found = words(fresh(pages, "run/a"))
    assert shows(found, "20 steps", "1:01") and "and so on" in found and "Best checkpoint: step 4." in found
    replace(report, steps=19).keep()
    found = words(fresh(pages, "run/a"))
    assert shows(found, "20 steps", "0:10") and "and so on" not in found


def test_nothing_is_written(tmp_path: Path) -> None:
    runs = some_runs(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    pages = BoardPages(runs)
    fresh(pages)
    for name in ("finished", "failed"):
        fresh(pages, f"run/{name}")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_is_broken_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    for name in ("recipe", "pipe", "piped-recipe", "lines", "report", "loop", EVIL.replace("/", "|"), "gone"):
        write_run(tmp_path / name, 5, 0.1)
    (tmp_path / "recipe" / "recipe.yaml").write_text(f"train: {{max_stps: 20}} # {EVIL}\n")
    for place in (tmp_path / "pipe" / "metrics.jsonl", tmp_path / "piped-recipe" / "recipe.yaml"):
        place.unlink()
        os.mkfifo(place)
    (tmp_path / "lines" / "metrics.jsonl").write_bytes(b"\xff\n[]\n" + b"x" * 3_000_000 + b"\n" + row(7, 3.5).encode())
    (tmp_path / "report" / "exit.json").write_text('{"kind": "done", "exit_code": 0, "message": ""}')
    (tmp_path / "report" / "report.json").write_text("{")
    (tmp_path / "loop" / "events.jsonl").unlink()
    (tmp_path / "loop" / "events.jsonl").symlink_to("events.jsonl")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe")
    (tmp_path / os.fsdecode(b"\xff\xfe") / "recipe.yaml").write_text("{}\n")
    (tmp_path / "no-run").symlink_to("nowhere")
    pages = BoardPages(tmp_path)
    found = fresh(pages)
    assert shows(words(found), "recipe", "damaged", "train.max_stps") and shows(words(found), "lines", "7", "3.500")
    assert shows(words(found), "9 runs")
    assert "<script" not in found and EVIL.replace("/", "|") in Parsed(found).words
    links = [given["href"] or "" for tag, given in Parsed(found).tags if tag == "a" and "href" in given]
    addresses = [each for each in links if each.startswith("run/")]
    (tmp_path / "gone" / "recipe.yaml").unlink()
    seen = {address: words(fresh(pages, address)) for address in addresses}
    assert shows(seen["run/lines"], "metrics.jsonl:1", "metrics.jsonl:2") and shows(seen["run/lines"], "7 steps")
    assert "damaged" in seen["run/loop"] and "damaged" in seen["run/pipe"] and "damaged" in seen["run/gone"]
    assert "5 steps" in seen["run/report"] and "%FF%FE" in "".join(addresses)
    assert "run/gone" not in fresh(pages)
    with (tmp_path / "recipe" / "metrics.jsonl").open("a") as file:
        file.write(row(6, 4.25))
    assert shows(words(fresh(pages)), "recipe damaged", "6", "4.250")


def test_a_run_by_itself_and_a_directory_that_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 5, 0.1)
    pages = BoardPages(run)
    assert shows(words(fresh(pages)), "1 run") and shows(words(fresh(pages, "run/a")), "5 steps")
    os.rename(run, tmp_path / "b")
    assert shows(words(fresh(pages)), "0 runs")


def test_a_board_of_no_directory_or_port(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["board"]) == 66
    assert refuses(capsys.readouterr().err, "CFG011", "runs")
    assert main(["board", str(asked.runs), "--port", str(asked.port)]) == 69
    assert refuses(capsys.readouterr().err, "NET003", asked.port, where="--port", fix="--port")
    assert main(["board", str(asked.runs), "--port", "65536"]) == 2
    assert refuses(capsys.readouterr().err, "CLI001", 65536, fix="--port")


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    with own_process(some_runs(tmp_path), "--json") as one:
        process = one.process
        assert process is not None and process.stderr is not None
        assert one.ask()[0] == 200
        listening = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()]
        here = {fields[1] for fields in listening if fields[3] == "0A" and fields[1].endswith(f":{one.port:04X}")}
        assert here == {f"0100007F:{one.port:04X}"}
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == "interrupted\n"


@pytest.mark.prove
def test_two_hundred_runs_are_there_at_once_and_take_no_more_memory(tmp_path: Path) -> None:
    """A million lines in all. The first page comes from the ends of files, curves as they are read."""
    with own_process(many_runs(tmp_path, 200, 5_000)) as one:
        assert one.process is not None
        begun_s = processor_s(one.process.pid)
        first = one.page()
        assert processor_s(one.process.pid) - begun_s < 1.0  # of its own: this machine may be busy
        assert shows(words(first), "200 runs") and first.count("5,000") >= 200
        while one.page().count("<polyline") < 200:
            time.sleep(board_pages.KEPT_S)
        small = resident_mib(one.process.pid)
        assert small < 120
        for number in range(0, 200, 10):
            assert one.ask(f"run/run-{number}")[0] == 200
        full = resident_mib(one.process.pid)
        assert full < small + 40
        for number in range(1, 200, 10):
            assert one.ask(f"run/run-{number}")[0] == 200
        assert resident_mib(one.process.pid) < full + 5


@pytest.mark.prove
def test_ten_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """From eight sides at once: pages, paths that are none, wrong tokens, and connections that say nothing."""
    with own_process(some_runs(tmp_path)) as one:
        assert one.process is not None
        pid = one.process.pid

        def ask(times: int) -> None:
            for number in range(times):
                if number % 4 == 3:
                    socket.create_connection(("127.0.0.1", one.port)).close()
                elif number % 4 == 2:
                    assert one.raw(b"GET /x/ HTTP/1.0\r\n\r\n", 30).startswith(b"HTTP/1.0 403")
                else:
                    assert one.ask("run/finished" if number % 4 else f"run/{number}")[0] in (200, 404)

        def all_ask(times: int) -> None:
            threads = [threading.Thread(target=ask, args=(times,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        all_ask(250)
        before = resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))
        all_ask(1_000)
        assert one.ask()[0] == 200
        time.sleep(0.5)
        assert resident_mib(pid) < before[0] + 8
        assert len(os.listdir(f"/proc/{pid}/fd")) <= before[1] + 2
        assert len(os.listdir(f"/proc/{pid}/task")) < 10
        one.process.terminate()
        assert one.process.stderr is not None and "Traceback" not in one.process.stderr.read()


def test_answers_are_read_again_only_where_there_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "answers/sums").mkdir(parents=True)
    line = {"prompt": "1 + 1", "expected": "2", "answer": "3", "score": 0.0}
    (folder / "step-00000001.jsonl").write_text(json.dumps(line) + "\n")
    read, own = list[Path](), board_pages.answer_tables

    def counted(directory: Path) -> object:
        read.append(directory)
        return own(directory)

    monkeypatch.setattr(board_pages, "answer_tables", counted)
    tables = [board_pages._tables(tmp_path) for _ in range(3)]
    assert len(read) == 1 and tables[0][0].rows == tables[2][0].rows == [["1", "0.000", "3"]]
    (folder / "step-00000002.jsonl").write_text(json.dumps(line | {"answer": "2", "score": 1.0}) + "\n")
    assert board_pages._tables(tmp_path)[0].rows[1] == ["2", "1.000", "2"] and len(read) == 2
