"""What `zslurm doctor` takes for good enough. A profile may set its own; docs/doctor.md has the sources."""

from __future__ import annotations

from pydantic import Field

from zslurm.train.sections.section import Positive, Section


class DoctorSection(Section):
    """Limits of the checks."""

    memlock_gib: Positive = Field(32, description="memory that a process must be able to pin; unlimited is best")
    shm_gib: Positive = Field(8, description="free space in /dev/shm")
    tmp_gib: Positive = Field(10, description="free space in /tmp")
    open_files: Positive = Field(65536, description="files and sockets that a process can have open")
    processes: Positive = Field(16384, description="processes and threads that a user can have")
    clock_skew_s: Positive = Field(1, description="seconds that clocks may differ")
    fsync_s: Positive = Field(2, description="longest time to write and fsync a small file in the runs directory")
    write_mib_s: Positive = Field(20, description="slowest rate of writing, from all nodes at once")
    canary_s: Positive = Field(10, description="seconds after which a GPU driver that does not answer is wedged")
    check_s: Positive = Field(60, description="seconds after which a check that has not ended has failed")
    gemm_tflops: Positive = Field(600, description="check speed: bf16 matrix product of 8192 x 8192 on one GPU")
    hbm_gb_s: Positive = Field(2000, description="check speed: memory traffic of a copy on one GPU")
    all_reduce_gb_s: Positive = Field(100, description="check speed: bus bandwidth of 64 MiB among a node's GPUs")
