"""The whole multi-token attention in Triton: chunks of query rows whose scores are stored once, in stages."""
