"""Multi-token attention in models of other libraries; import the module of the one you use."""
