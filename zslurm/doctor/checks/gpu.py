"""Checks of the GPUs: there, answering, idle, and without errors of their memory."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cluster.rccl.rules import vendor_of
from zslurm.cluster.xgmi import group_cost
from zslurm.doctor.check import CheckOutcome, Status, check, failed, first_few, passed, unavailable, warned, worst
from zslurm.hardware import ras
from zslurm.hardware.command import CommandHung
from zslurm.hardware.gpu_health import USED_BYTES, GpuHealth
from zslurm.hardware.job_processes import process
from zslurm.hardware.node_sources import Sources
from zslurm.slurm.environment import own_job_id

_MOST_CORRECTED = 10_000
_TOOLS = ("amd-smi", "nvidia-smi")
_EXCLUDE = "exclude the node and have the GPU reset; if it comes back, have it replaced"


@check("gpu", "all GPUs are there, by sysfs and by their tool", "node", inconsistent=Status.WARN)
def gpu_count(sources: Sources) -> CheckOutcome | None:
    """Compare the GPUs that the kernel and their tool show with the profile's number."""
    if not sources.has_gpus:
        return None
    expected, present = sources.cluster.gpus_per_node, len(sources.facts.gpus)
    models = Counter(gpu.model or gpu.pci_id or "unknown model" for gpu in sources.facts.gpus)
    must_match = {"GPUs": ", ".join(f"{count} x {model}" for model, count in sorted(models.items())) or None}
    tool, reported = sources.gpus.source, len(sources.gpus.health)
    if not present and not reported:
        if not (sources.path("/sys/bus/pci/devices").is_dir() or sources.path("/sys/class/kfd").is_dir()):
            reason = "neither sysfs nor a tool shows any GPU"
            return unavailable(reason, "look whether /sys is mounted", must_match=must_match)
        reason = f"no GPU is there, {expected} expected"
        remedy = "look whether the driver is loaded (lsmod | grep amdgpu) and for errors in the kernel log"
    elif present < expected:
        reason = f"{present} of {counted(expected, 'GPU is', 'GPUs are')} there"
        remedy = "one has fallen off the bus: exclude the node and have it reset"
    elif tool in _TOOLS and reported < present:
        reason = f"{tool} shows {reported} of {counted(present, 'GPU')}"
        remedy = "the driver has lost one: exclude the node and have it reset"
    else:
        return passed(counted(present, "GPU"), must_match=must_match)
    return failed(reason, remedy, must_match=must_match)


@check("gpu", "the GPU driver answers in time", "node")
def gpu_driver(sources: Sources) -> CheckOutcome | None:
    """Ask with a time limit: a driver that is wedging answers late or never, minutes before GPUs stop."""
    if not sources.has_gpus:
        return None
    gpus = sources.gpus
    if gpus.hung:
        return failed(f"{gpus.hung}: the driver is wedged", "exclude the node; it needs a reboot")
    if gpus.source not in _TOOLS:
        return unavailable(gpus.why, "install amd-smi or nvidia-smi, or load its module in cluster.setup")
    return passed(f"{gpus.source} answers")


@check("gpu", "uncorrectable, deferred and correctable memory errors of GPUs", "node")
def gpu_ecc(sources: Sources) -> CheckOutcome | None:
    """Read the error counters of every GPU.

    Uncorrectable: any is too many (SaFE). Correctable: more than 10,000 (SaFE). Deferred errors are damaged data
    that has not been read yet; the page is retired when it is.
    """
    if not sources.has_gpus:
        return None
    health = sources.gpus.health
    readable = [gpu for gpu in health if gpu.uncorrectable is not None]
    problems = [outcome for gpu in readable for outcome in _memory_errors(gpu, _MOST_CORRECTED)]
    unknown = [gpu.index for gpu in health if gpu.uncorrectable is None]
    if not readable or (unknown and not problems):
        who = (
            f"GPUs {', '.join(map(str, unknown))} show none" if unknown else sources.gpus.why or "no GPU shows any"
        )
        return unavailable(f"ECC counters: {who}", "run amd-smi metric --ecc on the node to see why")
    corrected = sum(gpu.correctable or 0 for gpu in readable)
    return worst(problems, f"no uncorrectable error on {counted(len(readable), 'GPU')} ({corrected} correctable)")


