"""What is cached, when, and what it costs: engines, policies, cost model and the replay loop."""
