"""Property tests of a policy on the engines that host it, against a model that forgets nothing."""
