"""One run of a Trainer, from setup to teardown."""
