"""What a cell takes, by plans and its implementation's entry: time, memory, traffic, its place on the roofline."""
