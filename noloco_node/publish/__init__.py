"""What a run has trained, for others. Reads what nodes keep, writes one folder, and knows nothing of the swarm.

weights.py   checkpoints and exported folders -> one model, or the mean of several
folder.py    a Hugging Face folder of it          card.py     its model card
measure.py   its loss on the held-out text        sample.py   its own words
"""
