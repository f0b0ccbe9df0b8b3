"""Check an installation of the wheel alone, as a login node has it: `python installed_alone.py BIN`.

`make package` runs it. What needs torch is one line with the extra, and exit code 2; the rest works.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKS = (
    ["--version"],
    ["--help"],
    ["config", "recipes"],
    ["config", "template", "show", "train"],
    ["cluster", "env", "--cluster", "mi300x-pollara"],
    ["plan", "memory", "run.yaml", "--cluster", "mi300x-pollara"],
    ["plan", "run", "run.yaml", "--cluster", "mi300x-pollara", "--runs", "2"],
    ["status"],
)
NEEDS = {
    "torch": ("train", ["dev", "kernels", "check"]),
    "tokenizers": ("data", ["data", "build", "texts", "--vocab-size", "512", "--out", "data"]),
}
"""By the package that is missing: the extra that brings it, and a command that needs it."""
API = """
import zslurm
from submitit.core import plugins
assert zslurm.env("mi300x-pollara")
assert all(getattr(zslurm, name) for name in zslurm.__all__)
assert "zslurm" in plugins.get_executors() and "zslurm" in plugins.get_job_environments()
"""
RUN = "extends: zaya1-8b\nrun: {name: big}\ndata: {path: data}\nslurm: {nodes: 128}\n"


def main(programs: Path) -> int:
    """Return 0 if everything is as it should be; print what is not."""
    Path("run.yaml").write_text(RUN)
    Path("texts").mkdir(exist_ok=True)
    Path("texts/a.txt").write_text("one two three\n")
    wrong = []
    if _run(programs / "python", "-c", "import torch").returncode == 0:
        wrong.append("torch was installed")
    if (done := _run(programs / "python", "-c", API)).returncode:
        wrong.append(f"the API: {done.stderr}")
    for words in WORKS:
        done = _run(programs / "zslurm", *words)
        if done.returncode:
            wrong.append(f"zslurm {' '.join(words)}: {done.returncode}: {done.stderr}")
    for package, (extra, words) in NEEDS.items():
        done = _run(programs / "zslurm", *words)
        line = f"this needs {package}, which is not installed here: pip install 'zslurm-train[{extra}]'"
        if done.returncode != 2 or line not in done.stderr or "Traceback" in done.stderr:
            wrong.append(f"zslurm {' '.join(words)}: {done.returncode}: {done.stderr}")
    print("\n".join(wrong) or "the wheel works alone, without torch")
    return 1 if wrong else 0


def _run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
