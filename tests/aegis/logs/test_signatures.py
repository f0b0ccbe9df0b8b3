"""The table of signatures: every row is true in both directions, every labelled line gets its class."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.aegis.logs.log_samples import EVERY, FORMS, RECORDED
from zslurm.aegis.logs.hardware_names import names_of
from zslurm.aegis.logs.lines import without_labels
from zslurm.aegis.logs.prefilter import TableError, any_of, required_literals
from zslurm.aegis.logs.scanner import findings_in
from zslurm.aegis.logs.signatures import Rule, Signatures, without_guesses

TABLE = Signatures.load()
PREFILTER = [literal.decode() for literal in TABLE.prefilter]
EXPRESSIONS = [expression for rule in TABLE.rules for expression in rule.any]
HARMLESS = {"benign", None}


def kind_of(line: str) -> str | None:
    match = TABLE.match(line)
    return match.kind if match else None


def id_of(rule: Rule) -> str:
    return f"{rule.match.kind}: {rule.any[0][:40]}"


@pytest.mark.parametrize("rule", TABLE.rules, ids=id_of)
def test_a_rule_matches_its_sample_and_rejects_the_other(rule: Rule) -> None:
    alone = Signatures([rule], PREFILTER, ignore=())
    assert alone.match(rule.matches) is not None
    assert alone.match(rule.rejects) is None


def test_every_expression_is_a_regular_expression() -> None:
    """They are compiled only when a line has one of their words."""
    for expression in [*EXPRESSIONS, *(rule.unless for rule in TABLE.rules if rule.unless)]:
        re.compile(expression)


def test_every_name_of_hardware_is_known() -> None:
    for rule in TABLE.rules:
        assert rule.names is None or names_of(rule.names)


def test_no_literal_of_the_prefilter_is_part_of_another() -> None:
    """The longer one would be searched for in vain."""
    assert [(a, b) for a in PREFILTER for b in PREFILTER if a != b and a in b] == []


@pytest.mark.parametrize("rule", TABLE.rules, ids=id_of)
def test_among_all_rules_its_sample_is_still_of_its_kind(rule: Rule) -> None:
    found = TABLE.match(rule.matches)
    assert found is not None
    assert (found.kind, found.role, found.scope) == (rule.match.kind, rule.match.role, rule.match.scope)


@pytest.mark.parametrize("kind", sorted({sample.kind for sample in EVERY}))
def test_every_labelled_line_gets_its_class(kind: str) -> None:
    right = {*HARMLESS, "benign_after_fault"} if kind == "benign" else {kind}
    found = {sample.line: kind_of(sample.line) for sample in EVERY if sample.kind == kind}
    assert {line: other for line, other in found.items() if other not in right} == {}


def test_the_table_knows_every_class_of_the_recorded_lines_and_of_other_noticers() -> None:
    kinds = {rule.match.kind for rule in TABLE.rules}
    assert {sample.kind for sample in RECORDED} <= kinds
    assert {"user_import", "user_error", "config_error", "peer_lost", "gpu_throttled"} <= kinds


GLUED = {
    "srun --label": "5995: {}",
    "torchrun": "[default3]:{}",
    "mpirun": "[1,17]<stdout>:{}",
    "ray": "(RayTrainWorker pid=4711, ip=10.0.0.7) {}",
    "colours": "\x1b[31m\x1b[1m{}\x1b[0m",
    "progress bar": " 41%|####      | 366/903 [5:15:39<6:53:09, 46.16s/it]{}",
    "syslog": "Nov 17 13:16:56 node017 python[4711]: {}",
    "time": "[2026-02-02 12:15:56] {}",
    "time with offset": "2026-02-02T12:15:56.123456+01:00 {}",
    "carriage return": " 10%|#   | 1/10\r 20%|##  | 2/10\r{}\r\n",
    "label and time": "12: 2026-02-02 12:15:56,123 {}",
}


@pytest.mark.parametrize("glue", GLUED.values(), ids=GLUED)
def test_what_is_glued_to_a_line_does_not_change_its_class(glue: str) -> None:
    for sample in EVERY:
        if sample.kind == "benign" or without_labels(sample.line) != sample.line:
            continue
        found = {f.match.kind for f in findings_in([glue.format(sample.line).encode()])}
        assert found == {sample.kind}, sample.line


def test_no_harmless_line_is_flagged_in_a_file() -> None:
    log = "\n".join(sample.line for sample in EVERY if sample.kind == "benign").encode()
    assert {f.match.kind for f in findings_in([log])} <= {"benign_after_fault"}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_an_expression_matches_has_one_of_its_words(data: st.DataObject) -> None:
    """So the search for literals overlooks nothing."""
    expression = data.draw(st.sampled_from(EXPRESSIONS))
    text = data.draw(st.from_regex(re.compile(expression, re.IGNORECASE | re.ASCII)))
    assert any(word in text.lower() for word in required_literals(expression, any_of(PREFILTER)))


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (r"\bGPU reset begin\b", {"gpu reset begin"}),
        (r"(?:early )?reset of (\d+) queues?", {"reset of "}),
        (r"status=(?:error|failure) \d+", {"failure", "error"}),
        (r"errors?|failed", {"error", "failed"}),
        (r"x*error{0,2}", {"erro"}),
        (r"\d+|error", set()),
        (r"[error]+ \w+", set()),
        (r"(?:errors)? now", set()),
        (r"error\.log\)", {"error.log)"}),
        (r"(?!error) \w", set()),
    ],
)
def test_fixed_words(expression: str, words: set[str]) -> None:
    assert required_literals(expression, any_of(["err", "fail", "reset"])) == words


def test_an_expression_without_a_literal_of_the_prefilter_is_refused() -> None:
    rule = TABLE.rules[0]
    with pytest.raises(TableError, match="no required literal of the prefilter in"):
        Signatures([rule], ["nothing of it"], ignore=())


def test_gates_with_digits_are_refused() -> None:
    with pytest.raises(TableError, match="digits"):
        Signatures([], ["0x"], ignore=())


@pytest.mark.parametrize(
    ("line", "observed"),
    [
        ("the job stopped. This might be caused by CUDA out of memory.", "the job stopped. This"),
        ("watchdog got stuck. This typically indicates a NCCL hang", "watchdog got stuck. This"),
        ("it could be due to an ECC error. Then: Killed", "it   Then: Killed"),
        ("The cp might be in an unrecoverable state", "The cp might be in an unrecoverable state"),
    ],
)
def test_guesses_are_no_evidence(line: str, observed: str) -> None:
    assert without_guesses(line).strip() == observed


def test_a_kernel_tells_of_no_program() -> None:
    line = "RuntimeError: shape '[2, 3]' is invalid"
    assert TABLE.match(line) is not None
    assert TABLE.match(line, kernel=True) is None
    assert TABLE.match("amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!", kernel=True) is not None


@pytest.mark.parametrize(
    ("line", "node", "gpu", "nic", "rank"),
    [
        ("amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(X) detected!", None, "0000:1c:00.0", None, None),
        ("HW Exception by GPU node-9 (Agent handle: 0x6) reason :GPU Hang", None, "kfd:9", None, None),
        ("Nov 17 13:16:56 n7 kernel: [1.5] ixgbe 0000:08:00.0 eth11: NIC Link is Down", "n7", None, "eth11", None),
        ("ionic 0000:24:00.0: FW Down: Stopping LIFs", None, None, "0000:24:00.0", None),
        ("n1:2:3 [4] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", "n1", None, "mlx5_0", None),
        (
            "NCCL WARN NET/IB: Got completion from peer p<1> with status=12 hca ionic_5",
            None,
            None,
            "ionic_5",
            None,
        ),
        ("[rank5]: torch.OutOfMemoryError: HIP out of memory. GPU 3 has a total", None, "3", None, 5),
        ("AssertionError: Rank 3: found NaN in it. Device: 5, node: gpu-12.site", "gpu-12.site", "5", None, 3),
        ("srun: error: node3: tasks 8-15: Segmentation fault", "node3", None, None, 8),
        ("srun: error: Node failure on node3", "node3", None, None, None),
        ("slurmstepd: error: *** STEP 1.0 ON n3 CANCELLED AT 2023-01-01T00:00:00 ***", "n3", None, None, None),
        ("slurmstepd: error: *** JOB 1 ON ... CANCELLED AT 2023-01-01T00:00:00 ***", None, None, None, None),
        ("5995: [rank5995]:[E x] Watchdog caught collective operation timeout", None, None, None, 5995),
    ],
)
def test_who_and_where(line: str, node: str | None, gpu: str | None, nic: str | None, rank: int | None) -> None:
    found = TABLE.match(line)
    assert found is not None
    assert (found.node, found.gpu, found.nic, found.rank) == (node, gpu, nic, rank)


def test_every_form_stands_once() -> None:
    assert len(FORMS) == len(set(FORMS))
