"""Functions of a person's file, right ones and such as cheat, for tests that load them by --impl."""

import os
import signal
import sys
import threading
import time

import torch

from mta_kernels.conv_attention import conv_attention_decode_reference

kept = {}


def probabilities(q, k, causal, scale):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1)


def attention(q, k, v, *, causal, scale):
    return probabilities(q, k, causal, scale) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def cached_by_version(q, k, v, *, causal, scale):
    key = tuple((x.data_ptr(), x._version) for x in (q, k, v))
    return kept.setdefault(key, attention(q, k, v, causal=causal, scale=scale)).clone()


class Lazy(torch.Tensor):
    """What could compute when somebody looks at it."""


def lazy(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale).as_subclass(Lazy)


def changes_inputs(q, k, v, *, causal, scale):
    out = attention(q, k, v, causal=causal, scale=scale)
    with torch.no_grad():
        k.mul_(2)
    return out


def changes_inputs_and_raises(q, k, v, *, causal, scale):
    q.neg_()
    raise RuntimeError("no more")


def resizes_inputs(q, k, v, *, causal, scale):
    out = attention(q, k, v, causal=causal, scale=scale)
    q.data = q.data[:, :, :1]
    return out


def freezes_inputs(q, k, v, *, causal, scale):
    return attention(q.requires_grad_(False), k, v, causal=causal, scale=scale)


def exits(q, k, v, *, causal, scale):
    sys.exit(0)


def late(q, k, v, *, causal, scale):
    right = attention(q, k, v, causal=causal, scale=scale)
    out = torch.empty_like(right)

    def write():
        time.sleep(0.02)
        out.copy_(right)

    threading.Thread(target=write).start()
    return out


def raises(q, k, v, *, causal, scale):
    rows = q.shape[2]
    return q.reshape(rows, 3, 7)  # the line that a row names


def of_head_dim_64(q, k, v, *, causal, scale):
    if q.shape[-1] != 64 or q.shape[1] > k.shape[1] or not causal:
        raise NotImplementedError(f"causal heads of 64 alone, not {q.shape[-1]}")
    return attention(q, k, v, causal=causal, scale=scale)


def returns_a_tuple(q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale), None


def without_gradient(q, k, v, *, causal, scale):
    return attention(q.detach(), k.detach(), v.detach(), causal=causal, scale=scale)


def detached(q, k, v, *, causal, scale):
    return attention(q, k.detach(), v.detach(), causal=causal, scale=scale)


def crashes(q, k, v, *, causal, scale):
    os.kill(os.getpid(), signal.SIGSEGV)


def other_stream(waits_before, waits_after):
    """Attention on a stream of its own, which waits for the current one, and that one for it, or not."""
    streams = []

    def function(q, k, v, *, causal, scale):
        streams.extend([] if streams else [torch.cuda.Stream()])
        (side,), current = streams, torch.cuda.current_stream()
        if waits_before:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            out = attention(q, k, v, causal=causal, scale=scale)
        if waits_after:
            current.wait_stream(side)
        return out

    return function


joined = other_stream(True, True)
not_before = other_stream(False, True)
not_after = other_stream(True, False)
not_at_all = other_stream(False, False)


class WithBackward:
    """A forward that keeps its probabilities, and its gradients."""

    work = "dense"

    def __call__(self, q, k, v, *, causal, scale):
        p = probabilities(q, k, causal, scale)
        return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), p

    def backward(self, dout, q, k, v, out, p, *, causal, scale):
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        ds = p * (dout @ values.mT - (dout * out).sum(-1, keepdim=True)) * scale
        dk, dv = ds.mT @ q, p.mT @ dout
        return ds @ keys, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))

    def decode(self, q, k, v, *, scale):
        return self(q, k, v, causal=False, scale=scale)[0]

    def unsupported(self, head_dim, dtype):
        return f"{dtype} is not for it" if dtype == torch.float16 else None


with_backward = WithBackward()


class TwoGradients(WithBackward):
    def backward(self, *arguments, **options):
        return super().backward(*arguments, **options)[:2]


class NoGradient(WithBackward):
    def backward(self, *arguments, **options):
        return *super().backward(*arguments, **options)[:2], None


two_gradients, no_gradient = TwoGradients(), NoGradient()


class AsksForMuch(WithBackward):
    def unsupported(self, colour):
        return colour


asks_for_much = AsksForMuch()


class Paged:
    """Conv attention's decode alone, by the definition, from contiguous caches and from pages."""

    def decode(self, q, k, v, weight, *, scale, lengths, block_table):
        table = None if block_table is None else self.order(block_table)
        return conv_attention_decode_reference(q, k, v, weight, scale=scale, lengths=lengths, block_table=table)

    def order(self, table):
        return table


class PagesInOrder(Paged):
    def order(self, table):
        return torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)


paged, pages_in_order = Paged(), PagesInOrder()


class OtherWork(WithBackward):
    work = "much"


other_work = OtherWork()
number = 3


def other_parameters(a, b):
    return a


def weight_first(weight, q, k, v, *, causal, scale):
    return attention(q, k, v, causal=causal, scale=scale)
