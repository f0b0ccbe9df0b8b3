"""The Trainer of transformers (which trains through accelerate) on a tiny GPT-2, with its own checkpoints."""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import faults
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from zslurm import progress

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", default="out")
options = parser.parse_args()
torch.set_num_threads(1)


class Shown(TrainerCallback):
    """Shows each step: what on_step_end is for."""

    def on_step_end(self, args, state, control, **_):
        progress.step(state.global_step)
        faults.after_step(state.global_step)


tokens = torch.randint(0, 64, (4096, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir=options.out,
    max_steps=options.steps,
    per_device_train_batch_size=4,
    save_steps=10,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    ddp_backend="gloo",
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Shown()])
last = get_last_checkpoint(options.out) if Path(options.out).is_dir() else None
trainer.train(resume_from_checkpoint=last)
