"""Files that one worker runs whole."""

# Their tests share processes, trainings, plans, captures or trees.
ONE_WORKER = {
    *("test_ranks.py", "test_advise.py", "test_ddp.py", "test_layouts_of_ranks.py", "test_examples.py"),
    *("test_without_tensorboard.py", "test_ways.py", "test_deepspeed.py", "test_nvml.py", "test_compiled.py"),
    *("test_fake_gpu.py", "test_house.py", "test_divided.py", "test_offloading.py"),
}