def _memory_errors(gpu: GpuHealth, limit: float) -> list[CheckOutcome]:
    outcomes = []
    if gpu.uncorrectable:
        where = f" ({', '.join(sorted(gpu.blocks))})" if gpu.blocks else ""
        reason = f"GPU {gpu.index}: {counted(gpu.uncorrectable, 'uncorrectable error')}{where}"
        outcomes.append(failed(reason, _EXCLUDE))
    if gpu.correctable and gpu.correctable > limit:
        reason = f"GPU {gpu.index}: {counted(gpu.correctable, 'correctable error')}, over {limit:g}"
        outcomes.append(failed(reason, _EXCLUDE))
    if gpu.deferred:
        reason = f"GPU {gpu.index}: {counted(gpu.deferred, 'deferred error')}"
        outcomes.append(warned(reason, "have the GPU reset when the node is free"))
    return outcomes


@check("gpu", "nothing is left running on the GPUs or in their memory", "node")
def gpu_idle(sources: Sources) -> CheckOutcome | None:
    """Find processes that hold GPU memory, and memory that no process seems to hold; this job's are fine."""
    if not sources.has_gpus:
        return None
    holders = _holders(sources)
    used = {gpu.index: gpu.vram_used for gpu in sources.gpus.health if gpu.vram_used is not None}
    if holders is None and not used:
        return unavailable(f"no GPU shows what runs on it: {sources.gpus.why}", "run amd-smi process on the node")
    foreign = {pid: name for pid, name in (holders or {}).items() if not _is_ours(sources, pid)}
    if foreign:
        named = first_few([f"{pid} {name or ''}".rstrip() for pid, name in sorted(foreign.items())])
        remedy = "end them (`zslurm doctor --only orphaned-processes` names your old jobs'), or exclude the node"
        return failed(f"{counted(len(foreign), 'process holds', 'processes hold')} GPU memory: {named}", remedy)
    full = {index: held for index, held in used.items() if held >= USED_BYTES}
    if full and not holders:
        listed = ", ".join(f"GPU {index}: {show_bytes(held)}" for index, held in full.items())
        remedy = "a process died badly, or one in a container cannot be seen: exclude the node until it is reset"
        return failed(f"memory is in use and no process holds it: {listed}", remedy)
    gpus, most = counted(len(used), "GPU") if used else "the GPUs", max(used.values(), default=0)
    return passed(f"nothing runs on {gpus}; at most {show_bytes(most)} in use")


def _holders(sources: Sources) -> dict[int, str | None] | None:
    """Return the processes that hold memory of a GPU, by pid; None if that is not known."""
    by_tool = [gpu.processes for gpu in sources.gpus.health if gpu.processes is not None]
    kfd = ras.kfd_processes(sources.root)
    if not by_tool and kfd is None:
        return None
    names: dict[int, str | None] = {}
    for held in [held for listed in by_tool for held in listed if held.vram != 0] + (kfd or []):
        names[held.pid] = names.get(held.pid) or held.name
    return names


def _is_ours(sources: Sources, pid: int) -> bool:
    job = own_job_id(sources.environ)
    record = process(sources.root, pid)
    return job is not None and record is not None and record.job == job


