"""The rails of many nodes: each node is asked for its facts once, all of them at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zslurm.cluster.rails.differences import Difference, differences
from zslurm.cluster.rails.map import rail_map
from zslurm.cluster.rails.types import RailMap
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import from_json
from zslurm.slurm.hostlist import natural_key
from zslurm.slurm.run_on_nodes import NodeAnswer, survey

FACTS = "zslurm.hardware.facts"


@dataclass(frozen=True)
class RailSurvey:
    """What was found.

    Attributes:
        maps: of the nodes that answered, in natural order.
        silent: node -> why it did not answer, or not with facts.
        differences: between the nodes.
    """

    maps: tuple[RailMap, ...]
    silent: Mapping[str, str]
    differences: tuple[Difference, ...]

    @property
    def incomplete(self) -> dict[str, RailMap]:
        """Nodes on which a rail cannot work."""
        return {found.node: found for found in self.maps if found.incomplete}


def survey_rails(cluster: ClusterSection, **where: Any) -> RailSurvey:
    """Ask nodes for their facts, and work out their rails.

    Args:
        cluster: the profile.
        where: which nodes and how; see `zslurm.slurm.run_on_nodes.survey`.

    Raises:
        SlurmUnavailable, SlurmRefused: no node could be asked.
    """
    return judge_answers(list(survey(FACTS, **where).values()), cluster)


def judge_answers(answers: Sequence[NodeAnswer], cluster: ClusterSection) -> RailSurvey:
    """The rails of the nodes that gave these answers."""
    maps, silent = [], {}
    for answer in sorted(answers, key=lambda answer: natural_key(answer.node)):
        if answer.error is not None:
            silent[answer.node] = answer.error
            continue
        try:
            maps.append(rail_map(from_json(answer.value), cluster))
        except ValueError:
            silent[answer.node] = "its answer is not what this version of zslurm asks for"
    return RailSurvey(tuple(maps), silent, tuple(differences(maps)))
