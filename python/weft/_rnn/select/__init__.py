"""Which algorithm runs a call: the case, the choice, what each is expected to take, and what was measured."""
