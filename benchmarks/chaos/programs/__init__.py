"""The training programs: one, and what a contender needs changed in it. They are started as scripts."""
