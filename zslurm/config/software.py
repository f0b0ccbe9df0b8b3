"""Whether what was measured or tuned holds for a run: of the same card, and with the same ROCm and torch."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from zslurm.config.spec import ClusterSection


def differences(
    cluster: ClusterSection,
    device: str,
    *,
    rocm: str | None,
    torch: str | None,
    whose: str,
    rccl: str | None = None,
) -> list[str]:
    """Return in what a measurement differs from what the profile and the job's Python are known to be.

    Args:
        cluster: of the run.
        device: torch's name of the card that was measured.
        rocm: version that the measurement was made with; None if it is not known.
        torch: likewise.
        whose: what messages call the measurement's own, such as `the table's`.
        rccl: version that the measurement was made with; None if it is not known.
    """
    mismatches = hardware_differences(cluster, device, whose=whose)
    if rocm is not None and cluster.rocm_version is not None and not same_release(cluster.rocm_version, rocm):
        mismatches.append(f"cluster.rocm_version is {cluster.rocm_version}, {whose} ROCm {rocm}")
    if rccl is not None and cluster.rccl_version is not None and not same_release(cluster.rccl_version, rccl):
        mismatches.append(f"cluster.rccl_version is {cluster.rccl_version}, {whose} RCCL {rccl}")
    installed = torch_version(cluster)
    if installed is not None and torch is not None and not same_release(installed, torch):
        mismatches.append(f"the job's torch is {installed}, {whose} {torch}")
    return mismatches


def hardware_differences(cluster: ClusterSection, device: str, *, whose: str) -> list[str]:
    """Return in a line that the cards differ; none if they do not, or the profile does not know its own."""
    card = cluster.gpu_family or cluster.gpu_type
    return [] if is_card(card, device) else [f"the GPUs are {card}, {whose} {device}"]


def is_card(card: str | None, device: str) -> bool:
    """Return whether a profile's name of a card (mi300x) is in torch's name of it (AMD Instinct MI300X).

    A profile that does not name its card may have any.
    """
    if card is None:
        return True
    words = [word for word in re.split(r"[\W_]+", card.upper()) if any(c.isdigit() for c in word)]
    return not words or any(word in device.upper() for word in words)


def same_release(one: str, other: str) -> bool:
    """Return whether two versions agree in all the numbers that both have: 7.1 and 7.1.1.0-12969-1544e39 do."""
    numbers = [re.findall(r"\d+", re.split(r"[-+]", version)[0]) for version in (one, other)]
    return all(a == b for a, b in zip(*numbers, strict=False))


def torch_version(cluster: ClusterSection) -> str | None:
    """Return the version of the job's torch; None if only the node knows: in a container."""
    if cluster.container is not None:
        return None
    if cluster.venv is None:
        try:
            return metadata.version("torch")
        except metadata.PackageNotFoundError:
            return None
    installed = sorted(Path(cluster.venv).glob("lib/python3*/site-packages/torch-*.dist-info"))
    return installed[0].name.removeprefix("torch-").removesuffix(".dist-info") if len(installed) == 1 else None
