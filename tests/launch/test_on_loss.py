"""Nodes that meet when one of them is lost: who decides, who trains on, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.errors import ConfigError, OutputError, Problem, TrainingError, UnavailableError
from shardwise.launch.elastic import OwnRanks, stay
from shardwise.launch.local import Failure, Requests
from shardwise.launch.meeting import MOST_TRIES, Meeting, OnLoss, Rules
from shardwise.launch.node import Node
from shardwise.launch.roster import NodeEntry, NodeGeneration, NodeMember, Patience, Roster
from shardwise.runtime import owner
from shardwise.runtime.faults.outcome import Exit, write_exit
from tests.launch.waiting import until
from tests.said import refusal, refuses, shows
from tests.style.source import ROOT

QUICK = Patience(beat_s=0.05, look_s=0.01, settle_s=0.1, start_s=30.0, wait_s=30.0)


def no_plan(nodes: int) -> str:
    raise ConfigError(Problem("CFG008", f"8 rows do not divide among {nodes}"))


@dataclass
class Seat:
    """A node, which meets the others in a thread; it is in ``dead`` once it has died."""

    number: int
    meeting: Meeting
    dead: set[str]
    asked: Requests = field(default_factory=lambda: Requests(True))
    found: list[NodeGeneration | Exception | None] = field(default_factory=list)
    thread: threading.Thread | None = None

    def meets(self, state: str = "") -> None:
        """Begin to meet the others, after its ranks have ended so."""
        if state:
            self.meeting.roster.tell(state)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._meet)
        self.thread.start()

    def _meet(self) -> None:
        try:
            self.found.append(self.meeting.meet(self.asked))
        except Exception as error:
            self.found.append(error)

    def dies(self) -> None:
        """Say nothing, and be gone."""
        self.meeting.roster._over.set()
        self.leaves()
        self.dead.add(self.meeting.me.me.token)

    def leaves(self) -> None:
        self.asked.receive(15, None)
        if self.thread is not None:
            self.thread.join()

    def told(self) -> NodeGeneration:
        """The generation that it was told of last."""
        assert self.thread is not None
        self.thread.join(20)
        assert self.found and isinstance(self.found[-1], NodeGeneration), self.found
        return self.found[-1]

    def members(self) -> list[int]:
        return [each.node for each in self.told().members]


Sit = Callable[..., Seat]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sit]:
    """Sits a node down, whose step is in the file ``step``; all get up at the end."""
    step = tmp_path / "step"
    step.write_text("8")
    monkeypatch.setattr("shardwise.launch.local._say", lambda line: None)
    dead = set[str]()
    monkeypatch.setattr("shardwise.launch.roster.is_alive", lambda owner: owner.token not in dead)
    with ExitStack() as opened:
        seats = []

        def sit(number: int, on_loss: OnLoss = "replan", patience: Patience = QUICK, **rules: object) -> Seat:
            me = replace(owner.me(f"{number}-{len(seats)}"), host=f"host{number}")
            roster = Roster(tmp_path / "nodes", NodeEntry(number, 2, f"10.0.0.{number}", me), patience)
            known: dict[str, object] = {"nodes": 3, "begins": 3, "least": 1, "replan": lambda nodes: f"{nodes} planned"}
            known |= {"step": lambda: int(step.read_text()), "record": lambda what: None, "say": lambda what: None}
            meeting = Meeting(roster, Rules(on_loss=on_loss, **{**known, **rules}))  # type: ignore[arg-type]
            opened.enter_context(roster.joined())
            seats.append(Seat(number, meeting, dead))
            return seats[-1]

        yield sit
        for seat in seats:
            seat.leaves()


def begun(sit: Sit, nodes: int = 3, on_loss: OnLoss = "replan", **rules: object) -> list[Seat]:
    """So many nodes whose ranks train."""
    seats = [sit(number, on_loss, nodes=nodes, begins=nodes, **rules) for number in range(nodes)]
    for seat in seats:
        seat.meets()
    for seat in seats:
        assert seat.members() == list(range(nodes)) and seat.told().number == 1 and not seat.told().why
        assert seat.meeting.look() == ""
    return seats


def lose(seat: Seat, others: list[Seat]) -> None:
    """``seat`` dies, the others see it, and their ranks end."""
    seat.dies()
    for other in others:
        until(lambda other=other: other.meeting.look() == "end")  # type: ignore[misc]
        other.meets("lost")


def test_those_that_are_left_are_planned_for(table: Sit) -> None:
    """The lowest that trained decides: its first loss is the first node, its second another."""
    first, second, third = begun(table)
    lose(first, [second, third])
    assert second.members() == third.members() == [1, 2]
    why = second.told().why
    assert shows(why, "node 0 (host0) was lost", "2 nodes now", "2 planned", "step 8") and second.told().lost
    assert [each.address for each in second.told().members] == ["10.0.0.1", "10.0.0.2"]
    lose(third, [second])
    assert second.members() == [1] and shows(second.told().why, "node 2 (host2)", "1 node now", "1 planned")


def test_a_node_that_dies_while_all_meet(table: Sit) -> None:
    first, second, third = begun(table)
    third.dies()
    slow = replace(QUICK, settle_s=30.0)
    first.meeting.roster.patience = slow
    until(lambda: first.meeting.look() == second.meeting.look() == "end")
    first.meets("lost")  # it decides, and has not yet
    second.meets("lost")
    first.dies()
    assert second.members() == [1] and shows(second.told().why, "node 0 (host0)", "node 2 (host2)", "1 node now")


def test_a_lost_node_is_waited_for(table: Sit) -> None:
    """Another start of it takes its place, with the same nodes in the same order."""
    first, second = begun(table, 2, "wait", replan=no_plan)
    lose(first, [second])
    again = table(0, "wait", nodes=2, begins=2, replan=no_plan)
    again.meets()
    assert again.members() == second.members() == [0, 1]
    assert again.told() == second.told()
    assert shows(second.told().why, "node 0 (host0)", "came back", "same plan")


def test_it_is_waited_for_no_longer_than_said(table: Sit) -> None:
    first, second = begun(table, 2, "wait")
    second.meeting.roster.patience = replace(QUICK, wait_s=0.2)
    lose(first, [second])
    assert second.members() == [] and second.told().code == 69
    assert shows(second.told().why, "node 0 (host0) was lost", "too few")


def test_a_node_that_comes_is_taken_in_at_the_next_checkpoint(table: Sit, tmp_path: Path) -> None:
    first, second = begun(table, 2)
    lose(second, [first])
    assert first.members() == [0]
    again = table(1, nodes=2, begins=2)
    again.meets()
    until(lambda: first.meeting.look() == "" and first.meeting._grows_after == 8)
    for _ in range(20):
        assert first.meeting.look() == "", "there is no new checkpoint"
    (tmp_path / "step").write_text("16")
    assert first.meeting.look() == "save"
    first.meets("saved")
    assert first.members() == again.members() == [0, 1]
    assert shows(again.told().why, "node 1 (host1)", "taken in", "2 nodes now", "step 16") and not again.told().lost


def test_no_more_are_taken_in_than_can_be_planned_for(table: Sit) -> None:
    def even(nodes: int) -> str:
        return no_plan(nodes) if nodes == 3 else "planned"

    seats = [table(number, nodes=4, begins=2, replan=even) for number in range(3)]
    for seat in seats:
        seat.meets()
    for seat in seats[:2]:
        assert seat.members() == [0, 1] and shows(seat.told().why, "2 nodes now")
    assert not seats[2].found and seats[2].thread is not None
    assert [seats[0].meeting.look() for _ in range(9)] == [""] * 9


def test_where_nothing_can_be_planned_it_ends_and_says_why(table: Sit) -> None:
    first, second = begun(table, 2, replan=no_plan)
    lose(first, [second])
    assert second.members() == [] and second.told().code == 78
    assert shows(second.told().why, "node 0 (host0) was lost", "no plan", "1 node", "8 rows")


def test_ranks_that_were_asked_themselves_stay_ended(table: Sit) -> None:
    """Every node is there, and all ranks have saved: somebody has asked a rank to stop."""
    seats = begun(table, 2)
    for seat in seats:
        seat.meets("saved")
    assert [seat.told().code for seat in seats] == [75, 75] and not seats[0].members()


def test_ranks_that_lose_one_another_start_again_but_not_for_ever(table: Sit) -> None:
    seats = begun(table, 2)
    for tries in range(MOST_TRIES + 1):
        for seat in seats:
            seat.meets("lost")
        told = seats[0].told()
        assert seats[1].told() == told and (tries < MOST_TRIES) == bool(told.members)
        assert not told.members or shows(told.why, "lost one another", "2 nodes now", "same plan")
    assert seats[0].told().code == 1 and shows(seats[0].told().why, f"{MOST_TRIES + 1} times")


def test_a_node_that_does_not_come_at_the_start(table: Sit) -> None:
    seat = table(0, patience=replace(QUICK, start_s=0.2))
    seat.meets()
    assert seat.thread is not None
    seat.thread.join(20)
    assert isinstance(seat.found[0], UnavailableError)
    assert refuses(str(seat.found[0]), "NET005", "1 of 3 nodes", "node 0 (host0)", fix="--out")


def test_a_node_with_other_ranks_is_not_taken_in(table: Sit) -> None:
    begun(table, 2)
    other = table(5)
    other.meeting.roster.entry = replace(other.meeting.me, nproc=4)
    other.meets()
    assert other.thread is not None
    other.thread.join(20)
    assert isinstance(other.found[0], ConfigError) and refuses(str(other.found[0]), "RUN007", "4 ranks", "2 each")


def test_a_node_that_is_started_twice(tmp_path: Path, table: Sit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same kernel the second is refused; elsewhere the first gives way when it sees the other."""
    here = NodeEntry(0, 2, "10.0.0.1", owner.me("here"))
    again = Roster(tmp_path / "here", replace(here, me=owner.me("again")), QUICK)
    refused = pytest.raises(OutputError, match=refusal("OUT005", "node 0", f"pid {os.getpid()}"))
    with Roster(tmp_path / "here", here, QUICK).joined(), refused, again.joined():
        pytest.fail("it joined")
    monkeypatch.setattr("shardwise.launch.roster.is_alive", lambda owner: None)
    first = table(0)
    first.meets()
    table(0).meets()
    assert first.thread is not None
    first.thread.join(20)
    assert isinstance(first.found[0], OutputError) and "OUT005" in str(first.found[0])


