"""Hooks get what they asked for; whatever is wrong with them, the supervisor never waits, and no secret leaks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import DEADLINE_S, wait_for, with_limit_that_suffices
from zslurm.aegis.notify.hooks import AppriseHook, CommandHook, NotDelivered, Notifier, WebHook, message
from zslurm.config.aegis import NotifySettings
from zslurm.run.events.event import from_row

ENDED = {"time": 5.0, "event": "run_ended", "job_id": "7", "outcome": "failed", "exit_code": 93}
ENDED["cause"] = {"message": "Killed", "rank": 3, "node": "node1"}
SENT = message(from_row(ENDED), {"run": "first"})
SENTENCE = "the run failed (exit code 93): rank 3 on node1: Killed"


def fault(kind: str = "rank_killed", role: str = "root", **fields: Any) -> dict[str, Any]:
    return {"time": 1.0, "event": "fault_detected", "attempt": 1, "kind": kind, "role": role, "line": "x"} | fields


class Server:
    """A web server that keeps what is posted, and answers with the given codes."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.hang = threading.Event()
        self.hang.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, dict(self.headers), body))
                outer.hang.wait(DEADLINE_S)
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def command(text: str, timeout_s: float = DEADLINE_S, **environ: str) -> CommandHook:
    return CommandHook(text, timeout_s, {"PATH": os.environ["PATH"], **environ})


def reason_of(hook: CommandHook | WebHook, **options: Any) -> str:
    with pytest.raises(NotDelivered) as caught:
        hook.deliver(SENT, **options)
    return str(caught.value)


# --- what is sent ----------------------------------------------------------------------------------------------


def test_an_event_is_sent_with_its_run_and_as_a_sentence() -> None:
    assert (SENT["run"], SENT["event"], SENT["cause"]["rank"]) == ("first", "run_ended", 3)
    assert (SENT["words"], SENT["text"]) == (SENTENCE, f"first: {SENTENCE}")


def test_secrets_and_endless_texts_stay_here() -> None:
    line = "ValueError: API_KEY=abcdef123456 was refused"
    sent = json.dumps(message(from_row(fault(line=line, password="hunter22")), {"run": "first"}))
    assert "abcdef123456" not in sent
    assert "hunter22" not in sent
    assert len(json.dumps(message(from_row({"event": "x", "deep": [{"line": "y" * 10**6}]}), {}))) < 20_000


