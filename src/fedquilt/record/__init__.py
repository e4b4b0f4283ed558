"""What a run leaves behind: its folder, its checkpoints, its result, and which keys are public."""
