"""One file per checkpoint policy; a policy's name is its file's name. See ``sim.policy``."""
