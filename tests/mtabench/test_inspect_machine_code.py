"""Reading what NVIDIA's tools print: recorded output of `cuobjdump -res-usage`, `ptxas -v` and `nvdisasm -c`."""

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
from mtabench.static.sass import instruction_mix

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
# Lines of nvdisasm 12.8 -c, of kernels of this package for sm_90a, sm_100a and sm_120a.
SASS = """
	.section	.nv.info._combine_splits_kernel,"",@"SHT_CUDA_INFO"
//--------------------- .text._combine_splits_kernel --------------------------
	.section	.text._combine_splits_kernel,"ax",@progbits
        .global         _combine_splits_kernel
_combine_splits_kernel:
.text._combine_splits_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*01b0*/              @!P4 LDG.E R2, desc[UR14][R4.64] ;
        /*01c0*/              @!P5 LDG.E.128 R10, desc[UR14][R4.64+0x200] ;
        /*01d0*/                   LDG.E.LTC128B.64.CONSTANT R6, desc[UR14][R4.64] ;
        /*01e0*/                   LDG.E.U16 R6, desc[UR14][R4.64] ;
        /*01f0*/              @UP0 UTMALDG.3D [UR8], [UR10], desc[UR12] ;
        /*0200*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0210*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR14][R4.64] ;
        /*0220*/                   LDS.U.128 R4, [R9] ;
        /*0230*/                   LDSM.16.MT88.4 R4, [R9] ;
        /*0240*/                   STL.64 [R1], R4 ;
        /*0250*/                   LDL.LU.64 R4, [R1] ;
        /*0260*/                   STS.128 [R9], R4 ;
        /*0270*/                   STG.E.128 desc[UR14][R4.64], R8 ;
.L_x_7:
        /*0280*/                   BRA `(.L_x_7);
        /*0290*/                   NOP;
	.section	.text._another_kernel,"ax",@progbits
        /*0000*/                   UTCHMMA gdesc[UR8], gdesc[UR4], tmem[UR6], tmem[UR10], idesc[UR11], UP0 ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   FMNMX R4, R5, R6, !PT ;
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


def test_instruction_mix():
    mix = instruction_mix(SASS, "_combine_splits_kernel")
    assert mix.instructions == 15  # NOP is padding
    assert (mix.tensor_core, mix.tensor_core_opcodes) == (1, "HGMMA")
    loads = mix.global_load_16, mix.global_load_32, mix.global_load_64, mix.global_load_128, mix.global_load_8
    assert loads == (1, 1, 1, 1, 0)
    assert (mix.async_copies, mix.bulk_copies, mix.matrix_loads) == (1, 1, 1)
    assert (mix.shared_load_128, mix.shared_load_32) == (1, 0)
    assert (mix.global_stores, mix.shared_stores) == (1, 1)
    assert (mix.local_loads, mix.local_stores) == (1, 1)


def test_instructions_of_other_kernels_in_the_file_do_not_count():
    mix = instruction_mix(SASS, "_another_kernel")
    assert (mix.instructions, mix.tensor_core, mix.tensor_core_opcodes) == (4, 3, "HMMA UTCHMMA")
    with pytest.raises(ValueError, match="no instruction of _third_kernel"):
        instruction_mix(SASS, "_third_kernel")


def test_a_missing_tool_says_what_to_do():
    pytest.importorskip("triton")
    with pytest.raises(ToolError, match=r"no-tool is missing .*pip install .* TRITON_NO_TOOL_PATH"):
        tool("no-tool")
