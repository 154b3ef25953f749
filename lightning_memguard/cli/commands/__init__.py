"""The commands, one file each: `add_arguments` describes its options, `run` answers."""
