"""The sbatch script: rendering, templates and their check."""
