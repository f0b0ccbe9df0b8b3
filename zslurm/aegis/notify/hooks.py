"""Notify people of what happened to a run: a command of theirs, a web hook, or a service of Apprise gets events.

The supervisor calls `notify(event)`, which returns at once; each hook has its own queue, so that a web server
which hangs delays no mail. One accident can make a thousand ranks complain: of faults only roots and advisories
are sent, and each kind once in an attempt. Nothing is kept: what a supervisor that is killed had not sent yet is
not sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import string
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Union
from urllib.parse import urlsplit

from zslurm import __version__
from zslurm.aegis.notify.queue import DeliveryQueue
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.config.aegis import NotifySettings
from zslurm.core.redact import is_secret_name, redact, redact_mapping
from zslurm.run.events import FaultDetected, NotifyFailed, SpareChecked, describe
from zslurm.run.events.event import Event
from zslurm.run.state.state_events import without_replay_fields

_MOST_WAITING = 100
_LONGEST_TEXT = 2000
_LONGEST_LIST = 2000
_LONGEST_REASON = 200
_PAUSES_S = (2.0, 8.0)
"""Between the tries of a web hook that did not answer, or was too busy."""
_BUSY = frozenset({429, 500, 502, 503, 504})

Message = dict[str, Any]


class NotDelivered(Exception):
    """A hook failed; the message is the reason in one line, without its address."""


class Notifier:
    """Sends events through the hooks of `aegis.notify`."""

    def __init__(
        self,
        settings: NotifySettings,
        run_name: str,
        run_dir: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Start nothing before there is something to send.

        Args:
            settings: which events are sent, and where.
            run_name: the run's name.
            run_dir: its directory.
            environ: environment of the command, and values of `$NAME` in the address; default: this process's.
            failed: called with one line why an event was not sent: from another thread, if a hook failed (again
                only after it worked); from `notify`, if no message can be made of the event.
        """
        environ = dict(os.environ if environ is None else environ)
        self._about = {"run": run_name} | ({"run_dir": str(run_dir)} if run_dir is not None else {})
        self._kinds = frozenset(settings.events)
        self._failed = failed
        self._sent: set[tuple[object, ...]] = set()
        self._queues: list[DeliveryQueue[Message]] = []
        for hook in hooks(settings, environ):
            queue = DeliveryQueue(hook.name, hook.deliver, failed, limit=_MOST_WAITING, give_up=hook.give_up)
            self._queues.append(queue)

    def notify(self, event: Event) -> None:
        """Send an event, if it is of a kind to send. Never waits, never raises."""
        if not (self._queues and event.tag in self._kinds and self._is_news(event)):
            return
        try:
            sent = message(event, self._about)
        except Exception as error:  # whatever is in an event, it must not end the supervisor
            if not isinstance(event, NotifyFailed):  # the one that this report becomes
                self._failed(f"event {event.tag}: no message can be made of it: {reason_of(error)}")
            return
        for queue in self._queues:
            queue.take(sent)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything was sent, within a limit: before a requeue ends this process."""
        deadline = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.flush(deadline - time.monotonic())

    def close(self, timeout_s: float) -> int:
        """Send what waits, within a limit; return how many messages were not sent."""
        deadline = time.monotonic() + timeout_s
        return sum(queue.close(deadline - time.monotonic()) for queue in self._queues)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, SpareChecked):
            return not event.ok
        if not isinstance(event, FaultDetected):
            return True
        if event.role not in ("root", "advisory"):
            return False
        key = (event.attempt, event.kind, event.role, bool(event.cleared))
        if key in self._sent:
            return False
        self._sent.add(key)
        return True


def message(event: Event, about: Mapping[str, Any]) -> Message:
    """Return what a hook gets: the event, its run, and one line for people as `words`.

    With `text`, as chats call it.
    """
    short = _shortened(
        {**about, **without_replay_fields(event.row)}
    )  # first: to look for secrets in a text of megabytes takes minutes
    words = redact(describe(short)[:_LONGEST_TEXT])
    body = redact_mapping(short)
    return body | {"words": words, "text": f"{about.get('run', 'zslurm')}: {words}"}


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value[:_LONGEST_LIST]]
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return value[:_LONGEST_TEXT] + "..."
    return value


Hook = Union["CommandHook", "WebHook", "AppriseHook"]


def hooks(settings: NotifySettings, environ: Mapping[str, str]) -> list[Hook]:
    """Return the hooks that the settings name."""
    named: list[Hook] = []
    if settings.command is not None:
        named.append(CommandHook(settings.command, settings.timeout_s, environ))
    if settings.url is not None:
        named.append(WebHook(settings.url, settings.timeout_s, environ))
    if settings.apprise:
        named.append(AppriseHook(settings.apprise, settings.timeout_s, environ))
    return named


class CommandHook:
    """A shell command that reads the event from its standard input.

    It runs in the user's home directory, in a separate session, with the job's environment and ZSLURM_RUN,
    ZSLURM_EVENT and ZSLURM_WORDS (one line), so that no JSON has to be read to send a mail.
    """

    name = "command"

    def __init__(self, command: str, timeout_s: float, environ: Mapping[str, str]) -> None:
        self._command, self._timeout_s, self._environ = command, timeout_s, environ
        self._secrets = [value for name, value in environ.items() if is_secret_name(name)]
        self._process: subprocess.Popen[bytes] | None = None

    def deliver(self, message: Message) -> None:
        """Run the command to its end.

        Raises:
            NotDelivered: it failed, or took too long.
            OSError: it cannot be started.
        """
        named = {"RUN": message.get("run", ""), "EVENT": message.get("event", ""), "WORDS": message["words"]}
        environ = {**self._environ, **{f"ZSLURM_{name}": _one_line(str(value)) for name, value in named.items()}}
        with _scratch() as output:
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environ,
                cwd=_home(environ),
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(message).encode() + b"\n", timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                self.give_up()
                process.wait()
                raise NotDelivered(f"did not end within {self._timeout_s:g} s") from None
            finally:
                self._process = None
            if process.returncode != 0:
                raise NotDelivered(self._why(process.returncode, output))

    def give_up(self) -> None:
        """Kill the command that runs now, and what it started."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _why(self, code: int, output: IO[bytes] | int) -> str:
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if isinstance(output, int):
            return how
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - _LONGEST_TEXT))
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {_one_line(redact(lines[-1], self._secrets))[:_LONGEST_REASON]}" if lines else how


