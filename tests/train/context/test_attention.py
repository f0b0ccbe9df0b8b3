"""Parts of attention, how they are joined, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.train.models import random_like
from tests.train.ranks import in_group
from zslurm.train.context.attention import SequenceLabels, attend_in_context
from zslurm.train.context.blocks import BlockAttention, BlockedProducts, Labels, merge
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.flash import TorchFlash
from zslurm.train.context.halos import exchange_halos, put_before

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
WAYS = [BlockedProducts, TorchFlash]


def drawn(length: int, seed: str) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [
        random_like(torch.empty(2, number, length, HEAD_DIM), f"{seed}{place}")
        for place, number in enumerate(heads)
    ]


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [40, 150])  # one block of queries, and three
def test_parts_join_to_the_whole_and_its_gradient(way: type[BlockAttention], length: int) -> None:
    q, k, v, grad = drawn(length, "parts")
    for x in (q, k, v):
        x.requires_grad_()
    whole = by_torch(q, k, v)
    expected = torch.autograd.grad(whole, (q, k, v), grad)

    blocks, half = way(), length // 2
    late = (slice(None), slice(None), slice(half, None))
    early = (slice(None), slice(None), slice(None, half))
    with torch.no_grad():
        out, lse = blocks.forward(q, k, v, True, None)
        torch.testing.assert_close(out, whole)
        # The late queries' own keys, then the early keys.
        part, part_lse = blocks.forward(q[late], k[late], v[late], True, None)
        merge(part, part_lse, *blocks.forward(q[late], k[early], v[early], False, None))
        torch.testing.assert_close(part, whole[late])
        torch.testing.assert_close(part_lse, lse[late])
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, columns, causal in ((early, early, True), (late, late, True), (late, early, False)):
            arguments = grad[rows], q[rows], k[columns], v[columns], whole[rows], lse[rows]
            shares = blocks.backward(*arguments, causal, None)
            for total, share, where in zip(found, shares, (rows, columns, columns), strict=True):
                total[where] += share
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_query_that_sees_no_key_of_a_part_is_left_as_it_is() -> None:
    q, k, v, grad = drawn(6, "none")
    labels = Labels(torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long))
    blocks = BlockedProducts()
    out, lse = blocks.forward(q, k, v, False, labels)
    assert not out.any()
    assert (lse == -torch.inf).all()
    own, own_lse = blocks.forward(q, k, v, True, None)
    joined, joined_lse = own.clone(), own_lse.clone()
    merge(joined, joined_lse, out, lse)
    assert torch.equal(joined, own)
    assert torch.equal(joined_lse, own_lse)
    assert not any(share.any() for share in blocks.backward(grad, q, k, v, own, own_lse, False, labels))


def test_in_a_causal_part_every_query_sees_itself() -> None:
    """Also padding, which is no key of others: its softmax would have nothing to share out."""
    q, k, v, _ = drawn(5, "self")
    queries = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    keys = queries.clone()
    keys[0, 3] = -1
    out, _ = BlockedProducts().forward(q, k, v, True, Labels(queries, keys))
    mask = queries.unsqueeze(2) == keys.unsqueeze(1)
    mask = (mask | torch.eye(5, dtype=torch.bool)) & torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(out, by_torch(q, k, v, mask.unsqueeze(1)))


def together(group: dist.ProcessGroup, attention: Any, length: int, flash: bool) -> list[Any]:
    """This rank's part of attention and of its gradients."""
    context = ContextParallel(group, attention)
    q, k, v, grad = (context.take(x, dim=2) for x in drawn(length, "together"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = attend_in_context(context, q, k, v, blocks=TorchFlash() if flash else None)
    y.backward(grad.transpose(1, 2).flatten(2))
    context_rows = context.positions(length)
    return [
        context_rows.numpy(),
        y.detach().numpy(),
        *(x.grad.transpose(1, 2).numpy() for x in leaves if x.grad is not None),
    ]


@pytest.mark.parametrize(
    ("ranks", "attention", "flash"), [(2, "ring", True), (3, "all_gather", True), (3, "ring", False)]
)
def test_shared_attention_is_the_whole(ranks: int, attention: str, flash: bool) -> None:
    length = 12 * ranks - 1
    q, k, v, grad = drawn(length, "together")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = by_torch(q, k, v)
    gradients = torch.autograd.grad(whole, leaves, grad)
    expected = [x.detach().transpose(1, 2) for x in (whole, *gradients)]
    for positions, *found in in_group(together, ranks, attention, length, flash):
        real = positions < length
        for one, other in zip(found, expected, strict=True):
            part = other[:, positions[real]].reshape(2, real.sum(), -1).numpy()
            assert abs(one[:, real].reshape(part.shape) - part).max() < 1e-12


def checked(group: dist.ProcessGroup) -> list[bool]:
    """Numerical gradients over two ranks: of the sum of both ranks' outputs, by this rank's inputs in turn."""
    results = []
    for attention in ("ring", "all_gather"):
        context = ContextParallel(group, attention)  # type: ignore[arg-type]
        rank, length = context.rank, 8
        q, k, v, grad = (context.take(x, dim=2).clone() for x in drawn(length, "check"))
        labels = SequenceLabels(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 2, 4, dtype=torch.long))
        labels.queries_BS[:, 2:] = labels.keys_cBS[0, :, 3] = 1

        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_in_context(context, q, k, v, labels)  # noqa: B023

        def before(z: Tensor, delayed: Tensor) -> Tensor:
            halo, last = exchange_halos(context, z, delayed, 2)  # noqa: B023
            return torch.cat([put_before(halo, z).flatten(), last.flatten()])

        z, delayed = q.flatten(0, 1), k.flatten(0, 1)[..., :3]
        weights = grad.transpose(1, 2).flatten(2)
        results.append(_same(group, rank, attended, [q, k, v], weights))
        results.append(_same(group, rank, before, [z, delayed], None))
    return results


def _same(
    group: dist.ProcessGroup, rank: int, function: Any, inputs: list[Tensor], weights: Tensor | None
) -> bool:
    """Compare derivatives by finite differences of the sum over all ranks with autograd's."""

    def summed(*values: Tensor) -> Tensor:
        y = function(*values)
        w = random_like(y, f"w{rank}") if weights is None else weights
        return (y * w).sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    summed(*leaves).backward()
    generator, step, same = torch.Generator().manual_seed(3), 1e-5, True
    for owner in range(dist.get_world_size(group)):
        for place in range(len(inputs)):
            for _ in range(6):
                element = int(torch.randint(inputs[place].numel(), (), generator=generator))
                ends = []
                for sign in (1, -1):
                    moved = [x.clone() for x in inputs]
                    if rank == owner:
                        moved[place].view(-1)[element] += sign * step
                    with torch.no_grad():
                        total = summed(*moved)
                    dist.all_reduce(total, group=group)
                    ends.append(total)
                slope = (ends[0] - ends[1]) / (2 * step)
                gradient = leaves[place].grad
                assert gradient is not None
                if rank == owner:
                    same &= bool(torch.isclose(slope, gradient.reshape(-1)[element], rtol=1e-6, atol=1e-8))
    return same


def test_gradients_are_those_of_finite_differences() -> None:
    assert in_group(checked, 2) == [[True] * 4] * 2


def test_a_convolution_wider_than_a_chunk_is_refused() -> None:
    (message,) = in_group(refusal, 1)
    assert message == "halos: a chunk of 2 tokens is shorter than the 3 that convolutions look back"


def refusal(group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError) as error:
        exchange_halos(ContextParallel(group), torch.zeros(1, 4, 2), torch.zeros(1, 4, 1), 3)
    return str(error.value)


def test_the_flash_kernel_of_gpus_is_called_with_what_it_takes() -> None:
    """On tensors without values: torch checks the arguments, and knows the shapes of what comes back."""
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in drawn(32, "meta"))
    blocks = TorchFlash()
    for keys, causal in ((32, True), (16, False)):
        k_part, v_part = k[:, :, :keys], v[:, :, :keys]
        out, lse = blocks.forward(q, k_part, v_part, causal, None)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        grads = blocks.backward(grad, q, k_part, v_part, out, lse, causal, None)
        assert [x.shape for x in grads] == [q.shape, k_part.shape, v_part.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parts_on_a_gpu_are_those_of_matrix_products() -> None:
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in drawn(512, "gpu"))
    ways, late = (TorchFlash(), BlockedProducts()), slice(256, None)
    for rows, columns, causal in ((slice(None), slice(None), True), (late, slice(0, 256), False)):
        arguments = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        outs = [way.forward(*arguments, causal, None) for way in ways]
        for one, other in zip(*outs, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.02)
        gradients = [
            way.backward(grad[:, :, rows], *arguments, outs[1][0].to(q.dtype), outs[1][1], causal, None)
            for way in ways
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)
