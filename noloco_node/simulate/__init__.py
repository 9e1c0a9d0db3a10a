"""Many replicas in one process: NoLoCo and its rivals on the same model, data and budget, and what networks cost them.

settings.py    what is simulated, as frozen dataclasses            llama.py     R small Llamas run as one
data.py        the corpus cut into shards, i.i.d. or not           node/trainer.py   R replicas and their AdamW
algorithms.py  NoLoCo with the daemon's own core functions,        rivals.py    DiLoCo, FedAvg, DDP, local only,
               codecs, overlap, several swaps a phase                           NoLoCo as the paper writes it
experiment.py  one algorithm from start to end -> a Curve          sweep.py     the same effort for each algorithm
network.py     virtual time: latencies, bandwidth, stragglers      report.py    tables, plots, documents
"""
