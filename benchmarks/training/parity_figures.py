"""How far the model is from `ZayaForCausalLM` of transformers: the figures behind the bounds of the parity tests.

The same draws, weights and comparisons as in tests/train/model/test_parity.py and test_decoding.py. Not a
matter of speed: the numbers depend only on the machine's arithmetic.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import write_result
from tests.train.model.reference import gradients_of, reference_names, reference_of
from tests.train.model.test_parity import BF16_DRAWS, DRAWS, Draw, bf16_errors, draw, model_of, ours, theirs
from zslurm.train.model.generate import generate
from zslurm.train.model.head import IGNORED_TARGET

GENERATED_DRAWS = 8
GENERATED = 20
SMALLEST_NORM = 1e-6  # of gradients that are compared


def run() -> None:
    """Compare and write results/parity_figures.json."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    differences = [_differences(draw(seed)) for seed in range(DRAWS)]
    errors = [bf16_errors(draw(seed)) for seed in range(BF16_DRAWS)]
    mean_ours, mean_theirs = (
        math.sqrt(sum(e * e for e in each) / BF16_DRAWS) for each in zip(*errors, strict=True)
    )
    write_result(
        "parity_figures",
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "draws": DRAWS,
            "logits_fp32_largest_absolute_difference": max(logits for logits, _ in differences),
            "gradients_fp32_largest_relative_difference": max(gradient for _, gradient in differences),
            "bf16_draws": BF16_DRAWS,
            "logits_bf16_relative_distance_to_fp32": {"ours": mean_ours, "reference": mean_theirs},
            "logits_bf16_ours_over_reference": round(mean_ours / mean_theirs, 3),
            "greedy_draws": GENERATED_DRAWS,
            "greedy_draws_with_the_same_tokens": sum(_same_tokens(draw(seed)) for seed in range(GENERATED_DRAWS)),
        },
    )


def _differences(case: Draw) -> tuple[float, float]:
    """Largest absolute difference of logits, and largest relative one of a parameter's gradient (2-norm)."""
    model = model_of(case)
    reference = reference_of(model, case.rope_base)
    with torch.no_grad():
        logits, _ = ours(model, case)
    expected = theirs(reference, case)
    ours(model, case, case.targets)[0].backward()
    targets_T = case.targets.flatten()
    F.cross_entropy(expected.flatten(0, 1), targets_T, reduction="sum", ignore_index=IGNORED_TARGET).backward()
    names = reference_names(case.config.layers)
    others = gradients_of(dict(reference.named_parameters()))
    pairs = [(one, others[names[name]]) for name, one in gradients_of(dict(model.named_parameters())).items()]
    relative = [(one - other).norm() / other.norm() for one, other in pairs if other.norm() > SMALLEST_NORM]
    return (logits - expected)[case.counted].abs().max().item(), max(relative).item()


def _same_tokens(case: Draw) -> bool:
    model = model_of(case)
    prompt_1S = case.tokens_BS[:1]
    settings: dict[str, Any] = {"max_new_tokens": GENERATED, "temperature": 0.0, "rope_base": case.rope_base}
    made = list(generate(model, prompt_1S[0].tolist(), **settings))
    reference: Any = reference_of(model, case.rope_base)
    expected = reference.generate(prompt_1S, max_new_tokens=GENERATED, do_sample=False)
    return made == expected[0, prompt_1S.shape[1] :].tolist()
