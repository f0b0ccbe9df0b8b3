"""What an agent looks at on its node: one sensor for each file (see zslurm.aegis.agent.sensor).

`progress` is read more often than the others, and by the agent itself.
"""
