"""What is checked of a run on the login node before it is submitted, one subject a file."""
