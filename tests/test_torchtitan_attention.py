"""docs/examples/torchtitan_attention.py: packed documents, FSDP2 and tensor parallelism, in float64 on a CPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from rank_processes import RankProcesses
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan_attention import TENSOR_PARALLEL, Attention, InnerAttention

from mta_kernels.conv_attention import conv_attention_reference
from mta_ladder import attention_reference

BOUNDS = (0, 4, 5, 12)


@pytest.fixture(scope="module")
def processes():
    found = RankProcesses(2)
    yield found
    found.close()


def rotate(x: Tensor) -> Tensor:
    """A stand-in for the rotary embedding of `[batch, tokens, heads, head_dim]`."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def attention() -> Attention:
    """The same in every process, its convolution away from the identity."""
    torch.manual_seed(2)
    module = Attention(32, 4, 2).double()
    with torch.no_grad():
        module.inner_attention.weight += 0.3 * torch.randn(4, 6, 11)
    return module


def batch(rank: int) -> Tensor:
    return torch.randn(1, BOUNDS[-1], 32, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, rotate, torch.tensor(BOUNDS)).square().mean()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def test_documents_are_apart_and_the_layout_is_tokens_first():
    inner = InnerAttention(4, 3, 5).double()
    q, k, v = (torch.randn(BOUNDS[-1], heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)

    def documents(of_one, *more):
        parts = [[x[start:stop].transpose(0, 1)[None] for x in (q, k, v)] for start, stop in pairwise(BOUNDS)]
        return torch.cat([of_one(*part, *more)[0].transpose(0, 1) for part in parts])

    torch.testing.assert_close(inner(q, k, v, bounds, bounds, 7, 7), documents(attention_reference))
    with torch.no_grad():
        inner.weight += torch.randn(4, 3, 5)
    torch.testing.assert_close(inner(q, k, v, bounds), documents(conv_attention_reference, inner.weight))


def by_fsdp(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Parameters after a step of data parallelism, each rank with a batch of its own; and this rank's share of one."""
    module = attention()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    loss_of(module, batch(dist.get_rank())).backward()
    optimizer.step()
    share = module.inner_attention.weight.to_local().detach().clone()
    return {name: whole(x).detach() for name, x in module.named_parameters()} | {"share": share}


def test_fsdp2_shards_the_parameter_and_averages_its_gradient(processes):
    module = attention()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    torch.stack([loss_of(module, batch(rank)) for rank in range(2)]).mean().backward()
    optimizer.step()
    assert (module.inner_attention.weight - attention().inner_attention.weight).abs().max() > 1e-6
    for rank, found in enumerate(processes.call(2, by_fsdp)):
        assert not isinstance(found, Exception), found
        share = found.pop("share")
        torch.testing.assert_close(share, module.inner_attention.weight[2 * rank : 2 * rank + 2].detach())
        torch.testing.assert_close(found, {name: x.detach() for name, x in module.named_parameters()})


def initialised_late(group: dist.ProcessGroup) -> Tensor:
    """The weight of a module that is initialised once it is shared among ranks, as trainers do."""
    module = InnerAttention(4, 3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        module.weight.fill_(7)
    module.init_weights()
    return whole(module.weight).detach()


def test_a_parameter_that_is_shared_begins_as_the_identity(processes):
    for found in processes.call(2, initialised_late):
        assert not isinstance(found, Exception), found
        assert torch.equal(found, InnerAttention(4, 3, 5).weight.detach())


def by_heads(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Output and gradients of tensor parallelism, and how much of the weight this rank has."""
    module = parallelize_module(attention(), init_device_mesh("cpu", (2,)), TENSOR_PARALLEL)
    loss = loss_of(module, batch(0))
    loss.backward()
    share = torch.tensor(module.inner_attention.weight.to_local().shape)
    gradients = {name: whole(x.grad) for name, x in module.named_parameters()}
    return gradients | {"loss": loss.detach(), "share": share}


def test_tensor_parallelism_gives_each_rank_the_weights_of_its_heads(processes):
    module = attention()
    loss = loss_of(module, batch(0))
    loss.backward()
    expected = {name: x.grad for name, x in module.named_parameters()} | {"loss": loss.detach()}
    for found in processes.call(2, by_heads):
        assert not isinstance(found, Exception), found
        assert found.pop("share").tolist() == [2, 6, 11]
        torch.testing.assert_close(found, expected)
