"""zslurm.train.hub: light to import, exact in its number formats, and sparing with memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from zslurm.train.hub.folder import to_bf16, to_fp32

_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from tests.train.hub.fake import ManyWeights
from zslurm.train.config import ModelConfig
from zslurm.train.hub import export, import_weights, open_weights

work, what = Path(sys.argv[1]), sys.argv[2]
config = ModelConfig(vocab_size=8192, hidden_size=512, layers=4, query_heads=4, kv_heads=2, head_dim=64, experts=8,
    expert_hidden_size=512, router_hidden_size=32, skip_rule="zero")
if what == "make":
    export(ManyWeights(config), work / "hf", dtype="fp32", max_shard_bytes=1 << 40)
    raise SystemExit
with open_weights(work / "hf") as weights:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if what == "import":
        import_weights(weights, work / "checkpoints", max_shard_bytes=16 << 20)
    else:
        export(weights, work / "again", dtype="bf16", max_shard_bytes=1 << 40)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(after - before, (work / "hf" / "model.safetensors").stat().st_size)
"""


def _grown(work: Path, what: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(work), what], capture_output=True, text=True, check=True
    )
    grown, size = map(int, done.stdout.split() or (0, 0))
    return grown * 1024, size


def test_a_conversion_takes_the_memory_of_one_shard_not_of_the_model(tmp_path: Path) -> None:
    _grown(tmp_path, "make")
    imported, size = _grown(tmp_path, "import")
    exported, _ = _grown(tmp_path, "export")
    assert size > 110 << 20
    assert imported < (16 + 40) << 20, "one shard of 16 MiB, buffers of 8 MiB, and slack"
    assert exported < 60 << 20, "buffers; the one file of 60 MiB and more is streamed"


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, zslurm.train.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=200, deadline=None)
@given(bits=arrays(np.uint32, 64))
def test_rounding_to_bf16_is_torchs(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    found = to_bf16(values)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(found[numbers], expected[numbers])
    back = np.empty_like(values)
    to_fp32(found, "BF16", back)
    assert np.isnan(back[~numbers]).all()


def test_every_bf16_and_every_fp16_is_read_as_it_is() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    widened = np.empty(bits.size, np.float32)
    to_fp32(bits, "BF16", widened)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widened, expected)
    to_fp32(bits.view(np.float16), "F16", widened)
    np.testing.assert_array_equal(widened, bits.view(np.float16).astype(np.float32))
