"""What is made of results: comparisons with peers and with other results, plots, and settings of a profile."""
