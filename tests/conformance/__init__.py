"""What every kernel of conv attention must hold, by public functions alone: see `test_corners`."""
