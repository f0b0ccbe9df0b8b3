"""The supervisor's side of the agents: start them and keep them alive, heartbeats, commands, answers, liveness."""
