"""Decode steps of the whole multi-token attention: one new query a sequence, from the caches of keys and values.

A convolution of probabilities reads the probabilities of earlier rows. `DecodeState` keeps the logits of these rows, so
a step computes one row alone, whatever the convolutions. It takes about `2 * query taps` bytes a key and query head,
besides the `4 * head_dim` bytes of keys and values in 16 bits.
"""
