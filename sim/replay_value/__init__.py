"""What the policy ``replay-value`` learns in a run."""
