"""What runs inside a job: the step, the rank entry, preparation, containers, the staged environment."""
