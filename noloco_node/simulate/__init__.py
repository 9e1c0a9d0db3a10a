"""Many replicas in one process: NoLoCo and other algorithms on the same model, data and budget, and what networks cost.

settings.py    what is simulated, as frozen dataclasses            replicas.py   R modules and their AdamW
readers.py     the corpus for each replica, i.i.d. or not          baselines.py  DDP, FedAvg, DiLoCo, streaming,
noloco.py      NoLoCo with the core functions of a node,                         SPARTA, GASLoC, local only,
               codecs, overlap, several swaps a phase              sweep.py      the same grid for each algorithm
stages.py      a model in parts, micro-batches on routes                         NoLoCo as the paper writes it
experiment.py  one algorithm from start to end -> a Curve          wallclock.py  hours on links of some rate
attacks.py     what attackers do among the replicas                defences.py  how the others defend themselves
network.py     virtual time: latencies, bandwidth, stragglers      report.py     tables, plots, documents
"""
