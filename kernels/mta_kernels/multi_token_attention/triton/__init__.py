"""The whole multi-token attention in Triton: stages over chunks of query rows, whose scores are stored once."""