def test_who_gives_way_leaves_the_file_of_the_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.launch.roster.is_alive", lambda owner: None)
    slow = replace(QUICK, beat_s=60.0)
    first, second = (Roster(tmp_path, NodeEntry(0, 2, "", owner.me(f"{n}")), slow) for n in range(2))
    with ExitStack() as opened:
        with first.joined():
            opened.enter_context(second.joined())
        assert first.superseded and '"token": "1"' in (tmp_path / "node-00000.json").read_text()
        second.tell("training")
        assert not second.superseded


def test_a_file_system_that_stood_still_has_lost_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shardwise.launch.roster.time.monotonic", lambda: now[0])
    patience = Patience()
    mine, other = (NodeEntry(n, 2, "", replace(owner.me(f"{n}"), kernel=f"{n}")) for n in range(2))
    roster, theirs = Roster(tmp_path, mine, patience), Roster(tmp_path, other, patience)

    def later(seconds: float, beats: bool) -> bool | None:
        now[0] += seconds
        if beats:
            theirs._write()
        roster.look()
        return roster.lives("1", 1)

    theirs._write()
    assert later(1.0, beats=False) is None, "it may be one that an earlier job left"
    assert later(1.0, beats=True) is True
    assert later(600.0, beats=False) is True
    assert [later(1.0, beats=False) for _ in range(40)].index(False) == patience.lost_s - 3
    assert later(1.0, beats=True) is True
    theirs.entry = replace(theirs.entry, state="left")
    assert later(1.0, beats=True) is False


