"""For every test: one thread a process, because the tensors are tiny and `make test` runs two processes."""

import torch

torch.set_num_threads(1)
