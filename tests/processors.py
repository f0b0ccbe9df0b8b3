"""Other processors than this one, forced by the settings of torch's libraries.

A library takes no newer instructions than its setting allows, and than the processor has: on an older machine than
the one that is forced, the setting changes nothing.
"""

from __future__ import annotations

OTHER_PROCESSORS = {
    # Intel's Cascade Lake and Skylake: AVX-512 without bf16 units.
    "avx512 without bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    # Intel's Haswell and all later desktop processors, AMD's before Zen 4.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    # The oldest that these libraries tell apart.
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
"""Environment variables by the name of a kind of processors."""
