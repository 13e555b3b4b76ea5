"""Reading what NVIDIA's tools print: recorded output of `cuobjdump -res-usage` and `ptxas -v`."""

import pytest

from mtabench.static.machine_code import (
    Spills,
    ToolError,
    Usage,
    parse_spills,
    parse_usage,
    symbol_of,
    tool,
)

# cuobjdump 12.8 of a cubin of Triton 3.6 for sm_90a, and of nvcc 13.0 for sm_80.
USAGE_SM_90 = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function _conv_attention_fwd_kernel:
  REG:255 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:1240 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
USAGE_SM_80 = """
Resource usage:
 Common:
  GLOBAL:0
 Function _ZN1a1b1tEPfi:
  REG:31 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:364 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1tILi64EEvPf:
  REG:10 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:360 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function k:
  REG:10 STACK:0 SHARED:400 LOCAL:0 CONSTANT[0]:360 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# ptxas 12.8 -v, then nvcc 13.0 -Xptxas=-v of two kernels.
PTXAS = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_conv_attention_fwd_kernel' for 'sm_90a'
ptxas info    : Function properties for _conv_attention_fwd_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 567.408 ms
"""
NVCC = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1tILi64EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z1tILi64EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    400 bytes stack frame, 352 bytes spill stores, 348 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 400 bytes smem, 360 bytes cmem[0]
"""


def test_resource_usage_without_what_the_system_keeps():
    assert parse_usage(USAGE_SM_90, 90) == {"_conv_attention_fwd_kernel": Usage(255, 8, 0)}
    assert parse_usage(USAGE_SM_80, 80)["k"] == Usage(10, 0, 400)


def test_resource_usage_that_cannot_be_read_is_an_error():
    with pytest.raises(ToolError, match="finds no kernel"):
        parse_usage("", 90)
    with pytest.raises(ToolError, match="says nothing of STACK"):
        parse_usage(" Function k:\n  REG:10 SHARED:0\n", 80)


def test_spills_of_every_kernel_that_was_assembled():
    assert parse_spills(PTXAS) == {"_conv_attention_fwd_kernel": Spills(4, 12)}
    assert parse_spills(NVCC) == {"_Z1tILi64EEvPf": Spills(0, 0), "k": Spills(352, 348)}
    with pytest.raises(ToolError, match="does not say what k spills"):
        parse_spills("ptxas info    : Compiling entry function 'k' for 'sm_80'\n")


def test_a_kernel_is_found_by_its_name_in_the_source():
    symbols = parse_usage(USAGE_SM_80, 80)
    assert symbol_of("k", symbols) == "k"
    assert symbol_of("t", ["_Z1tILi64EEvPf", "k"]) == "_Z1tILi64EEvPf"
    assert symbol_of("t", ["_ZN1a1b1tEPfi", "k"]) == "_ZN1a1b1tEPfi"
    with pytest.raises(ValueError, match="2 kernels 't'"):
        symbol_of("t", symbols)
    with pytest.raises(ValueError, match="no kernel 'at'"):
        symbol_of("at", symbols)


def test_a_missing_tool_says_what_to_do():
    pytest.importorskip("triton")
    with pytest.raises(ToolError, match=r"no-tool is missing .*pip install .* TRITON_NO_TOOL_PATH"):
        tool("no-tool")
