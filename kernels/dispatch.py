"""Choose which implementation of an operation runs: the frame that every operation of this package is built in.

An operation is a folder. Its `__init__.py` holds one or more `Operation`s, each with a reference in plain torch,
which is the definition and runs everywhere, and a list of (condition, implementation). A call

1. checks its operands: what is wrong with them is the same ValueError, whichever implementation would run;
   operands of formats, shapes, strides and devices that were right before are not checked again, and what was
   chosen for them is remembered. Whether memory overlaps is asked in every call;
2. takes the implementation that `use` forces, or else the one that the measured table of this architecture has for
   these sizes, or else the first of the list whose condition holds and that takes the operands, or else the
   reference;
3. runs it. One that cannot be imported, built or compiled is left out from then on, with one warning that states
   why, and the next in line runs, the reference at last.

A condition is about the architecture and the sizes: whether the implementation is preferred there if nothing was
measured. What the implementation can take at all is in its `supports`, which holds for tables and settings too.

The choice depends on the operands, the architecture, the tables and on what can start. The ranks of a run make the
same one: they choose by the tables of rank 0 (`choose_by`), and what one of them cannot start is left out by all
(train/parallel/kernel_agreement.py).

Tables are in the file that $ZSLURM_KERNEL_TABLES names (cache.py), which `zslurm bench kernels` writes for the
GPUs of a cluster; one that cannot be used is left out with a warning. A CPU has no table: its choices are fixed,
so that runs repeat bit by bit.

A table is a list of rules per architecture, of which the first that fits holds:

    {"gfx942": [{"when": {"dtype": "bfloat16", "side": [0, 2047]}, "use": "reference"}, {"use": "triton"}]}

The keys of `when` are those of the operation's `sizes`; a list of two numbers is a range with both ends. The file
has such a table for each folder; if that has several operations, one for each of them, by the name behind the dot.
"""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch

from zslurm.kernels.arch import CPU, Arch, arch_of
from zslurm.kernels.cache import measured_tables

_log = logging.getLogger(__name__)

REFERENCE = "reference"

Sizes = Mapping[str, Any]
"""What a choice may depend on, by name: sizes as integers, and the format by torch's name."""


class UnavailableError(RuntimeError):
    """An implementation cannot run here: its library, build or compiler is missing or fails."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        name: as the settings have it: triton, hip, cpu, torch, or the name of a package.
        run: runs it, with the operation's arguments. It imports what it needs when it is first called, and raises
            ImportError or `UnavailableError` before it changes any operand.
        supports: gets the operation's arguments, which are right; returns None, or what of them it does not take,
            as a phrase: "operands on a CPU".
        lacks_here: returns what it needs and does not find on this machine, or None; `supports` returns it too.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]
    lacks_here: Callable[[], str | None] = lambda: None


Condition = Callable[[Arch, Sizes], bool]
"""Whether an implementation is preferred on an architecture, for these sizes."""


def anywhere(arch: Arch, sizes: Sizes) -> bool:
    """Prefer an implementation on every device that it takes operands of."""
    return True


def on_cpus(arch: Arch, sizes: Sizes) -> bool:
    """Prefer an implementation on CPUs."""
    return arch == CPU


def on_gpus(arch: Arch, sizes: Sizes) -> bool:
    """Prefer an implementation on all GPUs."""
    return arch != CPU


Candidates = Sequence[tuple[Condition, Implementation]]
"""Implementations with the conditions of their preference, the preferred one first."""


def everything(*_: Any, **__: Any) -> str | None:
    """Support any operands: what the reference does."""
    return None


def in_triton(folder: str, function: str, supports: Callable[..., str | None]) -> Implementation:
    """Return an implementation in Triton: a function of the folder's `triton`, imported when it first runs."""

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"zslurm.kernels.{folder}.triton"), function)(*args)

    return Implementation("triton", run, supports)


