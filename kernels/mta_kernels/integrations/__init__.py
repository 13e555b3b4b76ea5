"""Multi-token attention in models of other libraries, each of which is imported when it is asked for."""
