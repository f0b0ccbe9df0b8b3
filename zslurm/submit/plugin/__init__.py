"""zslurm as a cluster of submitit: any pickled function as a job with our script and the cluster's profile.

    executor = submitit.AutoExecutor("logs", cluster="zslurm")
    executor.update_parameters(timeout_min=60, gpus_per_node=8, slurm_partition="gpu")
    executor.submit(function, 1, 2).result()

submitit finds `executor` and `job_environment` by the entry points in pyproject.toml, also in each task of a job:
both import little. docs/submitit.md describes the use, tests/submit/plugin what is relied on in submitit.
"""