@dataclass
class Operation:
    """One operation, called as a function.

    Attributes:
        name: the folder, and behind a dot the operation in it if there are several: grouped_gemm.multiply.
        reference: the definition, in plain torch.
        candidates: the others, each with the condition of its preference, the preferred one first.
        check: gets the arguments and raises ValueError for those that are wrong for every implementation.
        device: gets the arguments and returns the torch device that they are on.
        sizes: gets the arguments and returns what the table's rules are about.
        check_memory: gets the arguments and raises ValueError if memory that is written overlaps another operand.
        deciding: how many of the first arguments the checks and the choice depend on; None: all.
    """

    name: str
    reference: Callable[..., Any]
    candidates: Candidates
    check: Callable[..., None]
    device: Callable[..., Any]
    sizes: Callable[..., Sizes]
    check_memory: Callable[..., None] = lambda *_, **__: None
    deciding: int | None = None
    _chosen: dict[Hashable, Implementation] = field(default_factory=dict, init=False, repr=False)
    _all: dict[str, Implementation] = field(init=False, repr=False)
    _unavailable: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _warned: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        reference = Implementation(REFERENCE, self.reference, everything)
        self._all = {REFERENCE: reference} | {candidate.name: candidate for _, candidate in self.candidates}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the operands, choose an implementation and run it.

        Raises:
            ValueError: the operands are wrong.
        """
        key = self._key(args, kwargs)
        if key not in self._chosen:
            self.check(*args, **kwargs)
        self.check_memory(*args, **kwargs)
        while True:
            chosen = self._chosen.get(key) or self.choose(*args, **kwargs)
            if key is not None:
                self._chosen[key] = chosen
            if chosen.name == REFERENCE:
                return chosen.run(*args, **kwargs)
            try:
                return chosen.run(*args, **kwargs)
            except Exception as error:
                if not failed_to_start(error):
                    raise
                cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                self.leave_out(chosen.name, f"cannot start here ({cause})")

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return what the checks and the choice depend on; None if they are to be made in every call."""
        parts: list[Any] = [_forced(self.name), _tables_read, torch.is_grad_enabled()]
        if _describe(args[: self.deciding], parts) and _describe(tuple(kwargs.values()), parts):
            return tuple(parts)
        return None

    def forget_choices(self) -> None:
        """Check and choose again, also for operands that were seen before."""
        self._chosen.clear()

    def all(self) -> list[Implementation]:
        """Return the reference and the other implementations."""
        return list(self._all.values())

    @property
    def implementations(self) -> list[Implementation]:
        """Return the implementations without the reference."""
        return self.all()[1:]

    def implementation(self, name: str) -> Implementation:
        """Return the reference or another implementation by its name; KeyError if there is none."""
        return self._all[name]

    def choose(self, *args: Any, **kwargs: Any) -> Implementation:
        """Return the implementation that runs for these operands, which are right."""
        reference = self._all[REFERENCE]
        forced = _forced(self.name)
        if forced is not None and forced in self._all:  # or it is of another operation of the folder
            return self._able(forced, args, kwargs, warn=True) or reference
        sizes = self.sizes(*args, **kwargs)
        arch = arch_of(self.device(*args, **kwargs))
        measured = self.measured(arch, sizes)
        if measured == REFERENCE:
            return reference
        for name in (*([measured] if measured else []), *self.preferred(arch, sizes)):
            able = self._able(name, args, kwargs)
            if able is not None:
                return able
        return reference

    def preferred(self, arch: Arch, sizes: Sizes) -> list[str]:
        """Return the names of the implementations whose conditions hold, the preferred one first."""
        return [candidate.name for condition, candidate in self.candidates if condition(arch, sizes)]

    def _able(self, name: str, args: Any, kwargs: Any, *, warn: bool = False) -> Implementation | None:
        """Return an implementation if it can start and takes these operands."""
        if name in self._unavailable or name not in self._all:
            return None
        lacks = self._all[name].supports(*args, **kwargs)
        if lacks is not None and warn:
            self._warn_once(f"{self.name}: {name} does not take {lacks}; the reference runs instead")
        return self._all[name] if lacks is None else None

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Return which implementations could not start in this process, and why."""
        return self._unavailable

    def missing(self) -> set[str]:
        """Return the implementations that cannot start here, as far as is known before all of them have run."""
        return {
            implementation.name for implementation in self.implementations if implementation.lacks_here()
        } | self._unavailable.keys()

    def table(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return the measured table: a list of rules for each architecture; empty if there is none."""
        if _tables_to_choose_by is not None:
            return _tables_to_choose_by.get(self.name, {})
        return _table_of(self.name, frozenset(self._all))

    def leave_out(self, name: str, why: str) -> None:
        """Run without an implementation from now on, with one warning.

        Args:
            name: of the implementation.
            why: it is left out, behind "which": "cannot start here (ImportError: ...)".
        """
        self.forget_choices()
        if name not in self._unavailable:
            self._unavailable[name] = why
            self._warn_once(f"{self.name} runs without {name}, which {why}")

    def put(self, implementation: Implementation) -> None:
        """Let an implementation take the place of the one of its name."""
        self._all[implementation.name] = implementation
        self.forget_choices()

    def try_again(self) -> None:
        """Try again what could not start, and warn of it again: after a build, or another installation."""
        self._unavailable.clear()
        self._warned.clear()
        self.forget_choices()

    def measured(self, arch: Arch, sizes: Sizes) -> str | None:
        """Return the implementation that the table has for these sizes; None if nothing was measured."""
        for rule in self.table().get(arch.name, ()):
            if all(_fits(sizes.get(key), bounds) for key, bounds in rule.get("when", {}).items()):
                return str(rule["use"])
        return None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message)


