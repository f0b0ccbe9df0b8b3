"""What is done on the nodes before the ranks start: code, Python environment, container."""
