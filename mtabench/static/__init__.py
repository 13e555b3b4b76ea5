"""What a compiled kernel takes of a GPU that is not there: registers, spills, shared memory, occupancy.

`plans` say what is compiled, and `shapes` for which arguments; `compiling` compiles it for many targets in processes of
their own, `machine_code` reads what came out, and `limits` says what an SM holds of it. `records` keeps it, and
`baseline` compares.
"""
