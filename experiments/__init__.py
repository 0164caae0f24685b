"""The runner: tasks, Flax models, training, evaluation. Nothing imports it; it imports attn."""
