"""What the files of a checkpoint say."""
