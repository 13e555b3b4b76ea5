"""What a compiled kernel takes of a GPU that is not there: registers, spills, shared memory, occupancy.

`plans` say what is compiled, and `shapes` for which arguments; `compiling` compiles it with `absent_gpu`,
`machine_code` reads what came out, `occupancy` says what an SM of `limits` holds of it. `runs` does so for many targets
in processes of their own, `records` keeps it, `baseline` compares, `tables` shows it.
"""
