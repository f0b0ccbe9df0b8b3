"""Lightning on a tiny model, with its own checkpoints; it reads the variables of Slurm or of torchrun itself."""

import argparse
import os
from pathlib import Path

import faults
import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from zslurm import progress

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()
torch.set_num_threads(1)


class Tiny(lightning.LightningModule):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch, _):
        (inputs,) = batch
        return (self.layer(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Shown(Callback):
    """Shows each step."""

    def on_train_batch_end(self, trainer, *_):
        progress.step(trainer.global_step)
        faults.after_step(trainer.global_step)


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 32)), batch_size=4)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["NNODES"]),
    strategy="ddp",
    max_steps=options.steps,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
    callbacks=[
        ModelCheckpoint(options.out, filename="{step}", every_n_train_steps=10, save_top_k=-1),
        Shown(),
    ],
)
saved = sorted(options.out.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
trainer.fit(Tiny(), data, ckpt_path=saved[-1] if saved else None)
