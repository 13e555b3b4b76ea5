"""Random cases of conv attention through its public functions, held to a float64 definition of their own."""
