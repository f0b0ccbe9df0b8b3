"""Tasks that score a model: what they are, and what a model is asked and its answers are worth. No torch here.

task.py            a task file: its settings, checked
template.py        jinja templates over the fields of a document
task_documents.py  the jsonl files, and which documents are examples
questions.py       from a document to what the model is asked
filters.py         what is done to a generated answer before it is compared
metrics.py         from answers to values of documents, from these to a score and its standard error
sandbox.py         a command that runs a generated program, with limits
shipped/           the tasks that come with zslurm
"""
