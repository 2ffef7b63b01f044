"""What arrives: trace formats, prefix identity, seeded generators and statistics."""