@check("gpu", "bad pages of GPU memory: retired, pending, not reservable", "node")
def gpu_pages(sources: Sources) -> CheckOutcome | None:
    """Count the bad pages of every GPU, by kind.

    A retired page is out of the way. One that is pending will be retired by a reset, and one that could not be
    reserved is still in use, damaged as it is. Rows that NVIDIA GPUs remap are counted in the same way.
    """
    if not sources.has_gpus:
        return None
    readable = [(gpu.index, gpu.bad_pages) for gpu in sources.gpus.health if gpu.bad_pages is not None]
    if not readable or len(readable) < len(sources.gpus.health):
        why = f": {sources.gpus.why}" if sources.gpus.why else ""
        return unavailable(
            f"{len(readable)} of {counted(len(sources.facts.gpus), 'GPU')} show their bad pages{why}",
            "run amd-smi bad-pages on the node; some sites let only root see them",
        )
    problems = []
    for index, pages in readable:
        if waiting := {name: pages[name] for name in ("pending", "unreservable") if pages.get(name)}:
            listed = ", ".join(f"{count} {name}" for name, count in waiting.items())
            problems.append(failed(f"GPU {index}: bad pages: {listed}", "exclude the node until the GPU is reset"))
        elif pages.get("retired"):
            reason = f"GPU {index}: {counted(pages['retired'], 'retired page')}"
            problems.append(warned(reason, "have the GPU replaced if the number grows"))
    return worst(problems, f"no bad pages on {counted(len(readable), 'GPU')}")


@check("gpu", "ranks per node use all xGMI links, or none", "login")
def xgmi(sources: Sources) -> CheckOutcome | None:
    """Look at the ranks per node of the profile: one for each GPU, unless slurm.ranks_per_node differs."""
    if vendor_of(sources.cluster) != "amd":
        return None
    ranks = sources.task.ranks_per_node or sources.cluster.gpus_per_node
    if cost := group_cost(sources.cluster, ranks):
        remedy = "set cluster.gpus_per_node to all GPUs of the node, and slurm.ranks_per_node to 8 or 1"
        return warned(cost, remedy)
    return passed(f"{counted(ranks, 'rank')} on each node")


_PRODUCT = """
import json, time, torch
seconds = []
for number in range(torch.cuda.device_count()):
    a = torch.ones(1024, 1024, dtype=torch.bfloat16, device=f"cuda:{number}")
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize(number)
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize(number)
        best = min(best, time.perf_counter() - began)
    seconds.append(best)
print(json.dumps(seconds))
"""
_SLOW_PRODUCT_S, _LEAST_S, _TIMES = 0.1, 1e-3, 3.0
PYTHON = sys.executable
"""The Python that has torch."""


@check("gpu", "one small bf16 product on each GPU", "node")
def small_product(sources: Sources) -> CheckOutcome | None:
    """Time a product of 1024 x 1024 matrices, which takes much less than a millisecond.

    On a MI300A with ROCm 7.1 any product of some sizes took 600 ms (ROCm/rocm-systems#4084).
    """
    if not sources.has_gpus:
        return None
    try:
        done = sources.run(PYTHON, "-c", _PRODUCT, timeout_s=sources.limits.check_s)
    except CommandHung as error:
        hint = "see `zslurm doctor --only torch-import`: if torch is imported in time, exclude the node"
        return unavailable(f"a product of small matrices, with the import of torch: {error}", hint)
    if done is None or done.code != 0:
        message = (done and done.message) or "no message"
        return unavailable(f"torch cannot multiply here: {message}", "see `zslurm doctor --only torch-import`")
    seconds: list[float] = json.loads(done.out.splitlines()[-1])
    if not seconds:
        return unavailable("torch sees no GPU", "see `zslurm doctor --only torch-import`")
    usual = statistics.median(seconds)
    slow = {gpu: took for gpu, took in enumerate(seconds) if took > max(_LEAST_S, _TIMES * usual)}
    if usual > _SLOW_PRODUCT_S:
        remedy = "torch's BLAS is wrong for these GPUs: take another ROCm, or TORCH_BLAS_PREFER_HIPBLASLT=0"
        return failed(f"a product of small matrices takes {1e3 * usual:.0f} ms", remedy)
    if slow:
        listed = ", ".join(f"GPU {gpu} {1e3 * took:.2g} ms" for gpu, took in slow.items())
        return failed(f"{listed} for a small product, the others {1e3 * usual:.2g} ms", "exclude the node")
    return passed(f"{1e3 * max(seconds):.2g} ms at most")