def _describe(values: tuple[Any, ...], parts: list[Any]) -> bool:
    """Append what a choice may depend on of some arguments; return whether that is all of it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_meta:  # which stands for another architecture at other times
                return False
            parts += (value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
        elif value is None or isinstance(value, int | float | str | torch.dtype):
            parts.append(value)
        elif isinstance(value, tuple) or hasattr(value, "operands"):
            parts.append(type(value))
            if not _describe(value if isinstance(value, tuple) else value.operands, parts):
                return False
        else:
            return False
    return True


Table = Mapping[str, list[dict[str, Any]]]
"""Of each architecture, the rules of one operation."""

_tables_to_choose_by: Mapping[str, Table] | None = None
_tables_read = 0
"""How often the tables to choose by were replaced in this process."""


def tables() -> dict[str, Table]:
    """Return the measured tables by operation, as this process reads them."""
    return {name: operation.table() for name, operation in operations().items()}


def choose_by(found: Mapping[str, Table]) -> None:
    """Choose by these tables from now on, and no longer by the files: those of another rank."""
    global _tables_to_choose_by, _tables_read
    _tables_to_choose_by = found
    _tables_read += 1


@cache
def _table_of(operation: str, implementations: frozenset[str]) -> dict[str, list[dict[str, Any]]]:
    folder, path = operation.partition(".")[0], measured_tables()
    if path is None:
        return {}
    try:
        measured = _rules_in(json.loads(path.read_text()).get(folder, {}), operation, implementations)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning(f"{path} has no table of {operation} that can be used ({error}): measure again or remove it")
        return {}
    return {arch: rules for arch, rules in measured.items() if arch != CPU.name}


def forget_tables() -> None:
    """Read the files again at the next choice: after new tables were measured in this process."""
    global _tables_to_choose_by, _tables_read
    _tables_to_choose_by = None
    _tables_read += 1
    _table_of.cache_clear()


def _rules_in(of_folder: Any, operation: str, implementations: frozenset[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of an operation by architecture, from what was measured of its folder.

    Raises:
        ValueError: it is no table, or names an implementation that the operation does not have.
    """
    suffix = operation.partition(".")[2]
    table: dict[str, list[dict[str, Any]]] = of_folder.get(suffix, {}) if suffix else of_folder
    for arch, rules in table.items():
        if not all(_is_rule(rule) for rule in rules):
            raise ValueError(f"{arch}: expected a list of rules, as kernels/dispatch.py describes them")
        unknown = {str(rule.get("use")) for rule in rules} - implementations
        if unknown:
            raise ValueError(f"{arch}: {operation} has no implementation {', '.join(sorted(unknown))}")
    return table


