"""What is built, tested and timed on a GPU in two calls of nine minutes: `make gpu` or `python -m benchmarks gpu`.

command.py      the parts one after the other, most valuable first, each in a process and kept in the result
parts.py        what each part does, its group, and its largest share of the group's time
part.py         runs one part: the process
page.py         a result as a page, with the limits of the card and the estimates for an MI300X
summary.py      figures of a result, for the page and for the documents
step.py         a whole training step of one rank, which these measure:
  profile.py        the share of each part of it
  step_memory.py    its peak memory, and the plan's
train_step.py   forward and backward of zaya1-1b against transformers
muon_step.py    a Muon step of one rank's share of zaya1-8b
"""
