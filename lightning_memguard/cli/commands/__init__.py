"""The commands, one file each: `add_arguments` describes options of its own, `run` answers."""
