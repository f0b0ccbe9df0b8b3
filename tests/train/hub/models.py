"""Small models of random weights, as a transformers object, as folders, and as a checkpoint of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.train.models import scrambled, tiny_config
from zslurm.checkpoint_tools import BufferEntry, Entry, assemble, begin, commit, partition, write_shard
from zslurm.checkpoint_tools import Tensor as Row
from zslurm.checkpoint_tools.format.shard_header import encode
from zslurm.train.config import ModelConfig
from zslurm.train.hub import Layout, Settings, TokenIds, TokenizerFiles, pieces
from zslurm.train.hub.folder import to_bf16
from zslurm.train.hub.run_facts import to_state
from zslurm.train.model.zaya import Zaya
from zslurm.train.shapes import tensor_table

ROPE_BASE = 5000.0
CONTEXT = 64


def zero_skipping(**changes: Any) -> ModelConfig:
    """A tiny model that transformers can express exactly, of widths that its grouped GEMM takes."""
    return tiny_config(**({"skip_rule": "zero", "hidden_size": 16, "expert_hidden_size": 12} | changes))


def random_weights(config: ModelConfig, seed: int = 5) -> dict[str, NDArray[np.float32]]:
    """fp32 weights that use every class and have no scale at one, by our names, with the balancing bias."""
    model = scrambled(config, torch.float32, seed)
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def model_of(config: ModelConfig, weights: dict[str, NDArray[np.float32]], dtype: torch.dtype) -> Zaya:
    """Our model with these weights."""
    model = Zaya(config, dtype)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


@torch.no_grad()
def our_logits(model: Zaya, tokens_BS: Tensor) -> Tensor:
    logits: Tensor = model(tokens_BS, rope_base=ROPE_BASE)[0]
    return logits


class MemoryWeights:
    """Weights in memory, with the interface of those in files."""

    origin = "memory"

    def __init__(self, config: ModelConfig, values: dict[str, NDArray[np.float32]], **settings: Any) -> None:
        self.path = Path("memory")
        self.values = values
        facts: dict[str, Any] = {"rope_base": ROPE_BASE, "context": CONTEXT, "tokens": TokenIds(0, 2, (1,))}
        self.settings = Settings(config, **facts | settings)

    def read(self, tensor: str, start: int, out: NDArray[np.float32]) -> None:
        out.reshape(-1)[...] = self.values[tensor].reshape(-1)[start : start + out.size]

    def tokenizer(self) -> TokenizerFiles | None:
        return None

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...


def save_checkpoint(
    root: Path, config: ModelConfig, values: dict[str, NDArray[np.float32]], *, ranks: int = 3, **facts: Any
) -> Path:
    """A weights-only checkpoint of ours, written by this test and not by the code under test."""
    table = tensor_table(config)
    plan = partition(table, ranks)
    directory = begin(root, 0, "test")
    reports = []
    for rank in range(ranks):
        entries = [
            Entry(e.tensor, "master", e.start, e.stop, values[e.tensor].reshape(-1)[e.start : e.stop])
            for e in plan.extents(rank)
        ]
        buffers = [BufferEntry("balance/bias", values["balancing_bias"])] if rank == 0 else []
        reports.append(write_shard(directory, rank, ranks, entries, buffers))
    settings = Settings(config, **({"rope_base": ROPE_BASE, "context": CONTEXT} | facts))
    manifest = assemble(
        reports, step=0, tokens=0, model=config.model_dump(mode="json"), cursor={},
        state=to_state(settings, "test", None),
        tensors=[Row(row.name, row.shape, {"master": "F32"}) for row in table], buffers=["balance/bias"],
    )  # fmt: skip
    return commit(root, directory, manifest)


def save_first_release(
    path: Path, config: ModelConfig, values: dict[str, NDArray[np.float32]], **changes: Any
) -> dict[str, NDArray[Any]]:
    """A folder as ZAYA1-base was published: bf16, alternating stages, one file; returns its tensors."""
    tensors: dict[str, NDArray[Any]] = {}
    for piece in pieces(config, Layout.FIRST_RELEASE):
        part = values[piece.tensor].reshape(-1)[piece.start : piece.start + piece.numel].reshape(piece.shape)
        tensors[piece.name] = part if piece.tensor == "balancing_bias" else to_bf16(part.copy())
    write_safetensors(path / "model.safetensors", tensors)
    settings = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "cca": True,
        "cca_num_q_heads": [config.query_heads, 0] * config.layers,
        "num_query_groups_list": [config.kv_heads, 0] * config.layers,
        "ffn_hidden_size_list": [0, 2 * config.expert_hidden_size] * config.layers,
        "zaya_layers": ["a", config.experts] * config.layers,
        "zaya_mlp_expansion": [0, config.router_hidden_size] * config.layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 2 * config.layers,
        "num_attention_heads": 2 * config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_eps,
        "partial_rotary_factor": config.rotary_share,
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": CONTEXT,
        "moe_router_topk": 1,
        "zaya_use_mod": True,
        "zaya_use_eda": True,
        "scale_residual_merge": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    } | changes
    (path / "config.json").write_text(json.dumps(settings))
    return tensors


def write_safetensors(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """A safetensors file; uint16 arrays are bf16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header = encode(
        [(n, "BF16" if a.dtype == np.uint16 else "F32", a.shape) for n, a in ordered], {"format": "pt"}
    )
    path.write_bytes(header + b"".join(np.ascontiguousarray(a).tobytes() for _, a in ordered))


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a folder by the safetensors library; bf16 as uint16."""
    from safetensors import safe_open

    found: dict[str, NDArray[Any]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                value = tensors.get_tensor(name)
                raw = value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else None
                found[name] = value.numpy() if raw is None else raw
    return found
