"""Files whose tests share something."""

# Those about what follows a capture: a step is captured once for all its tests (tests/training/conftest.py).
OF_ONE_CAPTURE = {
    *("test_batch_monitor.py", "test_batch_size.py", "test_callback.py", "test_cli_of_lightning.py", "test_data.py"),
    *("test_divided.py", "test_earlier_runs.py", "test_epochs.py", "test_guard_settings.py", "test_measuring.py"),
    *("test_resume.py", "test_run_report.py", "test_sizes_of_hooks.py"),
}

# One worker makes it: processes, trainings, plans, captures.
ONE_WORKER = OF_ONE_CAPTURE | {
    *("test_ranks.py", "test_advise.py", "test_ddp.py", "test_layouts_of_ranks.py", "test_examples.py"),
    *("test_without_tensorboard.py", "test_ways.py", "test_deepspeed.py", "test_nvml.py", "test_compiled.py"),
    "test_fake_gpu.py",
}
