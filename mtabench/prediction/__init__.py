"""What a cell takes, by the model and its implementation's entry: time, memory, traffic, its place on the roofline."""
