"""Settings of torch's memory allocator for GPUs: the one place that sets them. No torch here.

torch reads the first of these variables that is set, once, when the allocator is first used:
PYTORCH_CUDA_ALLOC_CONF, on ROCm PYTORCH_HIP_ALLOC_CONF, then PYTORCH_ALLOC_CONF (c10/cuda/CUDAAllocatorConfig.h).
If you set one of them, nothing is added to it.

Without any of them the allocator uses expandable segments: it grows a segment by mapping memory behind it.
Otherwise it would allocate another one, and phases of another context or micro-batch would fragment memory.
On ROCm this exists in newer builds, from ROCm 7.0 (pytorch#177974, #179930); an older one prints one warning and
works as without the setting.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DEFAULT = "expandable_segments:True"


def set_allocator(environ: MutableMapping[str, str]) -> None:
    """Set the allocator's options if the user set none; to be called before torch is imported."""
    if not any(name in environ for name in VARIABLES):
        environ["PYTORCH_ALLOC_CONF"] = DEFAULT
