"""Programs on the nodes of a job, through srun, and what it prints of them."""
