"""The layers of a hybrid decoder; each is its weights and what it does with a step's rows."""