def ended(directory: Path, deed: str, monkeypatch: pytest.MonkeyPatch, step: int = 8) -> int:
    """The exit code of a node, of one to two, whose rank does so."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
    rules = Rules("replan", 2, 1, 1, lambda nodes: "", lambda: step, lambda what: None, lambda what: None)
    ranks = OwnRanks([str(directory), deed], module="tests.launch.meeting_rank")
    return stay(ranks, Node(2, 0, 1, "localhost", 1234, "start-7", 1), directory, rules, QUICK)


@pytest.mark.parametrize(
    ("deed", "code", "state", "tries"),
    [
        ("again", 0, "done", 2),
        ("always", 1, "failed", MOST_TRIES + 1),
        ("fails", 78, "failed", 1),
        ("asked", 75, "left", 1),
        ("preempted", 75, "failed", 1),
        ("bits", 1, "failed", 1),
        ("hung", 0, "done", 2),
    ],
)
def test_how_a_node_ends(
    deed: str, code: int, state: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exit(tmp_path, Exit("crash", 70, "of an earlier start"))
    assert ended(tmp_path, deed, monkeypatch) == code
    assert len((tmp_path / "tries").read_text()) == tries
    number = tries
    assert (tmp_path / "place").read_text() == f"0 0 1 1 localhost 1234 start-7-{number}"
    assert f'"state": "{state}"' in (tmp_path / "nodes/node-00000.json").read_text()


@pytest.mark.parametrize(("members", "code", "expected"), [([], 0, 0), ([], 69, 78), (["other"], 69, 69)])
def test_a_node_without_ranks_ends_as_the_run_does(
    members: list[str], code: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have failed, and then it may have been left out: their code is of a generation before."""
    found = [NodeMember(1, token, "host1", "10.0.0.1") for token in members]

    def failed(ranks: OwnRanks, place: Node, meeting: Meeting, asked: Requests) -> None:
        ranks.failures, ranks.ran, ranks.wanted = {0: Failure(78, 1, 0.0)}, True, "end"
        if found:
            meeting.roster.publish(NodeGeneration(0, found))
        threading.Timer(0.3, meeting.end, (code,)).start()

    decide = Meeting._decide

    def first_only(meeting: Meeting, waited_s: float) -> None:
        if meeting.roster.newest() is None:
            decide(meeting, waited_s)

    monkeypatch.setattr(OwnRanks, "run", failed)
    monkeypatch.setattr(OwnRanks, "were_lost", lambda *given: True)
    monkeypatch.setattr(Meeting, "_decide", first_only)
    assert ended(tmp_path, "", monkeypatch) == expected


