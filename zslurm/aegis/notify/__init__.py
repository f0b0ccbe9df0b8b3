"""Who hears of events: hooks, the job comment, the event recorder."""
