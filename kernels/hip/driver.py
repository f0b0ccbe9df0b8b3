"""Load code objects on devices and launch their kernels.

On a GPU through the driver's own functions, HIP's or CUDA's, on torch's current stream. On the CPU a code object
is a shared library, whose function NAME_blocks runs blocks of a kernel one after the other. Arguments are given in
the same way to both: one address each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from zslurm.kernels.arch import CPU, arch_of
from zslurm.kernels.hip import rtc
from zslurm.kernels.hip.build import build, code_of
from zslurm.kernels.hip.compilers import BuildError

LANES = 256
"""Threads of a block on a GPU; portability.h has the same."""


class LaunchError(RuntimeError):
    """The driver refused a launch, or reports what an earlier one did."""


@dataclass(frozen=True)
class Driver:
    """The functions of a GPU's driver.

    Attributes:
        load: makes a module of a code object.
        function: finds a kernel in a module.
        launch: starts one.
        describe: returns the text of a status.
    """

    load: Callable[..., int]
    function: Callable[..., int]
    launch: Callable[..., int]
    describe: Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Module:
    """The kernels of one source on one GPU."""

    driver: Driver
    handle: c_void_p
    device: torch.device

    @cache  # noqa: B019  # modules are few and stay
    def _function(self, name: str) -> c_void_p:
        function = c_void_p()
        status = self.driver.function(byref(function), self.handle, name.encode())
        if status:
            raise LaunchError(f"the code object has no kernel {name} ({self.driver.describe(status)})")
        return function

    def launch(self, name: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Start a kernel on torch's current stream; ctypes values as its arguments.

        Raises:
            LaunchError: the driver refuses.
        """
        function = self._function(name)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            status = self.driver.launch(
                function, blocks, 1, 1, LANES, 1, 1, 0, stream, _addresses(arguments), None
            )
        if status:
            raise LaunchError(f"{name} did not start: {self.driver.describe(status)}")


@dataclass(frozen=True)
class HostLibrary:
    """The kernels of one source as host code."""

    handle: Any

    def launch(self, name: str, blocks: int, arguments: Sequence[Any], first: int = 0) -> None:
        """Run blocks of a kernel, one after the other, from `first` on."""
        run = getattr(self.handle, f"{name}_blocks")
        run.argtypes, run.restype = [c_void_p, c_uint, c_uint], None
        run(_addresses(arguments), first, blocks)


@cache
def kernels(source: str, device: torch.device) -> Module | HostLibrary:
    """Return the kernels of kernels/hip/SOURCE.hip for a device with its index; built and loaded once.

    Raises:
        BuildError: they cannot be built or loaded.
    """
    file = build(source, arch_of(device).name)
    if arch_of(device) == CPU:
        try:
            return HostLibrary(ctypes.CDLL(str(file)))
        except OSError as error:
            raise BuildError(f"{file} cannot be loaded: {error}") from error
    code, driver, handle = code_of(file), driver_here(), c_void_p()
    assert code is not None
    with torch.cuda.device(device):
        status = driver.load(byref(handle), code)
    if status:
        raise BuildError(f"the driver does not load {file}: {driver.describe(status)}")
    return Module(driver, handle, device)


def _addresses(arguments: Sequence[Any]) -> Any:
    return (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))


@cache
def driver_here() -> Driver:
    """Return the functions of the driver that torch was built for."""
    return hip_driver() if torch.version.hip else cuda_driver()


def hip_driver() -> Driver:
    """Return HIP's functions, of the library that torch has loaded: streams of another are unknown to it."""
    library = open_library(*rtc.loaded("libamdhip64.so"), "libamdhip64.so")
    library.hipGetErrorString.restype = c_char_p
    return _typed(
        library.hipModuleLoadData,
        library.hipModuleGetFunction,
        library.hipModuleLaunchKernel,
        lambda status: library.hipGetErrorString(status).decode(),
    )


def cuda_driver() -> Driver:
    """Return CUDA's functions."""
    library = open_library("libcuda.so.1")

    def describe(status: int) -> str:
        text = c_char_p()
        library.cuGetErrorString(status, byref(text))
        return text.value.decode() if text.value else f"status {status}"

    return _typed(library.cuModuleLoadData, library.cuModuleGetFunction, library.cuLaunchKernel, describe)


def open_library(*names: str) -> Any:
    """Open a library of the GPU's driver: the first of these names.

    Raises:
        BuildError: it cannot be loaded.
    """
    try:
        return ctypes.CDLL(names[0])
    except OSError as error:
        raise BuildError(f"the GPU's driver cannot be loaded: {error}") from error


def _typed(load: Any, function: Any, launch: Any, describe: Callable[[int], str]) -> Driver:
    load.argtypes = [POINTER(c_void_p), c_char_p]
    function.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    launch.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return Driver(load, function, launch, describe)
