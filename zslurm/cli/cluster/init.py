"""`zslurm init`: write a cluster profile from what Slurm reports."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from zslurm.cluster.detect import detect
from zslurm.cluster.profile import keep_before, profile_path, save_profile
from zslurm.core.console import say
from zslurm.doctor.ask import report_waiting


def init(
    name: Annotated[str | None, Option(help="Name of the profile; default: the cluster's.")] = None,
    partition: Annotated[str | None, Option(help="Partition to use; default: Slurm's default one.")] = None,
    account: Annotated[str | None, Option(help="Account to charge, for the profile and for the probe.")] = None,
    probe: Annotated[
        bool | None,
        Option(
            "--probe/--no-probe",
            help="Read network, NICs and drivers of one node of each kind in a short job. Default: try it; with "
            "--probe, fail if no node answers.",
        ),
    ] = None,
    probe_timeout: Annotated[float, Option(metavar="SECONDS", min=1, help="Wait so long for that job.")] = 120.0,
    yes: Annotated[
        bool, Option("-y", "--yes", help="Ask nothing; replace an existing profile of the name.")
    ] = False,
) -> None:
    """Write a cluster profile from what Slurm and a node report. An older one is kept as FILE~.

    Example: zslurm init --yes
    """
    detected = detect(name=name, partition=partition, account=account)
    choices = detected.partition_choices
    if partition is None and len(choices) > 1 and not yes:
        partition = typer.prompt(f"partition ({', '.join(choices)})", default=choices[0], err=True)
        detected = detect(name=name, partition=partition, account=account)
    path = profile_path(detected.name)
    if path.exists() and not yes:
        typer.confirm(f"{path} exists; replace it?", abort=True, err=True)
    if probe or (probe is None and choices):
        if choices:
            optional = "" if probe else " (--no-probe: not now)"
            say(f"reading one node of each kind in a short job, for {probe_timeout:g} s at most{optional}")
        detected = detect(
            name=name,
            partition=partition,
            account=account,
            probe_timeout_s=probe_timeout,
            probe_is_optional=not probe,
            waiting=report_waiting(),
        )
    kept = keep_before(path, detected.text)
    save_profile(detected.name, detected.text, make_default=True)
    print(detected.text, end="")
    if kept is not None:
        say(f"the profile that was there is kept as {kept}")
    say(f"wrote {path}; it is now the default cluster")
    for line in detected.others:
        say(f"note: nodes of another kind, for a profile of their own: {line}")
    if detected.refused is not None:
        say(f"note: cluster.gpu_option and cluster.cpus_per_node are not checked: {detected.refused}")
    if detected.not_found:
        keys = ", ".join(detected.not_found)
        say(f"note: the node does not show {keys}; enter them with `zslurm cluster edit`, if runs need them")
    if choices:
        keys = "cluster.setup and cluster.fabric" if account else "slurm.account, cluster.setup and cluster.fabric"
        say(f"note: neither Slurm nor a node shows {keys}; `zslurm cluster edit` enters them")
    if detected.not_probed is not None:
        say(f"note: the network is not known: {detected.not_probed}; try `zslurm init --probe` later")
