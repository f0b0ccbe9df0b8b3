"""`zslurm submit --dry-run`: what would be submitted, without Slurm and without writing anything."""

from __future__ import annotations

import json

from zslurm.config.layers import show_path
from zslurm.config.load import Resolved
from zslurm.launch.render import job_environment, render
from zslurm.launch.submission import check_data, run_dir_of
from zslurm.report.values import show_count, show_value


def describe(resolved: Resolved, *, as_json: bool) -> str:
    """The script, the environment, and every given value with its origin.

    Raises:
        ConfigError: the run's data or template would be refused.
    """
    spec = resolved.spec
    run = run_dir_of(spec)
    corpus = check_data(spec)
    script = render(spec, run)
    given = [
        (show_path(path), value, str(source))
        for path, value, source in resolved.rows()
        if source.layer != "default"
    ]
    if as_json:
        body = {
            "run_dir": str(run.path),
            "launcher": spec.cluster.launcher,
            "nodes": spec.slurm.nodes,
            "ranks": spec.world_size,
            "steps": spec.total_steps,
            "environment": job_environment(spec),
            "values": {key: {"value": value, "origin": origin} for key, value, origin in given},
            "script": script,
        }
        return json.dumps(body, indent=2) + "\n"
    tokens = sum(phase.steps * phase.step_tokens for phase in spec.phases)
    width = max(len(key) for key, _, _ in given)
    lines = [
        f"# run {spec.run.name} in {run.path}",
        f"# {spec.slurm.nodes} nodes x {spec.ranks_per_node} ranks on {spec.cluster.name}; "
        f"{spec.total_steps} steps, {show_count(tokens)} tokens of {show_count(corpus.token_count)} in the data",
        "#",
        "# values that were given (all others are defaults: zslurm config show --origin)",
        *(f"#   {key:<{width}}  {show_value(value)}    [{origin}]" for key, value, origin in given),
        "",
    ]
    # Comments stay comments, whatever a name or a path holds: somebody may hand all of this to a shell.
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines) + script