def _is_rule(rule: Any) -> bool:
    when = rule.get("when", {}) if isinstance(rule, dict) else None
    return isinstance(when, dict) and all(
        not isinstance(bounds, list) or (len(bounds) == 2 and all(isinstance(end, int) for end in bounds))
        for bounds in when.values()
    )


def _fits(size: int | str | None, wanted: Any) -> bool:
    if isinstance(wanted, list):
        lowest, highest = wanted
        return isinstance(size, int) and bool(lowest <= size <= highest)
    return size is not None and bool(size == wanted)


def failed_to_start(error: Exception) -> bool:
    """Return whether an implementation failed before it ran: while it was imported, built or compiled.

    Everything else is an error of the run itself, as memory that is used up, and is not hidden by another try.
    Triton raises plain RuntimeErrors too, as if it finds no C compiler: those that its own code raised count.
    """
    if isinstance(error, ImportError | OSError | SubprocessError | UnavailableError):
        return True
    return any(kind.__module__.split(".")[0] == "triton" for kind in type(error).__mro__) or _raised_by_triton(
        error
    )


def _raised_by_triton(error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    if inside.split(".")[0] != "triton":
        return False
    if not str(error).startswith("Triton Error ["):
        return True
    # The driver's own message. While a module is loaded it means that the code does not fit this GPU; at a launch
    # it reports a fault of this kernel or of one before it.
    loading = any(frame.f_code.co_name == "_init_handles" for frame in frames)
    return loading and "out of memory" not in str(error)


# --- Which operations there are, and what is forced ------------------------------------------------------------

forced_names: dict[str, str] = {}
"""What `use` has forced in this process: an operation, or the folder of several, to its implementation."""


def operations() -> dict[str, Operation]:
    """Return every operation by its name: those that the folders of this package list in OPERATIONS."""
    import zslurm.kernels as package

    by_name: dict[str, Operation] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            folder = importlib.import_module(f"zslurm.kernels.{module.name}")
            by_name |= {operation.name: operation for operation in getattr(folder, "OPERATIONS", ())}
    return by_name


def use(name: str, implementation: str) -> None:
    """Force an implementation in this process, or with "auto" let the tables choose again.

    The reference runs, with one warning, if the implementation does not take the operands or cannot start.

    Args:
        name: an operation, or the folder of several.
        implementation: the name of one, or "auto".

    Raises:
        ValueError: there is no such operation or implementation.
    """
    concerned = [
        candidate
        for candidate in operations().values()
        if name in (candidate.name, candidate.name.partition(".")[0])
    ]
    if not concerned:
        raise ValueError(f"no operation {name}: there are {', '.join(sorted(operations()))}")
    if implementation == "auto":
        forced_names.pop(name, None)
        return
    implementations = {candidate.name for operation in concerned for candidate in operation.all()}
    if implementation not in implementations:
        raise ValueError(
            f"{name} has no implementation {implementation}: there are auto, {', '.join(sorted(implementations))}"
        )
    forced_names[name] = implementation


@contextmanager
def using(name: str, implementation: str) -> Iterator[None]:
    """Force an implementation inside a `with` block, as `use` does."""
    before = dict(forced_names)
    use(name, implementation)
    try:
        yield
    finally:
        forced_names.clear()
        forced_names.update(before)


def _forced(name: str) -> str | None:
    if not forced_names:
        return None
    return forced_names.get(name) or forced_names.get(name.partition(".")[0])