@contextlib.contextmanager
def _scratch() -> Iterator[IO[bytes] | int]:
    """Open a file for what a command prints; if there is no space for one, nothing of it is kept."""
    with contextlib.ExitStack() as stack:
        output: IO[bytes] | int = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            output = stack.enter_context(tempfile.TemporaryFile())
        yield output


def _home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    return home if home and Path(home).is_dir() else "/"


class WebHook:
    """An address to which the event is posted. `$NAME` in it comes from the environment: hooks have secret paths.

    Redirects are not followed: a POST that becomes a GET would look as if it had been delivered.
    """

    name = "url"

    def __init__(self, url: str, timeout_s: float, environ: Mapping[str, str]) -> None:
        self._url, self._timeout_s, self._environ = url, timeout_s, environ
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    def deliver(self, message: Message, pauses_s: tuple[float, ...] = _PAUSES_S) -> None:
        """Post the event; again after a pause if the server does not answer or is busy.

        Raises:
            NotDelivered: it was not taken.
        """
        request = self._request(message)
        for pause_s in (*pauses_s, None):
            reason, temporary = self._post(request)
            if not reason:
                return
            if pause_s is None or not temporary or self._given_up.wait(pause_s):
                raise NotDelivered(reason)

    def give_up(self) -> None:
        """Try no more."""
        self._given_up.set()

    def _request(self, message: Message) -> urllib.request.Request:
        try:
            url = string.Template(self._url).substitute(self._environ)
        except KeyError as error:
            raise NotDelivered(f"${error.args[0]} is not set, which aegis.notify.url names") from None
        headers = {"Content-Type": "application/json", "User-Agent": f"zslurm/{__version__}"}
        return urllib.request.Request(url, json.dumps(message).encode(), headers, method="POST")

    def _post(self, request: urllib.request.Request) -> tuple[str, bool]:
        """Return why it failed, and whether another try may help; no reason if it went well.

        In a thread: urllib's timeout bounds neither the look-up of a name nor a server that dribbles.
        """
        if self._thread is not None and self._thread.is_alive():
            return "the request before still hangs", True
        outcome: list[tuple[str, bool]] = []
        self._thread = threading.Thread(
            target=lambda: outcome.append(self._try(request)), name="zslurm-post", daemon=True
        )
        self._thread.start()
        self._thread.join(self._timeout_s)
        return outcome[0] if outcome else self._too_late()

    def _too_late(self) -> tuple[str, bool]:
        return f"no answer within {self._timeout_s:g} s", True

    def _try(self, request: urllib.request.Request) -> tuple[str, bool]:
        host = urlsplit(self._url).hostname or "?"
        try:
            with self._opener.open(request, timeout=self._timeout_s):
                return "", False
        except urllib.error.HTTPError as error:
            with error:
                return (
                    f"{host}: HTTP {error.code} {_one_line(str(error.reason))[:60]}".rstrip(),
                    error.code in _BUSY,
                )
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                return self._too_late()
            return f"{host}: {_one_line(str(error.reason))[:_LONGEST_REASON]}", True
        except TimeoutError:
            return self._too_late()
        except OSError as error:
            return f"{host}: {reason_of(error)[:_LONGEST_REASON]}", True
        except (http.client.InvalidURL, ValueError):  # its text holds the address
            return f"{host}: the address is not valid once its variables are filled in", False
        except http.client.HTTPException:
            return f"{host}: what answers is no web server", False


class AppriseHook:
    """The services of Apprise's addresses, each of which gets one line for people."""

    name = "apprise"

    def __init__(self, addresses: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> None:
        self._addresses, self._timeout_s, self._environ = addresses, timeout_s, environ

    def deliver(self, message: Message) -> None:
        """Send the line of an event to every address.

        Raises:
            NotDelivered: Apprise is not installed, knows an address not, or some service did not take the event.
        """
        failures: list[str] = []
        thread = threading.Thread(
            target=lambda: failures.extend(self._failures(message)), name="zslurm-apprise", daemon=True
        )
        thread.start()
        thread.join(self._timeout_s)  # Apprise's timeouts are those of each service
        if thread.is_alive():
            raise NotDelivered(f"no answer within {self._timeout_s:g} s")
        if failures:
            raise NotDelivered("; ".join(failures))

    def give_up(self) -> None:
        """Do nothing: the thread ends with the process."""

    def _failures(self, message: Message) -> Iterator[str]:
        try:
            import apprise
        except ImportError:
            yield "the apprise package is not installed; pip install 'zslurm-train[apprise]'"
            return
        for number, address in enumerate(self._addresses):
            try:
                service = apprise.Apprise.instantiate(string.Template(address).substitute(self._environ))
            except KeyError as error:
                yield f"${error.args[0]} is not set, which aegis.notify.apprise[{number}] names"
                continue
            if service is None:
                yield f"aegis.notify.apprise[{number}] is no address that Apprise knows"
            elif not service.notify(body=message["words"], title=str(message.get("run", "zslurm"))):
                yield f"{service.service_name or urlsplit(address).scheme} did not take the event"


def _one_line(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())