def received(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def notifier(tmp_path: Path, failures: list[str] | None = None, **settings: Any) -> tuple[Notifier, Path]:
    """One whose command keeps what it gets."""
    file = tmp_path / "got"
    given = {"command": f"cat >> {file}", **settings}
    failed = (failures if failures is not None else []).append
    return Notifier(NotifySettings(**given), "first", tmp_path, environ=os.environ, failed=failed), file


def test_only_the_chosen_events_are_sent(tmp_path: Path) -> None:
    sender, file = notifier(tmp_path)
    for kind in ("supervisor_started", "run_ended", "notify_failed"):
        sender.notify(from_row(ENDED | {"event": kind}))
    assert sender.close(DEADLINE_S) == 0
    (only,) = received(file)
    assert (only["event"], only["run_dir"]) == ("run_ended", str(tmp_path))


def test_a_thousand_ranks_that_fail_are_not_a_thousand_messages(tmp_path: Path) -> None:
    sender, file = notifier(tmp_path)
    for rank in range(1000):
        sender.notify(from_row(fault("storage_fault", rank=rank)))
        sender.notify(from_row(fault("peer_lost", "cascade", rank=rank)))
        sender.notify(from_row(fault("teardown", "teardown", rank=rank)))
    sender.notify(from_row(fault("nic_link_down")))
    sender.notify(from_row(fault("nic_link_down", cleared=True)))
    sender.notify(from_row(fault("disk_low", "advisory")))
    sender.notify(from_row(fault("storage_fault", attempt=2)))
    assert sender.close(DEADLINE_S) == 0
    assert [(row["kind"], row["attempt"], row.get("cleared", False)) for row in received(file)] == [
        ("storage_fault", 1, False),
        ("nic_link_down", 1, False),
        ("nic_link_down", 1, True),
        ("disk_low", 1, False),
        ("storage_fault", 2, False),
    ]


@pytest.mark.parametrize("event", [{}, {"event": None}, {"event": "run_ended", "cause": 7, "outcome": {1}}])
def test_an_event_that_makes_no_sense_ends_nothing(tmp_path: Path, event: dict[str, Any]) -> None:
    sender, _ = notifier(tmp_path)
    sender.notify(from_row(event))
    sender.close(DEADLINE_S)


def nested() -> list[Any]:
    """A field of an event that is nested too deeply to become a message."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def test_an_event_that_cannot_become_a_message_is_reported(tmp_path: Path) -> None:
    failures: list[str] = []
    sender, file = notifier(tmp_path, failures)
    sender.notify(from_row(ENDED | {"deep": nested()}))
    sender.notify(from_row(ENDED))
    assert sender.close(DEADLINE_S) == 0
    (failure,) = failures
    assert failure.startswith("event run_ended: no message can be made of it: ")
    assert len(received(file)) == 1, "the next event is sent"


def test_the_report_of_that_is_not_reported_again_where_it_cannot_be_sent_either(tmp_path: Path) -> None:
    events: list[str] = []

    def record(reason: str) -> None:
        events.append(reason)
        sender.notify(from_row({"event": "notify_failed", "reason": reason, "deep": nested()}))

    settings = NotifySettings(command="cat", events=("run_ended", "notify_failed"))
    sender = Notifier(settings, "first", tmp_path, environ=os.environ, failed=record)
    sender.notify(from_row(ENDED | {"deep": nested()}))
    assert sender.close(DEADLINE_S) == 0
    assert len(events) == 1


def test_without_hooks_nothing_is_started(tmp_path: Path) -> None:
    before = threading.active_count()
    sender, _ = notifier(tmp_path, command=None)
    sender.notify(from_row(ENDED))
    assert sender.close(DEADLINE_S) == 0
    assert threading.active_count() == before


def test_a_hook_that_hangs_delays_neither_the_other_nor_the_supervisor(tmp_path: Path, server: Server) -> None:
    server.hang.clear()
    failures: list[str] = []
    sender, file = notifier(tmp_path, failures, url=server.url, timeout_s=DEADLINE_S)
    sender.notify(from_row(ENDED))
    sender.notify(from_row(ENDED))
    wait_for(lambda: len(received(file)) == 2, "the command to get both")
    assert len(server.requests) <= 1
    sender.close(0.0)
    assert "url: 2 not delivered" in failures


# --- commands --------------------------------------------------------------------------------------------------


def test_a_command_gets_the_event_and_its_words(tmp_path: Path) -> None:
    shell = 'cat > got; printf "%s|%s|%s" "$ZSLURM_RUN" "$ZSLURM_EVENT" "$ZSLURM_WORDS" > named; echo $KEY > key'
    command(shell, HOME=str(tmp_path), KEY="value").deliver(SENT)
    assert json.loads((tmp_path / "got").read_text()) == SENT
    assert (tmp_path / "named").read_text() == f"first|run_ended|{SENTENCE}"
    assert (tmp_path / "key").read_text() == "value\n"


def test_the_words_of_a_log_line_are_never_run(tmp_path: Path) -> None:
    evil = message(
        from_row(fault(line="$(touch owned) `touch owned`; touch owned\ntouch owned")), {"run": "$(touch owned)"}
    )
    command('echo "$ZSLURM_RUN $ZSLURM_WORDS" > named', HOME=str(tmp_path)).deliver(evil)
    assert not (tmp_path / "owned").exists()
    assert "touch owned; touch" not in (tmp_path / "named").read_text()
    assert (tmp_path / "named").read_text().count("\n") == 1


def test_a_command_that_does_not_read_has_failed_nothing(tmp_path: Path) -> None:
    command("exec true").deliver(SENT | {"long": "x" * 10**6})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo working; echo 'no route' >&2; echo; exit 7", "exit code 7: no route"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("printf '\\377\\000\\033[2J bad'; exit 1", "exit code 1: \ufffd \x1b[2J bad"),
        ("echo TOKEN=supersecret1; exit 1", "exit code 1: TOKEN=[redacted]"),
        ("echo mine is $MY_TOKEN; exit 1", "exit code 1: mine is [redacted]"),
        ("no-such-program-at-all", "exit code 127: "),
    ],
)
def test_a_command_that_fails_says_why(text: str, reason: str) -> None:
    assert reason_of(command(text, MY_TOKEN="abcdefgh")).startswith(reason)


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    shell = "sleep 1000 & echo $! > child; exec sleep 1000"
    started = tmp_path / "child"
    with_limit_that_suffices(
        lambda limit_s: reason_of(command(shell, HOME=str(tmp_path), timeout_s=limit_s)),
        lambda reason: started.exists() and started.read_text() and reason.startswith("did not end within "),
    )
    pid = int(started.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "its end")


def test_what_a_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    command("sleep 1000 & echo $! > child", HOME=str(tmp_path)).deliver(SENT)
    psutil.Process(int((tmp_path / "child").read_text())).kill()


def test_closing_kills_a_command_that_hangs(tmp_path: Path) -> None:
    failures: list[str] = []
    sender, _ = notifier(tmp_path, failures, command=f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    sender.notify(from_row(ENDED))
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command"))
    assert sender.close(0.0) == 1
    wait_for(lambda: not psutil.pid_exists(pid), "its end")
    assert failures == ["command: one was not delivered"]


def test_without_a_home_the_command_runs_all_the_same(tmp_path: Path) -> None:
    command(f"pwd > {tmp_path}/here", HOME="/no/such/home").deliver(SENT)
    assert (tmp_path / "here").read_text() == "/\n"


# --- web hooks -------------------------------------------------------------------------------------------------


def web(url: str, timeout_s: float = DEADLINE_S, **environ: str) -> WebHook:
    return WebHook(url, timeout_s, environ)


def test_a_web_hook_gets_the_event(server: Server) -> None:
    web(f"{server.url}/hooks/x").deliver(SENT)
    ((path, headers, body),) = server.requests
    assert (path, headers["Content-Type"]) == ("/hooks/x", "application/json")
    assert json.loads(body) == SENT


def test_the_secret_part_of_an_address_comes_from_the_environment(server: Server) -> None:
    web(f"{server.url}/$HOOK_TOKEN/${{NAME}}/a$$b", HOOK_TOKEN="T0/B0", NAME="n").deliver(SENT)
    assert server.requests[0][0] == "/T0/B0/n/a$b"
    assert reason_of(web(f"{server.url}/$HOOK_TOKEN")) == "$HOOK_TOKEN is not set, which aegis.notify.url names"


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not(server: Server) -> None:
    server.answers = [503, 429, 200]
    web(server.url).deliver(SENT, pauses_s=(0.0, 0.0))
    assert len(server.requests) == 3
    server.answers = [404]
    assert reason_of(web(server.url)) == "127.0.0.1: HTTP 404 Not Found"
    server.answers = [500, 500, 500]
    reason = reason_of(web(server.url), pauses_s=(0.0, 0.0))
    assert reason == "127.0.0.1: HTTP 500 Internal Server Error"


def test_redirects_are_not_followed(server: Server) -> None:
    server.answers = [302]
    assert reason_of(web(server.url)) == "127.0.0.1: HTTP 302 Found"
    assert len(server.requests) == 1


def test_no_reason_holds_the_secret_of_an_address(server: Server) -> None:
    server.close()
    for url in (f"{server.url}/services/S3CRET", f"{server.url}/$SECRET"):
        reason = reason_of(web(url, SECRET="S3CRET x\r\n"), pauses_s=(0.0,))
        assert reason.startswith("127.0.0.1: ")
        assert "S3CRET" not in reason
    assert reason == "127.0.0.1: the address is not valid once its variables are filled in"


def test_what_is_no_web_server_is_described_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for answer, reason in (
            (b"220 mail ready\r\n\r\n", "127.0.0.1: what answers is no web server"),
            (b"", "127.0.0.1: Remote end closed connection without response"),
        ):
            thread = threading.Thread(target=_answer_once, args=(listening, answer))
            thread.start()
            assert reason_of(web(f"http://127.0.0.1:{listening.getsockname()[1]}/x"), pauses_s=()) == reason
            thread.join()


def _answer_once(listening: socket.socket, answer: bytes) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):  # a connection closed with unread data is reset
            pass


def test_a_server_that_never_answers_is_left(server: Server) -> None:
    server.hang.clear()
    assert reason_of(web(server.url, timeout_s=1.0), pauses_s=()) == "no answer within 1 s"


def test_no_second_request_is_started_while_the_first_hangs() -> None:
    """A server that dribbles: with each byte it begins the time again that urllib waits for an answer."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_dribble, args=(listening, done))
        thread.start()
        hook = web(f"http://127.0.0.1:{listening.getsockname()[1]}/x", timeout_s=2.0)
        assert reason_of(hook, pauses_s=()) == "no answer within 2 s"
        assert reason_of(hook, pauses_s=()) == "the request before still hangs"
        done.set()
        thread.join()
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def _dribble(listening: socket.socket, done: threading.Event) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not done.wait(0.02):
            connection.sendall(b"a")


@pytest.mark.parametrize(
    ("row", "sent"),
    [
        ({"event": "spare_checked", "node": "node4", "ok": False, "reason": "NIC ionic_2 is down"}, True),
        ({"event": "spare_checked", "node": "node4", "ok": True}, False),
        ({"event": "requeue_failed", "reason": "no scontrol"}, True),
        ({"event": "exclusion_failed", "nodes": "node4", "reason": "no"}, True),
        ({"event": "start_postponed", "reason": "/runs: No space left on device"}, True),
    ],
    ids=str,
)
def test_by_default_what_waits_for_a_person_is_sent(tmp_path: Path, row: dict[str, Any], sent: bool) -> None:
    """The default of aegis.notify.events."""
    target = tmp_path / "sent"
    notifier = Notifier(NotifySettings(command=f"cat >> {target}"), "first", environ=dict(os.environ))
    notifier.notify(from_row({"time": 1.0, "job_id": "7", **row}))
    notifier.close(DEADLINE_S)
    assert target.exists() is sent


def apprise_hook(*addresses: str, **environ: str) -> AppriseHook:
    return AppriseHook(addresses, DEADLINE_S, environ)


def test_services_of_apprise_get_one_line_for_people(server: Server) -> None:
    address = server.url.replace("http://", "json://") + "/$PLACE"
    apprise_hook(address, PLACE="runs").deliver(SENT)
    ((path, _, body),) = server.requests
    sent = json.loads(body)
    assert (path, sent["title"], sent["message"]) == ("/runs", "first", SENTENCE)


def test_what_apprise_cannot_send_is_named_without_its_address(server: Server) -> None:
    server.answers = [500] * 9
    address = server.url.replace("http://", "json://")
    with pytest.raises(NotDelivered) as failed:
        apprise_hook("nonsense://secret", "json://$MISSING", address).deliver(SENT)
    first, second, third = str(failed.value).split("; ")
    assert first == "aegis.notify.apprise[0] is no address that Apprise knows"
    assert second == "$MISSING is not set, which aegis.notify.apprise[1] names"
    assert third == "JSON did not take the event"


def test_a_service_that_hangs_is_given_up(server: Server) -> None:
    server.hang.clear()
    with pytest.raises(NotDelivered, match=r"no answer within 0\.2 s"):
        AppriseHook([server.url.replace("http://", "json://")], 0.2, {}).deliver(SENT)


def test_without_apprise_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(NotDelivered, match=r"pip install 'zslurm-train\[apprise\]'"):
        apprise_hook("json://localhost").deliver(SENT)
