"""A run as a page: its report, and how it compares with another one.

run_facts.py    everything that a report shows of one run, read from its directory
timeline.py     where the wall time went: attempts, their parts, goodput
efficiency.py   what the job used of what it asked for, and advice for the next submission
comparison.py   how two runs differ: configuration, curves, throughput, faults
thinning.py     fewer points that keep the extremes
plots.py        curves, bands and heat maps as inline SVG
page.py         the HTML page (templates/)
markdown.py     the same as Markdown
"""
