"""Random cases of conv attention and of the whole multi-token attention, held to float64 definitions of their own."""
