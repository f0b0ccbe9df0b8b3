"""The formula of what context parallelism sends, on the published model."""

from __future__ import annotations

import pytest

from zslurm.train.config import ModelConfig
from zslurm.train.context.bytes import choose_attention, context_bytes
from zslurm.train.context.layout import check_chunks, chunk_tokens, chunks_of
from zslurm.train.errors import ConfigError

ZAYA = ModelConfig(vocab_size=262272, hidden_size=2048, layers=40, query_heads=8, kv_heads=2, head_dim=128)
MIB = 2**20


def test_keys_and_values_are_compressed_eight_times() -> None:
    of_two = context_bytes(ZAYA, 32_768, 1, 2, "all_gather", 2)
    assert of_two.attention_forward == 16 * MIB  # half of 32,768 tokens, 512 channels of 2 bytes
    assert of_two.attention_backward == 48 * MIB  # again, and the gradients in fp32
    assert of_two.halos_forward == of_two.halos_backward == (2 * 1280 + 128) * 2
    assert of_two.compression == 8
    assert of_two.forward == of_two.attention_forward + of_two.halos_forward
    full = ZAYA.model_copy(update={"kv_heads": 16, "query_heads": 16})
    assert context_bytes(full, 32_768, 1, 2, "ring", 2).attention_forward == 8 * 16 * MIB


def test_ring_and_all_gather_send_the_same_bytes_in_other_steps() -> None:
    ring, gathered = (context_bytes(ZAYA, 131_072, 1, 8, how, 2) for how in ("ring", "all_gather"))
    assert (ring.forward, ring.backward) == (gathered.forward, gathered.backward)
    assert (ring.attention_steps, gathered.attention_steps) == (7, 1)


def test_one_rank_sends_nothing() -> None:
    alone = context_bytes(ZAYA, 4096, 4, 1, "ring", 2)
    assert alone.forward == alone.backward == 0


@pytest.mark.parametrize(("context", "ranks"), [(12, 3), (13, 3), (7, 2), (5, 2)])
def test_chunks_cover_the_sequence_and_pair_early_with_late(context: int, ranks: int) -> None:
    held = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    assert held == list(range(2 * ranks))
    assert len({sum(chunks_of(rank, ranks)) for rank in range(ranks)}) == 1
    assert 0 <= 2 * ranks * chunk_tokens(context, ranks) - context < 2 * ranks


def test_auto_is_all_gather_until_the_gathered_sequences_are_large() -> None:
    assert choose_attention(ZAYA, 32_768, 1, 2, 2) == "all_gather"
    assert choose_attention(ZAYA, 131_072, 1, 8, 2) == "all_gather"
    assert choose_attention(ZAYA, 1_048_576, 1, 8, 2) == "ring"
    assert choose_attention(ZAYA, 1_048_576, 1, 1, 2) == "all_gather"


def test_sequences_that_cannot_be_cut_are_refused() -> None:
    check_chunks(ZAYA, 5, 2)
    check_chunks(ZAYA, 1, 1)
    with pytest.raises(ConfigError, match="context_parallel: 4 cuts a sequence into 8 chunks, but it has 7"):
        check_chunks(ZAYA, 7, 4)
    wide = ZAYA.model_copy(update={"conv_widths": (3, 4)})
    check_chunks(wide, 20, 2)
    with pytest.raises(ConfigError, match=r"chunks of 4, but model\.conv_widths look back 5 tokens"):
        check_chunks(wide, 16, 2)
    check_chunks(wide, 4, 1)
