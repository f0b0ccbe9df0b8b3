"""A run is its name: submitting it again continues it, reports what changed, and refuses what would spoil it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.submit.scripted_slurm import (
    BAD_TIME,
    CANCELLED,
    FORGOTTEN,
    NO_CONTROLLER,
    RUNNING,
    TOO_MANY_NODES,
    ScriptedSlurm,
)
from tests.submit.specs import run_spec, saved
from tests.train.hub.models import MemoryWeights, random_weights
from tests.train.runs import MODEL, make_corpus
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, Exit, RunActive, SlurmRefused, SlurmUnavailable
from zslurm.run.index import find_run, jobs
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look
from zslurm.submit.continuation import changed_keys
from zslurm.submit.submit import submit
from zslurm.train.config import ModelConfig
from zslurm.train.hub import import_weights
from zslurm.train.jsonl import read_jsonl
from zslurm.train.schedule import Plan
from zslurm.train.sections.phases import PhaseConfig


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Slurm in scripts; the data is there; the working directory is a fresh one."""
    make_corpus(tmp_path / "tokens.h5")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


def spec_of(directory: Path, **sections: dict[str, Any]) -> RunSpec:
    return run_spec(directory, **{"cluster": {"name": "lab", "launcher": "slurm"}, **sections})


def test_a_submission_leaves_all_that_the_job_needs(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    spec = spec_of(tmp_path)
    done = submit(spec)
    run = done.run
    assert (done.job_id, done.continued, done.changed) == (FORGOTTEN, False, [])
    assert run.path == tmp_path / "runs" / "tiny"
    assert load_spec(run.config) == spec
    assert run.script.read_text() == slurm.submitted, "the script on record is the one that sbatch got"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert json.loads(run.code.read_text())["tokenizer_sha256"] == "a" * 64
    (line,) = read_jsonl(run.submissions)
    assert (line["action"], line["job_id"], line["cluster"]) == ("submit", FORGOTTEN, "lab")
    assert find_run(FORGOTTEN) == find_run("tiny") == run
    pickles = [path.name for path in run.submitit.iterdir()]
    assert f"{FORGOTTEN}_submitted.pkl" in pickles


def test_sbatch_sees_nothing_of_a_surrounding_job(
    tmp_path: Path, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x3")
    monkeypatch.setenv("SBATCH_PARTITION", "old")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    submit(spec_of(tmp_path))
    assert "SLURM_CONF=/etc/slurm.conf" in slurm.seen
    assert not [line for line in slurm.seen if line.startswith(("SLURM_CPU_BIND", "SBATCH_"))]


def test_variables_that_would_hang_the_ranks_are_reported(
    tmp_path: Path, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "0")
    assert any(note.startswith("NCCL_IB_TIMEOUT=0: waits forever") for note in submit(spec_of(tmp_path)).notes)


@pytest.mark.parametrize(("export", "reported"), [("ALL", True), ("NONE", False), ("HOME,NCCL_IB_TIMEOUT", True)])
def test_only_variables_that_reach_the_job_are_reported(
    tmp_path: Path, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch, export: str, reported: bool
) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "0")
    notes = submit(spec_of(tmp_path, slurm={"export": export})).notes
    assert any(note.startswith("NCCL_IB_TIMEOUT=0") for note in notes) == reported


@pytest.mark.parametrize(
    ("cluster", "slurm_section", "reported"),
    [
        ({"gpus_per_node": 2}, {}, True),
        ({"gpus_per_node": 2, "cpus_per_node": 16}, {}, False),
        ({"gpus_per_node": 2}, {"cpus_per_task": 1}, False),
        ({}, {}, False),
    ],
)
def test_ranks_with_a_gpu_and_one_core_by_default_are_reported(
    tmp_path: Path, slurm: ScriptedSlurm, cluster: dict[str, Any], slurm_section: dict[str, Any], reported: bool
) -> None:
    spec = spec_of(tmp_path, cluster={"name": "lab", "launcher": "slurm", **cluster}, slurm=slurm_section)
    assert any("1 core" in note for note in submit(spec).notes) == reported


def test_a_job_that_asks_for_no_time_says_which_limit_it_got(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    slurm.gives(CANCELLED)  # whose record has ten minutes
    assert (
        "slurm.time is not given, so Slurm gave job 6 a time limit of 0:10:00" in submit(spec_of(tmp_path)).notes
    )
    other = spec_of(tmp_path, run={"name": "other"}, slurm={"time": "15:00"})
    assert not any("time limit" in note for note in submit(other).notes)


def test_submitting_again_continues_and_reports_what_changed(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    submit(spec_of(tmp_path))
    marker = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000010"
    marker.mkdir()
    slurm.gives(CANCELLED)
    again = submit(spec_of(tmp_path, checkpoint={"every_steps": 7}, slurm={"flags": {"comment": "x"}}))
    assert (again.job_id, again.continued) == (CANCELLED, True)
    assert again.changed == [
        "checkpoint.every_steps: 500 -> 7",
        'slurm.flags.comment: null -> "x"',
    ]
    assert marker.is_dir()
    lines = list(read_jsonl(again.run.submissions))
    assert [line["job_id"] for line in lines] == [FORGOTTEN, CANCELLED]
    assert lines[1]["changed"] == again.changed
    assert (
        submit(spec_of(tmp_path, checkpoint={"every_steps": 7}, slurm={"flags": {"comment": "x"}})).changed == []
    )
    assert {job.job_id for job in jobs()} == {FORGOTTEN, CANCELLED}


def test_changed_keys_are_the_leaves_that_differ(tmp_path: Path) -> None:
    old, new = run_spec(tmp_path), run_spec(tmp_path, optim={"betas": [0.8, 0.95], "clip_norm": None})
    assert changed_keys(old, new) == ["optim.betas[0]: 0.9 -> 0.8", "optim.clip_norm: 1.0 -> null"]
    assert changed_keys(old, old) == []


def test_another_model_is_refused_and_the_run_stays_as_it_was(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    before = contents(run.path)
    with pytest.raises(ConfigError) as caught:
        submit(spec_of(tmp_path, model={"layers": 3, "experts": 4}))
    assert str(caught.value) == (
        f"{run.path}: the run has another model (model.layers: 2 -> 3; model.experts: 3 -> 4); "
        "set the model back, choose another run.name, or start over with --new"
    )
    assert contents(run.path) == before


def test_what_does_not_change_the_tensors_may_change(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    submit(spec_of(tmp_path))
    assert submit(spec_of(tmp_path, model={"init_std": 0.5})).changed == ["model.init_std: 0.02 -> 0.5"]


def test_another_tokenizer_is_refused_and_other_data_of_the_same_is_not(
    tmp_path: Path, slurm: ScriptedSlurm
) -> None:
    run = submit(spec_of(tmp_path)).run
    before = contents(run.path)
    other = make_corpus(tmp_path / "other.h5", tokenizer="b" * 64)
    with pytest.raises(ConfigError) as caught:
        submit(spec_of(tmp_path, data={"path": str(other)}))
    assert str(caught.value) == (
        f"{run.path}: the run was started with another tokenizer than {other} has; "
        "set data.path back, choose another run.name, or start over with --new"
    )
    assert contents(run.path) == before
    more = make_corpus(tmp_path / "more.h5", tokens=5000)
    assert submit(spec_of(tmp_path, data={"path": str(more)})).changed == [
        f'data.path: "{tmp_path}/tokens.h5" -> "{more}"'
    ]


def test_new_moves_the_old_run_aside_whole(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path)).run
    (run.checkpoints / "step-00000010").mkdir()
    fresh = submit(spec_of(tmp_path, model={"layers": 3}), new=True)
    assert (fresh.continued, fresh.changed, fresh.run) == (False, [], run)
    assert not list(run.checkpoints.iterdir())
    (aside,) = [path for path in run.path.parent.iterdir() if path.name.startswith("tiny.")]
    assert (aside / "checkpoints" / "step-00000010").is_dir()
    assert load_spec(aside / "config.json").model.layers == 2
    assert load_spec(run.config).model.layers == 3


def test_new_on_a_name_that_is_free_is_an_ordinary_submission(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path), new=True).run
    assert [path.name for path in run.path.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("new", [False, True])
def test_an_active_run_is_refused(tmp_path: Path, slurm: ScriptedSlurm, new: bool) -> None:
    slurm.gives(RUNNING)
    run = submit(spec_of(tmp_path)).run
    before = contents(run.path.parent)
    with pytest.raises(RunActive, match=f"^tiny: the run is running as job {RUNNING}; `zslurm cancel"):
        submit(spec_of(tmp_path), new=new)
    assert contents(run.path.parent) == before


@pytest.mark.parametrize(
    ("words", "error", "code", "message"),
    [
        (BAD_TIME, SlurmRefused, Exit.FAILED, "sbatch refused the job: Invalid --time specification"),
        (
            TOO_MANY_NODES,
            SlurmRefused,
            Exit.FAILED,
            "sbatch refused the job: Batch job submission failed: Requested node configuration is not available: "
            "the partition does not have so many nodes with these GPUs, CPUs, memory and features; ask for fewer, "
            "or for another partition (`sinfo` lists them)",
        ),
        (
            NO_CONTROLLER,
            SlurmUnavailable,
            Exit.SLURM_UNAVAILABLE,
            "sbatch: the Slurm controller does not answer: Batch job submission failed: "
            "Unable to contact slurm controller (connect failure)",
        ),
    ],
)
def test_a_first_submission_that_fails_leaves_no_submitted_run(
    tmp_path: Path, slurm: ScriptedSlurm, words: str, error: type[Exception], code: Exit, message: str
) -> None:
    slurm.refuses(words)
    with pytest.raises(error) as caught:
        submit(spec_of(tmp_path))
    assert str(caught.value) == message
    assert caught.value.exit_code == code  # type: ignore[attr-defined]
    run = RunDir(tmp_path / "runs" / "tiny")
    assert not run.submitted
    assert look(run).state == "prepared"
    assert jobs() == []
    slurm.gives(FORGOTTEN)
    done = submit(spec_of(tmp_path, model={"layers": 3}))
    assert (done.continued, done.changed) == (False, []), "nothing binds a run that never was"


def test_a_refused_resubmission_leaves_the_accepted_one_on_record(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    accepted = spec_of(tmp_path)
    run = submit(accepted).run
    script = run.script.read_text()
    slurm.refuses(BAD_TIME)
    with pytest.raises(SlurmRefused):
        submit(spec_of(tmp_path, checkpoint={"every_steps": 7}))
    assert load_spec(run.config) == accepted
    assert run.script.read_text() == script


def test_without_sbatch_nothing_is_written(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    (slurm.directory / "sbatch").unlink()
    with pytest.raises(SlurmUnavailable, match=r"^sbatch: not found on this machine; .* --cluster local"):
        submit(spec_of(tmp_path))
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_broken_template_is_found_before_anything_is_written_or_moved(
    tmp_path: Path, slurm: ScriptedSlurm
) -> None:
    template = tmp_path / "bad.sbatch.j2"
    template.write_text("{{ nonesuch }}")
    broken = spec_of(tmp_path, cluster={"name": "lab", "launcher": "slurm", "template": str(template)})
    with pytest.raises(ConfigError, match=r"bad\.sbatch\.j2:1: .nonesuch. is undefined"):
        submit(broken)
    assert not (tmp_path / "runs" / "tiny").exists()
    run = submit(spec_of(tmp_path)).run
    before = contents(run.path.parent)
    with pytest.raises(ConfigError, match=r"bad\.sbatch\.j2:1: .nonesuch. is undefined"):
        submit(broken, new=True)
    assert contents(run.path.parent) == before


def test_the_group_may_read_where_the_run_says_so(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    run = submit(spec_of(tmp_path, run={"group_readable": True})).run
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o750


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------- phases, and what a run starts from


def longer(directory: Path, tokens: int) -> RunSpec:
    spec = spec_of(directory)
    return spec.model_copy(update={"phases": (spec.phases[0].model_copy(update={"tokens": tokens}),)})


def test_phases_that_change_ahead_are_reported_and_steps_that_are_done_do_not_move(
    tmp_path: Path, slurm: ScriptedSlurm
) -> None:
    spec = spec_of(tmp_path)
    first = submit(spec)
    assert first.notes == []
    saved(first.run, 8, {"plan": Plan(spec.phases).record()})
    slurm.gives(CANCELLED)
    again = submit(longer(tmp_path, 1920))
    assert again.changed == ["phases[0].tokens: 960 -> 1920"]
    assert again.notes[0] == "phases[0] (train) now has 20 steps, and had 10"
    before = contents(first.run.path)
    with pytest.raises(ConfigError, match=r"now has 5 steps, and had 10, and the 8 steps that are done") as caught:
        submit(longer(tmp_path, 480))
    assert caught.value.exit_code == Exit.USAGE
    assert str(caught.value).endswith(
        "options hold for one submission: to continue as before, submit with --set phases.0.tokens=1920, or write "
        "that into the run file"
    )
    assert contents(first.run.path) == before


def test_ranks_without_work_are_reported_and_ranks_without_sequences_refused(
    tmp_path: Path, slurm: ScriptedSlurm
) -> None:
    assert submit(spec_of(tmp_path, slurm={"nodes": 4})).notes == [
        "phases[0].global_batch (6) gives 4 data-parallel ranks at most 2 sequences each and 1.5 in the mean: "
        "they wait for 25 % of the time; a multiple of 4 divides evenly"
    ]
    with pytest.raises(ConfigError) as caught:
        submit(spec_of(tmp_path, run={"name": "wide"}, slurm={"nodes": 7}))
    assert str(caught.value) == (
        "phases[0].global_batch (6) has fewer sequences than there are data-parallel ranks (7); "
        "use at most 6 ranks"
    )
    assert not (tmp_path / "runs" / "wide").exists()


@pytest.mark.parametrize(
    ("phase", "problem"),
    [
        ({"context_parallel": 3}, "phases[0].context_parallel (3) does not divide the 4 ranks of a node; use 2"),
        (
            {"context_parallel": 8},
            "phases[0].context_parallel (8) exceeds the 4 ranks of a node, and all ranks that share a "
            "sequence are in one; use 4",
        ),
        (
            {"context": 6, "context_parallel": 4},
            "phases[0].context_parallel: 4 cuts a sequence into 8 chunks, but it has 6 tokens; use longer "
            "sequences, or context_parallel: 2",
        ),
        (
            {"global_batch": 6, "micro_batch": 2},
            "phases[0].global_batch (6) has fewer sequences than there are data-parallel ranks (8); set "
            "phases[0].context_parallel to 2, or use at most 1 node",
        ),
    ],
)
def test_a_context_group_without_a_place_is_refused_with_the_nearest_that_has_one(
    tmp_path: Path, slurm: ScriptedSlurm, phase: dict[str, Any], problem: str
) -> None:
    keys = {"tokens": 960, "context": 16, "global_batch": 8, "micro_batch": 1, "lr": 1e-3, **phase}
    spec = spec_of(tmp_path, slurm={"nodes": 2, "ranks_per_node": 4})
    spec = spec.model_copy(update={"phases": (PhaseConfig.model_validate(keys),)})
    with pytest.raises(ConfigError) as caught:
        submit(spec)
    assert str(caught.value) == problem
    assert caught.value.exit_code == Exit.USAGE


def test_a_chunk_that_is_shorter_than_the_convolutions_is_refused(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    keys = {"tokens": 960, "context": 16, "global_batch": 8, "micro_batch": 1, "lr": 1e-3, "context_parallel": 4}
    spec = spec_of(tmp_path, slurm={"ranks_per_node": 4}, model={"conv_widths": [3, 3]})
    spec = spec.model_copy(update={"phases": (PhaseConfig.model_validate(keys),)})
    with pytest.raises(ConfigError) as caught:
        submit(spec)
    assert str(caught.value) == (
        "phases[0].context_parallel: 4 cuts a sequence of 16 tokens into chunks of 2, but model.conv_widths look "
        "back 4 tokens, which must be in one chunk; use context_parallel: 2"
    )


def test_weights_to_start_from_are_looked_at_before_anything_is_written(
    tmp_path: Path, slurm: ScriptedSlurm
) -> None:
    config = ModelConfig(**MODEL, skip_rule="zero")
    weights = import_weights(MemoryWeights(config, random_weights(config)), tmp_path / "weights").path
    spec = spec_of(tmp_path).model_copy(update={"init": f"ckpt:{weights}"})
    with pytest.raises(ConfigError) as caught:
        submit(spec)
    assert str(caught.value) == (
        f"init: {weights} holds another model: model.skip_rule is 'identity', the weights have 'zero'; "
        "set the model to theirs"
    )
    assert not (tmp_path / "runs" / "tiny").exists()
    fits = spec_of(tmp_path, model={"skip_rule": "zero"}).model_copy(update={"init": f"ckpt:{weights}"})
    done = submit(fits)
    assert json.loads(done.run.config.read_text())["init"] == f"ckpt:{weights}"


def test_a_run_that_has_a_checkpoint_needs_the_weights_no_more(tmp_path: Path, slurm: ScriptedSlurm) -> None:
    spec = spec_of(tmp_path).model_copy(update={"init": f"ckpt:{tmp_path}/gone"})
    run = submit(spec_of(tmp_path)).run
    slurm.gives(CANCELLED)
    with pytest.raises(ConfigError, match="gone is not a directory"):
        submit(spec)
    saved(run, 3, {"plan": Plan(spec.phases).record()})
    assert submit(spec).changed == [f'init: null -> "ckpt:{tmp_path}/gone"']
    with pytest.raises(ConfigError, match="gone is not a directory"):
        submit(spec, new=True)
    assert run.submitted, "it was not moved aside"
