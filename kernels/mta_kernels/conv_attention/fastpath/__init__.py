"""Replays: calls that differ from an earlier one in addresses and values alone go straight to its launches."""
