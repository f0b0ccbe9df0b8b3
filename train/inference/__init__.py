"""Continue many prompts, score continuations, and turn text into tokens and back."""
