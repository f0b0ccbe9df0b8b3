"""Check the words of documents, docstrings and messages: `python -m docs.vocabulary`, part of `make lint`.

The field's own words lead a reader to the code; a word of our own for the same thing leads nowhere. Each row of
`WORDS` has an expression and what to write instead. Code in documents is left out, and so are names in Python.

`zslurm/slurm` alone knows the names of Slurm's variables, its messages, job states and settings (`OF_SLURM`): what
changes in a new version of Slurm is changed there. No string of other packages holds one; docstrings may.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = {
    r"treatments?": "response",
    r"remarks?": "advisory fault, or note",
    r"blam(es|ed|ing)": "attribute, root cause",
    r"verdicts?": "outcome, diagnosis",
    r"milestones?": "state-changing event",
    r"manners|politely|step(s|ped)? back": "nice",
    r"undead|outlasts?": "unkillable; wait for exit",
    r"leftover process(es)?": "orphaned process",
    r"whereabouts": "location",
    r"at-once": "max-concurrent",
    r"couriers?|errands?|tellers?": "delivery queue, notifier",
    r"deeds?": "command",
    r"fell silent|silence": "missed heartbeat",
    r"held[ -]out": "validation",
    r"bury|buried": "mark dead",
    r"forgiven": "expired",
    r"excerpts?": "preview",
    r"pretend(s|ed)?|invented|made-up": "simulated, synthetic",
    r"(is|are|was|were|be) told(?! apart)|tells": "is given; reports, names, prints",
    r"(it|which|that|line|message|page|file|program|event|command|kernel|slurm) (says|said)": "states",
    r"nobody is": "name what is not done",
    r"in its words": "its message",
    r"(go|goes|went|going) on": "continue",
    r"mend(s|ed)?": "fix, repair",
    r"deaf": "ignores, blocks",
    r"pace": "rate, step work time",
}
OF_SLURM = re.compile(
    r"\bSLURMD?_[A-Z]"
    r"|DUE TO TIME LIMIT|Unable to contact slurm|Invalid job id|Requested node configuration|Node failure on"
    r"|Timed out waiting for job step|Unable to create step|Access/permission denied|\bslurmstepd: "
    r"|^(PENDING|CANCELLED|PREEMPTED|NODE_FAIL|OUT_OF_MEMORY|COMPLETING|BOOT_FAIL|REQUEUE_HOLD|REQUEUED)$"
    r"|^(ClusterName|SlurmdTimeout|MessageTimeout|KillWait|JobRequeue|PreemptMode|AccountingStorageType)$"
)
_MAY_KNOW_SLURM = (
    "zslurm/slurm/",
    "zslurm/aegis/logs/",  # reads the logs of all programs
    "train/slurm_job.py",  # the trainer also runs without the rest of zslurm
)
_ALL = [(re.compile(rf"\b({words})\b", re.IGNORECASE), instead) for words, instead in WORDS.items()]
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|^<!--.*?-->|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the text of a file in pieces, each with the line at which it begins."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = _CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
        yield from enumerate(blank.split("\n"), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.split("\n")):
                yield node.lineno + number, re.sub(r"`[^`]*`", "", line)


def words_of_slurm(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that hold words of Slurm's, each with its line; docstrings are left out."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("utf-8", "replace")
            if match := OF_SLURM.search(text):
                yield node.lineno, match[0]


def found_in(path: Path) -> Iterator[str]:
    """Yield a line for each word of a file that is not the field's."""
    for number, text in prose(path):
        for word, instead in _ALL:
            if hit := word.search(text):
                yield f"{path.relative_to(ROOT)}:{number}: `{hit[0]}`: write {instead}"


def main() -> int:
    """Print what is found; returns 1 where there is something."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    for package in ("zslurm", "train", "checkpoint_tools", "kernels"):
        files += (path for path in (ROOT / package).rglob("*.py") if not path.is_symlink())
    found = [line for path in sorted(files) for line in found_in(path)]
    for path in sorted(files):
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" and not name.startswith(_MAY_KNOW_SLURM):
            for number, word in words_of_slurm(path.read_text(encoding="utf-8")):
                found.append(f"{name}:{number}: `{word}` is a word of Slurm's: zslurm/slurm has a function for it")
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
