"""Published models: transformers' `zaya` format both ways, Zyphra's first release in. Nothing here needs torch.

with open_weights(Path("runs/first/checkpoints/step-00000400")) as weights:
    export(weights, Path("first-hf"), tokenizer=weights.tokenizer())
with open_weights(Path("first-hf")) as weights:
    import_weights(weights, Path("checkpoints"), tokenizer=weights.tokenizer())

layouts.py          which of their tensors is which range of which of ours
settings.py         config.json <-> ModelConfig, RoPE base, context, special tokens
folder.py           reading safetensors files by range
weights.py          weights from anywhere, one interface
run_facts.py        what a checkpoint's run knows of it
tokenizer_files.py  the tokenizer that goes with weights
export.py, import_.py
"""

from __future__ import annotations

from zslurm.train.hub.export import Exported, export
from zslurm.train.hub.import_ import Imported, import_weights
from zslurm.train.hub.layouts import BALANCING_BIAS, Layout, TensorPiece, pieces
from zslurm.train.hub.run_facts import tokenizer_of, weights_only
from zslurm.train.hub.settings import Settings, TokenIds, from_config_json, inexact, to_config_json
from zslurm.train.hub.tokenizer_files import TokenizerFiles
from zslurm.train.hub.weights import (
    CheckpointWeights,
    FolderWeights,
    Overrides,
    Weights,
    balancing_bias,
    open_weights,
)
