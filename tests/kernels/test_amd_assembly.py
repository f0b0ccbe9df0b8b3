"""What LLVM notes of kernels in its assembly is read: of each kernel its own."""

from __future__ import annotations

import pytest

from zslurm.kernels.amd_assembly import MatrixLoop, kernels_of, matrix_loop

ASSEMBLY = """
first:                                  ; @first
	buffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
	global_store_dwordx4 v[0:1], v[2:5], off
	global_load_dwordx2 v[0:1], v2, off
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
.Lfunc_end0:
	.size	first, .Lfunc_end0-first
; Occupancy: 3
second:                                 ; @second
	global_load_dwordx4 v[2:5], v1, off
.Lfunc_end1:
; Occupancy: 8
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .name:           argument
        .size:           8
    .group_segment_fixed_size: 1024
    .kernarg_segment_size: 336
    .max_flat_workgroup_size: 256
    .name:           first
    .private_segment_fixed_size: 24
    .sgpr_spill_count: 2
    .vgpr_count:     166
    .vgpr_spill_count: 5
  - .args:           []
    .group_segment_fixed_size: 0
    .name:           second
    .vgpr_count:     12
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
"""


def test_the_resources_and_instructions_of_each_kernel() -> None:
    first, second = kernels_of(ASSEMBLY)
    assert (first.name, first.registers, first.spills, first.scratch_bytes) == ("first", 166, 7, 24)
    assert (first.lds_bytes, first.argument_bytes, first.threads, first.occupancy) == (1024, 336, 256, 3)
    assert (first.wide_loads, first.wide_stores, first.matrix_instructions) == (1, 1, 1)
    assert (second.name, second.registers, second.spills, second.occupancy) == ("second", 12, 0, 8)
    assert (second.wide_loads, second.wide_stores, second.matrix_instructions) == (1, 0, 0)


def test_what_is_no_assembly_is_refused() -> None:
    with pytest.raises(ValueError, match="no metadata"):
        kernels_of("first:\n")
    with pytest.raises(ValueError, match="no code of a kernel second"):
        kernels_of(ASSEMBLY.replace("\nsecond:", "\nother:"))


LOOPS = """
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
.LBB0_1:
	ds_read_u16 v1, v2
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	ds_read2st64_b64 v[2:5], v1 offset0:8
	ds_read_b64 v[2:3], v1
	ds_read_u16_d16 v1, v2
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
	v_mfma_f32_16x16x16_bf16 a[4:7], v[0:1], v[2:3], a[4:7]
	s_cbranch_vccnz .LBB0_2
.LBB0_3:
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc1 .LBB0_9
"""


def test_the_loop_with_most_matrix_instructions_is_read() -> None:
    """A block that does not branch to itself is no loop, whatever it multiplies."""
    assert matrix_loop(LOOPS) == MatrixLoop(flops=2 * 2 * 16**3, lds_bytes=64 * (16 + 8 + 2), narrow_reads=1)
    assert matrix_loop(LOOPS.partition(".LBB0_1")[0]) is None
