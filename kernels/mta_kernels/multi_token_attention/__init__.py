"""The whole multi-token attention: convolutions and mixings of heads before and after the softmax."""
