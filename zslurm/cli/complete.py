"""What the shell offers after the tab key: runs and clusters, from files alone. Slurm is never asked."""

from __future__ import annotations


def complete_runs(incomplete: str) -> list[tuple[str, str]]:
    """Names of this user's runs with their job ids; job ids, once a digit is typed, with the run's name."""
    from zslurm.run.index import jobs

    try:
        known = jobs()
    except OSError:
        return []
    names = {job.run_dir.name: f"job {job.job_id}" for job in reversed(known)}
    ids = {job.job_id: job.run_dir.name for job in known} if incomplete[:1].isdigit() else {}
    return sorted((word, about) for word, about in (names | ids).items() if word.startswith(incomplete))


def complete_clusters(incomplete: str) -> list[str]:
    """Names of cluster profiles."""
    from zslurm.cluster.profile import LOCAL, profile_files

    try:
        names = {*profile_files(), LOCAL}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))