def test_ranks_that_end_well_while_they_are_told_to_end_are_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that was to write the report may be the one that is lost."""
    told = iter(("end", ""))

    def ends_well(ranks: OwnRanks, *unused: object) -> None:
        ranks.failures, ranks.ran, ranks.wanted = {}, True, next(told)

    monkeypatch.setattr(OwnRanks, "run", ends_well)
    assert ended(tmp_path, "", monkeypatch) == 0
    assert next(told, None) is None, "they were started again"


@pytest.mark.parametrize("wanted", ["end", "save"])
def test_ranks_that_do_not_end_when_others_ask_are_not_done(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAVE_AND_STOP_S", "AFTER_FAILURE_S"):
        monkeypatch.setattr(f"shardwise.launch.local.{name}", 0.3)
    asked = list[str]()

    def look(meeting: Meeting) -> str:
        if not asked and (tmp_path / "deaf").exists():
            asked.append(wanted)
            return wanted
        return ""

    monkeypatch.setattr(Meeting, "look", look)
    assert ended(tmp_path, "hangs", monkeypatch) == 0
    assert len((tmp_path / "tries").read_text()) == 2, "they were started again"


def test_a_node_whose_rank_was_killed_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match=refusal("RUN004", "rank 0 (pid ", "SIGKILL")):
        ended(tmp_path, "killed", monkeypatch)
    assert '"state": "left"' in (tmp_path / "nodes/node-00000.json").read_text()
    assert len(list((tmp_path / "nodes").glob("generation-*"))) == 1, "nobody else has to end"


@pytest.mark.parametrize(("step", "code"), [(8, 75), (0, 143)])
def test_it_is_asked_to_stop_while_it_meets(
    step: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meeting, "_decide", lambda self, waited_s: os.kill(os.getpid(), 15))
    assert ended(tmp_path, "never", monkeypatch, step) == code and not (tmp_path / "tries").exists()


WORDS = ["train", "model.path=quickstart", "run.on_loss=replan"]


@pytest.mark.parametrize(
    ("words", "values", "where"),
    [
        (["run.certificate=require"], ["RUN009", "run.certificate"], "run.certificate"),
        (["train.micro_batch_size=2"], ["RUN009", "batch", "number of nodes"], "train"),
        (["--plan", "plan.yaml"], ["RUN009", "--plan"], "--plan"),
        (["run.on_loss=wait"], ["RUN007", "PET_NNODES", "1:2", "wait"], "environment"),
        (["run.on_loss=stop"], ["RUN007", "PET_NNODES", "1:2", "stop"], "environment"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: list[str],
    values: list[str],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = {"NNODES": "1:2", "NODE_RANK": "0", "NPROC_PER_NODE": "1", "MASTER_ADDR": "localhost"}
    for name, value in place.items():
        monkeypatch.setenv(f"PET_{name}", value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shardwise.launch.elastic.stay", lambda *given: pytest.fail("it was started"))
    assert main([*WORDS, *words]) == 78
    assert refuses(capsys.readouterr().err, *values, where=where)
    assert not list(tmp_path.iterdir())


def test_ranks_of_another_launcher_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "run.on_loss=wait"]) == 78
    assert refuses(capsys.readouterr().err, "RUN009", "run.on_loss: wait", where="run.on_loss", fix="PET_NNODES")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "run.on_loss=wait"]) == 78
    assert refuses(capsys.readouterr().err, "RUN009", "torchrun", where="run.on_loss")


def test_ranks_go_on_while_the_directory_cannot_be_read(table: Sit, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = begun(table, 2)

    def fail() -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(first.meeting.roster, "look", fail)
    assert first.meeting.look() == ""


def test_a_generation_that_was_decided_too_late_is_dropped(table: Sit) -> None:
    """Of two nodes that decide upon the same one is first; ranks of a generation that is over end."""
    first, other = begun(table, 2)
    roster = first.meeting.roster
    (made, later) = (NodeGeneration(2, [NodeMember(number, f"{number}", "", "")], 2) for number in range(2))
    roster.publish(made)
    roster.publish(later)
    assert roster.newest() == made
    assert other.meeting.look() == "end"
