"""What is built, tested and timed on a GPU in ten minutes: `make gpu`, or `python -m benchmarks gpu`.

command.py      the parts one after the other, most valuable first, each in a process and kept in the result
parts.py        what each part does
part.py         runs one part: the process
muon_step.py    a Muon step of one rank's share of zaya1-8b
train_step.py   a training step of zaya1-1b
"""
