"""One cell measured: timers, clocks, the ceilings of a device, a process of its own."""
