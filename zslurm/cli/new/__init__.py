"""`zslurm new`: a run file from a recipe, your texts and, for fine-tuning, trained weights."""
